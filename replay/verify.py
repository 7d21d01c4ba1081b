"""`leeway replay --verify RUN`: may the store be trusted? SQLite's own check, every digest, the ledger's chain, the books.

No daemon is needed. Exit 0 sound, 3 findings, each with the ids concerned. It is the audit without the half that needs a model, after
SQLite's integrity check, and it names what cannot be read instead of failing on it.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from configs.arguments import Parser
from replay.audit import Audit, audit
from replay.audit_rollouts import Finding
from replay.reader import STORE, RunReader, find_run
from wire.errors import ConfigError
from wire.text import printable_lines

FINDINGS = 3
SHOWN = 50
UNREADABLE = (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, msgspec.MsgspecError)
"""What damaged bytes can make of a row, when SQLite reads them as something else."""


def verify(run_dir: Path) -> Audit:
    """Raises ConfigError when there is no run, StoreError when another Leeway made it."""
    if not (run_dir / STORE).is_file():
        with RunReader(run_dir):  # says which runs there are
            raise AssertionError
    try:
        with RunReader(run_dir) as run:
            run.config()
            findings = list(_integrity(run))
        if findings:
            return Audit(findings, [], {})
        return audit(run_dir)
    except ConfigError as error:
        return Audit([Finding("store", [str(run_dir)], str(error))], [], {})
    except UNREADABLE as error:
        return Audit([Finding("store", [STORE], f"a row cannot be read: {type(error).__name__}: {error}")], [], {})


def _integrity(run: RunReader) -> Iterator[Finding]:
    for (line,) in run.sql("PRAGMA integrity_check(20)"):
        if line != "ok":
            yield Finding("integrity", [STORE], f"SQLite: {line}")
    for table, row, parent, _ in run.sql("PRAGMA foreign_key_check"):
        yield Finding("integrity", [f"{table} row {row}"], f"names a row of {parent} that is not there")


def lines(run_dir: Path, found: Audit) -> list[str]:
    shown = [f"verify     {run_dir}"]
    if found.checked:
        shown.append("checked    " + ", ".join(f"{count} {name}" for name, count in found.checked.items()))
    shown += [f"note       {note}" for note in found.notes]
    shown += [f"FINDING    [{finding.kind}] {', '.join(finding.ids)}: {finding.text}" for finding in found.findings[:SHOWN]]
    if len(found.findings) > SHOWN:
        shown.append(f"FINDING    and {len(found.findings) - SHOWN} more")
    return [*shown, f"result     {f'{len(found.findings)} findings' if found.findings else 'sound'}"]


def main(argv: list[str]) -> int:
    build = Parser("leeway replay", allow_abbrev=False, usage="leeway replay --verify RUN")
    build.add_argument("--verify", required=True, type=find_run, metavar="RUN")
    options, others = build.parse_known_args(argv)
    if others:
        raise ConfigError(f"`leeway replay --verify RUN` takes nothing else: leave out {' '.join(others)}")
    run_dir = options.verify
    found = verify(run_dir)
    print(printable_lines("\n".join(lines(run_dir, found))))
    return FINDINGS if found.findings else 0
