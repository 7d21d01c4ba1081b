"""docs/recipe-curves.jsonl: one line per measured case, kept in the order of the plan."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from scripts.bench.runs import Measured
from scripts.curves.plan import ROOT, WARMUP, Case, cases

FILE = ROOT / "docs" / "recipe-curves.jsonl"

LOCK = threading.Lock()
"""The file is read and written anew for every row, and runs end side by side."""

Row = dict[str, Any]
"""recipe, engine, budget, source (digest), measured (date); then either `failed` (one line), or what `learned` gives."""


def read(path: Path = FILE) -> dict[Case, Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {Case(row["recipe"], row["engine"], row["budget"]): row for row in found}


def keep(case: Case, source: str, result: Row, path: Path = FILE) -> None:
    """Put the case's row in the place of an older one. Cases of recipes that are no more are left out."""
    with LOCK:
        known = read(path)
        known[case] = {**case._asdict(), "source": source, "measured": time.strftime("%Y-%m-%d"), **result}
        lines = [json.dumps(known[case]) + "\n" for case in cases() if case in known]
        staged = path.with_suffix(".tmp")
        staged.write_text("".join(lines))
        staged.replace(path)


def learned(run: Measured, lr: float) -> Row:
    """reward: mean verdict of each update's rollouts. heldout: share right before the first and after the last update. The rest are means
    over the updates: staleness in versions; shares of the trained tokens that were masked and clipped; ESS of old/mu and of prox/old."""
    stepped = [line for line in run.lines if not line["skipped"]]
    return {
        "lr": lr,
        "warmup": WARMUP,
        "updates": run.summary["updates"],
        "skipped": run.summary["updates_skipped"],
        "reward": [round(line["reward"], 3) for line in run.lines],
        "heldout": run.summary["heldout"],
        "staleness": round(run.summary["mean_staleness_trained"], 2),
        "masked": _mean([line["masked"] for line in stepped]),
        "clipped": _mean([line["clipped"] for line in stepped]),
        "engine_ess": _mean([line["mismatch"]["ess"] for line in stepped]),
        "staleness_ess": _mean([line["staleness_ratio"]["ess"] for line in stepped]),
        "updates_per_s": round(run.updates_per_s, 2),
    }


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None
