"""How far off-policy the data was, by factor and by age: the newest update for `leeway stats`, all of them for the report. Its words:
docs/methods.md, Diagnostics."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from leeway.charts import number
from replay.reader import RunReader

FACTORS = {"mismatch": "old/mu", "staleness_ratio": "prox/old", "update_ratio": "cur/prox", "total_ratio": "prox/mu"}
SHARES = {"masked": "masked", "clipped": "clipped", "ess_corrected": "ESS of the weights"}


def newest(run: RunReader) -> dict[str, Any] | None:
    """From the newest update that made a step, what its metrics hold of FACTORS, SHARES and `lags`; None before one."""
    found = run.sql("""SELECT update_id, json_extract(record, '$.metrics') FROM updates WHERE state = 'committed' AND NOT skipped
                       ORDER BY update_id DESC LIMIT 1""")
    if not found:
        return None
    metrics = json.loads(found[0][1])
    return {"update": found[0][0]} | {key: metrics[key] for key in (*FACTORS, *SHARES, "lags") if key in metrics}


def by_age(metrics: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """A row per age, the youngest first: age, tokens, then FACTORS (mean |log-ratio|) and SHARES, each a mean over the tokens of that age
    in all updates. An ESS is an update's own; here it is the mean of theirs, by tokens. NaN where an update did not measure it."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * (1 + len(FACTORS) + len(SHARES)))
    for of in metrics:
        for age, lag in of.get("lags", {}).items():
            seen = [1.0, *(lag.get(key, {}).get("mean_abs", math.nan) for key in FACTORS), *(lag.get(key, math.nan) for key in SHARES)]
            sums[int(age)] = [total + lag["tokens"] * value for total, value in zip(sums[int(age)], seen, strict=True)]
    return [[age, tokens, *(total / tokens for total in totals)] for age, (tokens, *totals) in sorted(sums.items())]


def lines(found: Mapping[str, Any] | None) -> list[str]:
    """For people: one line for all tokens, and one for each age when there are several."""
    if found is None or "mismatch" not in found:
        return []
    ages = found.get("lags", {})
    parted = [f"of age {age}: {_said(lag)}" for age, lag in ages.items()] if len(ages) > 1 else []
    return [f"update {found['update']}: {_said(found)}", *parted]


def _said(of: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {number(of[key]['mean_abs'])}" for key, name in FACTORS.items() if key in of)
    shares = [f"{name} {number(of[key])}" for key, name in SHARES.items() if key in of]
    return "; ".join([f"mean |log-ratio| {sizes}", *([", ".join(shares)] if shares else [])])
