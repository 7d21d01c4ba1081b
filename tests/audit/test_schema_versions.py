"""A run that another Leeway made: every command that reads it says so in one line, and what to do."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from leeway import audit_command, export_command, report, sft_command, stats_command, versions_command, whatif
from leeway.tools import one_line
from replay.store import SCHEMA_VERSION
from replay.verify import main as verify_main
from wire.digest import digest

READERS: dict[str, Callable[[str], int]] = {
    "stats": lambda run: stats_command.main([run]),
    "audit": lambda run: audit_command.main([run]),
    "audit --rollout": lambda run: audit_command.main([run, "--rollout", "t0000008.1.0"]),
    "audit --update": lambda run: audit_command.main([run, "--update", "1"]),
    "export": lambda run: export_command.main([run, "--format", "jsonl"]),
    "sft-export": lambda run: sft_command.main([run, "--min-reward", "1"]),
    "report": lambda run: report.main([run]),
    "versions": lambda run: versions_command.main([run]),
    "whatif": lambda run: whatif.main([run, "--update", "1"]),
    "replay --verify": lambda run: one_line(lambda: verify_main(["--verify", run])),
}


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
@pytest.mark.parametrize("name", READERS)
def test_it_is_refused_by_name(
    run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str], name: str, version: int
) -> None:
    damage(f"PRAGMA user_version = {version}")
    assert READERS[name](str(run)) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert f"replay.sqlite has schema version {version}, this Leeway reads {SCHEMA_VERSION}: go on with this run, or look into it" in error
    assert not (run / "report.html").exists()


def test_the_number_is_raised_with_the_schema() -> None:
    """Whoever changes a table changes this test, and thinks of SCHEMA_VERSION."""
    schema = (Path(__file__).parents[2] / "replay" / "schema.sql").read_text()
    statements = re.sub(r"\s+", " ", re.sub(r"--.*", "", schema))
    assert (SCHEMA_VERSION, digest(statements.encode())[:16]) == (2, "c75466657851890f")
