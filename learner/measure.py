"""What one update looked like, as numbers for its record: how far off-policy its data was, and what the correctors did about it."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import Recipe
from correction.alarms import Seen
from correction.diagnostics import effective_sample_size, kept_mass, quadrant_shares, ratio_summary
from correction.masked import masked_mean
from correction.pipeline import Correction
from correction.ratios import LogRatio, mismatch_log_ratio, policy_log_ratio, ratio, total_log_ratio
from learner.batch import Table

CORRECT = 1.0
"""A response with at least this reward counts as correct."""
ENGINE_ID = 12
"""Characters of an engine's fingerprint id that name it in the metrics."""


def measure(table: Table, prox_RT: Tensor, cur_RT: Tensor, advantage_R: Tensor, correction: Correction, recipe: Recipe,
            version_in: int) -> dict[str, Any]:
    """Shares are of the trainable tokens. ESS after correction counts a masked token as weight 0.

    mismatch old/mu, staleness_ratio prox/old, update_ratio cur/prox, total_ratio prox/mu: see `correction.diagnostics.ratio_summary`. lags:
    the same of the tokens of each age in versions, with what the correctors left of them. masked_by and clipped_by: by the advantage's sign
    and the side of the ratio (prox/mu, cur/base). masked_correct: tokens of correct responses that are masked.
    """
    mask_RT, keep_RT = table.mask_RT, correction.keep_RT
    base_RT = table.old_RT if recipe.base == "old" else prox_RT
    tokens = int(mask_RT.sum())
    age_R = version_in - torch.where(table.response_RT, table.version_RT, version_in).amin(-1)
    ages, counts = age_R.unique(return_counts=True)
    factors = {
        "mismatch": mismatch_log_ratio(table.old_RT, table.mu_RT), "staleness_ratio": policy_log_ratio(prox_RT, table.old_RT),
        "update_ratio": policy_log_ratio(cur_RT, prox_RT)}
    total = total_log_ratio(prox_RT, table.mu_RT)
    masked_RT, clipped_RT = mask_RT & ~keep_RT, clipped(cur_RT, base_RT, advantage_R, mask_RT, recipe)
    return {
        "reward": float(table.reward_R.mean()), "tokens": tokens, "tokens_missing": int(table.response_RT.sum()) - tokens,
        "staleness": {"mean": float(age_R.float().mean()), "max": int(age_R.max()),
                      "histogram": {str(int(age)): int(count) for age, count in zip(ages, counts, strict=True)}},
        **{name: factor(log_ratio, mask_RT) for name, log_ratio in factors.items()}, "total_ratio": factor(total, mask_RT),
        "lags": by_lag(factors, total, correction, mask_RT, version_in - table.version_RT),
        "engines": by_engine(table),
        "advantage_abs": float(advantage_R.abs().mean()),
        "masked": 1 - correction.counts["kept"] / max(1, tokens),
        "masked_by": quadrant_shares(masked_RT, total, advantage_R, mask_RT),
        "masked_correct": int((masked_RT & (table.reward_R >= CORRECT)[:, None]).sum()) / max(1, tokens),
        "kept_mass": kept_mass(total, keep_RT, mask_RT),
        "capped": (correction.counts.get("engine_capped", 0) + correction.counts.get("group_mass_capped", 0)) / max(1, tokens),
        "clamped": correction.counts.get("engine_clamped", 0),
        "clipped": int(clipped_RT.sum()) / max(1, tokens),
        "clipped_by": quadrant_shares(clipped_RT, policy_log_ratio(cur_RT, base_RT), advantage_R, mask_RT),
        "ess_corrected": float(effective_sample_size(correction.weight_RT, mask_RT)),
        "weight_mean": float(masked_mean(correction.weight_RT, keep_RT)),
    }


def seen_by_alarms(metrics: dict[str, Any]) -> Seen:
    """What `correction.alarms.look` reads of `measure`'s numbers."""
    stale = [values for lag, values in metrics["lags"].items() if int(lag) > 0]
    return Seen(
        stale_tokens=sum(values["tokens"] for values in stale),
        stale_drift=max((values["staleness_ratio"]["max_abs"] for values in stale), default=0.0),
        ess=metrics["ess_corrected"], ess_raw=metrics["total_ratio"]["ess"],
        weight_mean=metrics["weight_mean"] if metrics["masked"] < 1 else 1.0,
        masked=metrics["masked"], mismatch=metrics["mismatch"]["mean_abs"], engines=metrics["engines"])


def factor(log_ratio_RT: LogRatio, mask_RT: Tensor) -> dict[str, float]:
    """One ratio of two policies over the tokens in the mask; all 0 when there is none."""
    values = log_ratio_RT.value[mask_RT]
    largest = float(values.abs().max()) if len(values) else 0.0
    return {**ratio_summary(values, torch.ones_like(values, dtype=torch.bool)), "max_abs": largest}


def by_lag(factors: dict[str, Any], total: LogRatio, correction: Correction, mask_RT: Tensor, lag_RT: Tensor) -> dict[str, Any]:
    """To four digits: a line of metrics.jsonl holds this for every age."""
    found = {}
    for lag in torch.unique(lag_RT[mask_RT]).tolist():
        those_RT = mask_RT & (lag_RT == lag)
        tokens = int(those_RT.sum())
        found[str(lag)] = {
            "tokens": tokens, **{name: _short(factor(log_ratio, those_RT)) for name, log_ratio in factors.items()},
            **_short({"masked": 1 - int((correction.keep_RT & those_RT).sum()) / tokens,
                      "kept_mass": kept_mass(total, correction.keep_RT & those_RT, those_RT),
                      "ess_corrected": float(effective_sample_size(correction.weight_RT, those_RT))})}
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


def _short(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def clipped(cur_RT: Tensor, base_RT: Tensor, advantage_R: Tensor, mask_RT: Tensor, recipe: Recipe) -> Tensor:
    """Tokens whose loss is on the flat side of the clip (ppo, gppo, gspo) or whose weight is at the cap (cispo), bool [R, T]."""
    if recipe.objective in ("score", "unit"):
        return torch.zeros_like(mask_RT)
    log_ratio_RT = torch.where(mask_RT, cur_RT - base_RT, 0.0)
    if recipe.objective == "gspo":
        log_ratio_RT = (log_ratio_RT.sum(-1) / mask_RT.sum(-1).clamp(min=1))[:, None].expand_as(log_ratio_RT)
    ratio_RT, advantage_RT = ratio(log_ratio_RT), advantage_R[:, None]
    if recipe.objective == "cispo":
        return mask_RT & (ratio_RT > recipe.cap)
    return mask_RT & (((ratio_RT > 1 + recipe.clip_high) & (advantage_RT > 0)) | ((ratio_RT < 1 - recipe.clip_low) & (advantage_RT < 0)))
