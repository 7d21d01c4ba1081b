"""`leeway versions RUN [--json]`: every version of the weights, where it came from, whether it is stored, and what was sampled with it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from leeway.charts import number
from leeway.tools import one_line, tool_parser
from replay.reader import RunReader
from replay.rows import CheckpointRow, EvalRow, VersionRow
from wire.text import printable_lines

HEAD = ("version", "from", "update", "state", "files", "checkpoint", "rollouts", "tokens", "held-out", "weights")
SAMPLED = 'SELECT version, count(DISTINCT rollout_id), sum("end" - start) FROM spans GROUP BY version'
DIGEST = 16
"""Characters of a weights digest that are shown; --json has all."""


def versions(run_dir: Path) -> list[dict[str, Any]]:
    """A row per version, the oldest first, as plain JSON. rollouts, tokens: stored training samples with a token of that version, and those
    tokens. heldout: [sampled, greedy] of each finished evaluation. Raises ConfigError when there is no run."""
    with RunReader(run_dir) as run:
        sampled = {version: {"rollouts": rollouts, "tokens": tokens} for version, rollouts, tokens in run.sql(SAMPLED)}
        checkpoints = {row.version: row.state for row in run.read(CheckpointRow)}
        heldout: dict[int, list[list[float | None]]] = defaultdict(list)
        for row in run.read(EvalRow, "state = 'done'"):
            heldout[row.version].append([row.sampled, row.greedy])
        return [
            {
                **row._asdict(), "retained": bool(row.retained), "checkpoint": checkpoints.get(row.version),
                "heldout": heldout[row.version], **sampled.get(row.version, {"rollouts": 0, "tokens": 0}),
            }
            for row in run.read(VersionRow)
        ]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The same for people: a line each, under a head."""
    table = [HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    came = "-" if row["parent"] is None else f"v{row['parent']}"
    update = "-" if row["update_id"] is None else str(row["update_id"])
    shares = ", ".join(f"{number(sampled)} / {number(greedy)}" for sampled, greedy in row["heldout"]) or "-"
    return (f"v{row['version']}", came, update, row["state"], "stored" if row["retained"] else "removed", row["checkpoint"] or "-",
            number(row["rollouts"]), number(row["tokens"]), shares, row["weights_digest"][:DIGEST])


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway versions", __doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def body() -> int:
        rows = versions(options.run)
        print(json.dumps(rows, indent=1) if options.json else printable_lines("\n".join(lines(rows))))
        return 0

    return one_line(body)
