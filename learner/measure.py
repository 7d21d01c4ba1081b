"""What one update looked like, as numbers for its record: how far off-policy its data was, and what the correctors did about it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from correction.alarms import Seen, Watch, look
from correction.diagnostics import effective_sample_size, kept_mass, quadrant_shares, ratio_summary
from correction.masked import masked_mean
from correction.pipeline import Correction
from correction.ratios import LogRatio, clamped_count, mismatch_log_ratio, policy_log_ratio, total_log_ratio
from learner.batch import Table

CORRECT = 1.0
"""A response with at least this reward counts as correct."""
ENGINE_ID = 12
"""Characters of an engine's fingerprint id that name it in the metrics."""


def measure(table: Table, prox_RT: Tensor, cur_RT: Tensor, advantage_R: Tensor, correction: Correction, side_RT: Tensor,
            version_in: int) -> dict[str, Any]:
    """Shares are of the trainable tokens. ESS after correction counts a masked token as weight 0. side: see `correction.surrogates`.

    mismatch old/mu, staleness_ratio prox/old, update_ratio cur/prox, total_ratio prox/mu: see `correction.diagnostics.ratio_summary`.
    masked_correct: tokens of correct responses that are masked. clipped: tokens with an advantage whose gradient is that of a bound of the
    objective: 0, or with gppo and cispo (and minirl's cap) the bound's own. masked_by, clipped_by: by the advantage's sign and the side of
    the ratio, prox/mu or the one that the bound is on. clamped: tokens with one of these ratios, or cur/old, beyond e^+-20. lags: the
    ratios and what was masked and clipped, of the tokens of each age.
    """
    mask_RT, keep_RT = table.mask_RT, correction.keep_RT
    tokens = int(mask_RT.sum())
    age_R = version_in - torch.where(table.response_RT, table.version_RT, version_in).amin(-1)
    ages, counts = age_R.unique(return_counts=True)
    ratios = {
        "mismatch": mismatch_log_ratio(table.old_RT, table.mu_RT), "staleness_ratio": policy_log_ratio(prox_RT, table.old_RT),
        "update_ratio": policy_log_ratio(cur_RT, prox_RT), "total_ratio": total_log_ratio(prox_RT, table.mu_RT)}

    def taken(those_RT: Tensor) -> dict[str, Any]:
        return what_was_taken(table, ratios["total_ratio"], advantage_R, correction, side_RT, those_RT)

    return {
        "reward": float(table.reward_R.mean()), "tokens": tokens, "tokens_missing": int(table.response_RT.sum()) - tokens,
        "staleness": {"mean": float(age_R.float().mean()), "max": int(age_R.max()),
                      "histogram": {str(int(age)): int(count) for age, count in zip(ages, counts, strict=True)}},
        **{name: factor(log_ratio, mask_RT) for name, log_ratio in ratios.items()},
        "lags": by_lag(ratios, taken, mask_RT, version_in - table.version_RT),
        "engines": by_engine(table),
        "advantage_abs": float(advantage_R.abs().mean()),
        **taken(mask_RT),
        "capped": correction.counts["capped"] / max(1, tokens),
        "clamped": clamped_count((*ratios.values(), policy_log_ratio(cur_RT, table.old_RT)), mask_RT),
        "weight_mean": float(masked_mean(correction.weight_RT, keep_RT)),
    }


def what_was_taken(table: Table, total: LogRatio, advantage_R: Tensor, correction: Correction, side_RT: Tensor,
                   those_RT: Tensor) -> dict[str, Any]:
    """What correctors masked and the objective clipped of those tokens."""
    tokens, keep_RT = max(1, int(those_RT.sum())), correction.keep_RT & those_RT
    masked_RT, clipped_RT = those_RT & ~keep_RT, those_RT & (side_RT != 0) & (advantage_R != 0)[:, None]
    return {
        "masked": int(masked_RT.sum()) / tokens,
        "masked_by": quadrant_shares(masked_RT, total, advantage_R, those_RT),
        "masked_correct": int((masked_RT & (table.reward_R >= CORRECT)[:, None]).sum()) / tokens,
        "kept_mass": kept_mass(total, keep_RT, those_RT),
        "clipped": int(clipped_RT.sum()) / tokens,
        "clipped_by": quadrant_shares(clipped_RT, side_RT, advantage_R, those_RT),
        "ess_corrected": float(effective_sample_size(correction.weight_RT, those_RT))}


def seen_by_alarms(metrics: dict[str, Any]) -> Seen:
    """What `correction.alarms.look` reads of `measure`'s numbers."""
    stale = [values for lag, values in metrics["lags"].items() if int(lag) > 0]
    return Seen(
        stale_tokens=sum(values["tokens"] for values in stale),
        stale_drift=max((values["staleness_ratio"]["max_abs"] for values in stale), default=0.0),
        ess=metrics["ess_corrected"], ess_raw=metrics["total_ratio"]["ess"],
        weight_mean=metrics["weight_mean"] if metrics["masked"] < 1 else 1.0,
        masked=metrics["masked"], mismatch=metrics["mismatch"]["mean_abs"], engines=metrics["engines"], clamped=metrics["clamped"])


def watched(metrics_file: Path) -> tuple[Watch, set[str]]:
    """What `look` had come to remember, and the alarms that were on, after the updates of a metrics.jsonl."""
    watch, alarmed = Watch(), set[str]()
    if metrics_file.exists():
        for metrics in map(json.loads, metrics_file.read_text().splitlines()):
            if not metrics["skipped"]:
                watch, alarms = look(watch, seen_by_alarms(metrics))
                alarmed = set(alarms)
    return watch, alarmed


def factor(log_ratio_RT: LogRatio, mask_RT: Tensor) -> dict[str, float]:
    """One ratio of two policies over the tokens in the mask; all 0 when there is none."""
    values = log_ratio_RT.value[mask_RT]
    largest = float(values.abs().max()) if len(values) else 0.0
    return {**ratio_summary(values, torch.ones_like(values, dtype=torch.bool)), "max_abs": largest}


def by_lag(ratios: dict[str, LogRatio], taken: Callable[[Tensor], dict[str, Any]], mask_RT: Tensor, lag_RT: Tensor) -> dict[str, Any]:
    """To four digits: a line of metrics.jsonl holds this for every age."""
    found = {}
    for lag in torch.unique(lag_RT[mask_RT]).tolist():
        those_RT = mask_RT & (lag_RT == lag)
        summaries = {name: factor(log_ratio, those_RT) for name, log_ratio in ratios.items()}
        found[str(lag)] = {"tokens": int(those_RT.sum()), **_short(summaries), **_short(taken(those_RT))}
    return found


def by_engine(table: Table) -> dict[str, float]:
    """Mean |log old/mu| of each engine's tokens."""
    mismatch_RT = mismatch_log_ratio(table.old_RT, table.mu_RT).value.abs()
    found = {}
    for engine in sorted(set(table.engines)):
        those_RT = table.mask_RT & torch.tensor([one == engine for one in table.engines])[:, None]
        if bool(those_RT.any()):
            found[engine[:ENGINE_ID]] = float(masked_mean(mismatch_RT, those_RT))
    return found


def _short(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _short(value) if isinstance(value, dict) else float(f"{value:.4g}") for name, value in values.items()}
