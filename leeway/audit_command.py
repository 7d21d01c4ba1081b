"""`leeway audit RUN [--rollout ID | --update U] [--json]`: check a run's record, and re-score a sample of it. Exit 0 clean, 3 findings."""

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from leeway import rerunning
from leeway.rescoring import rescore_sample
from leeway.rollout_table import rollout_table, text
from leeway.tools import one_line, tool_parser
from replay.audit import audit
from wire.text import printable_lines

FINDINGS = 3
SHOWN_PER_KIND = 10


def full_audit(run_dir: Path) -> dict[str, Any]:
    """Both halves of the audit, as plain JSON. Raises ConfigError when there is no run."""
    found = audit(run_dir)
    again = rescore_sample(run_dir)
    return {
        "run": str(run_dir),
        "checked": found.checked,
        "rescored": {"exact": again.exact, "close": again.close, "largest_difference": again.largest},
        "notes": [*found.notes, *again.notes],
        "findings": [finding._asdict() for finding in (*found.findings, *again.findings)],
    }


def lines(values: dict[str, Any]) -> list[str]:
    """The same for people."""
    again, findings = values["rescored"], values["findings"]
    scored = f"{again['exact'] + again['close']} spans from the stored weights"
    if again["exact"]:
        scored += f", {again['exact']} of them with the recorded trainer: these must agree bit for bit"
    if again["close"]:
        scored += f", {again['close']} on another trainer: largest difference {again['largest_difference']:.2g}"
    shown = [
        ("audit", values["run"]),
        ("checked", ", ".join(f"{count} {name}" for name, count in values["checked"].items())),
        ("re-scored", scored),
    ]
    shown += [("note", note) for note in values["notes"]]
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding["kind"]] += 1
        if seen[finding["kind"]] <= SHOWN_PER_KIND:
            shown.append(("FINDING", f"[{finding['kind']}] {', '.join(finding['ids'])}: {finding['text']}"))
    shown += [
        ("FINDING", f"[{kind}] and {count - SHOWN_PER_KIND} more of this kind; --json lists them all")
        for kind, count in seen.items()
        if count > SHOWN_PER_KIND
    ]
    shown.append(("result", f"{len(findings)} findings" if findings else "clean"))
    return [f"{label:10} {line}" for label, line in shown]


def rerun(run_dir: Path, update: int, *, as_json_text: bool) -> int:
    """Prints on rank 0 only, when it runs under torchrun."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and DeepSpeed read the environment when imported
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints as it starts
        found = rerunning.rerun_update(run_dir, update)
    if os.environ.get("RANK", "0") == "0":
        values = rerunning.as_json(run_dir, update, found)
        print(json.dumps(values, indent=1) if as_json_text else "\n".join(rerunning.lines(run_dir, update, found)))
    return FINDINGS if found.findings else 0


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway audit", __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rollout", metavar="ID", help="print one rollout token by token")
    which.add_argument("--update", metavar="U", type=int, help="run one update again and compare")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def body() -> int:
        if options.update is not None:
            return rerun(options.run, options.update, as_json_text=options.json)
        if options.rollout is not None:
            values = rollout_table(options.run, options.rollout)
            print(json.dumps(values, indent=1) if options.json else printable_lines(text(values)))
            return 0
        values = full_audit(options.run)
        print(json.dumps(values, indent=1) if options.json else printable_lines("\n".join(lines(values))))
        return FINDINGS if values["findings"] else 0

    return one_line(body)
