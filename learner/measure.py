"""What one update looked like, as numbers for its record: how far off-policy its data was, and what the correctors did about it."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import Recipe
from correction.diagnostics import effective_sample_size, k3
from correction.pipeline import Correction
from correction.ratios import mismatch_log_ratio, policy_log_ratio, ratio
from learner.batch import Table


def measure(table: Table, prox_RT: Tensor, cur_RT: Tensor, advantage_R: Tensor, correction: Correction, recipe: Recipe,
            version_in: int) -> dict[str, Any]:
    """Shares are of the trainable tokens. ESS after correction counts a masked token as weight 0."""
    mask_RT = table.mask_RT
    base_RT = table.old_RT if recipe.base == "old" else prox_RT
    tokens = int(mask_RT.sum())
    age_R = version_in - torch.where(table.response_RT, table.version_RT, version_in).amin(-1)
    ages, counts = age_R.unique(return_counts=True)
    metrics = {
        "reward": float(table.reward_R.mean()), "tokens": tokens, "tokens_missing": int(table.response_RT.sum()) - tokens,
        "staleness": {"mean": float(age_R.float().mean()), "max": int(age_R.max()),
                      "histogram": {str(int(age)): int(count) for age, count in zip(ages, counts, strict=True)}},
        "mismatch": factor(mismatch_log_ratio(table.old_RT, table.mu_RT).value, mask_RT),
        "staleness_ratio": factor(policy_log_ratio(prox_RT, table.old_RT).value, mask_RT),
        "update_ratio": factor(policy_log_ratio(cur_RT, prox_RT).value, mask_RT),
        "advantage_abs": float(advantage_R.abs().mean()),
        "masked": 1 - correction.counts["kept"] / max(1, tokens),
        "capped": (correction.counts.get("engine_capped", 0) + correction.counts.get("group_mass_capped", 0)) / max(1, tokens),
        "clamped": correction.counts.get("engine_clamped", 0),
        "clipped": clipped_share(cur_RT, base_RT, advantage_R, mask_RT, recipe),
        "ess_corrected": float(effective_sample_size(correction.weight_RT, mask_RT)),
    }
    return metrics


def factor(log_ratio_RT: Tensor, mask_RT: Tensor) -> dict[str, float]:
    """One of the three factors of cur/mu, over the trainable tokens."""
    values = log_ratio_RT[mask_RT]
    if not len(values):
        return {"mean": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "k3": 0.0, "ess": 0.0}
    return {"mean": float(values.mean()), "mean_abs": float(values.abs().mean()), "max_abs": float(values.abs().max()),
            "k3": float(k3(values)), "ess": float(effective_sample_size(ratio(values)))}


def clipped_share(cur_RT: Tensor, base_RT: Tensor, advantage_R: Tensor, mask_RT: Tensor, recipe: Recipe) -> float:
    """Share of tokens whose loss is on the flat side of the clip (ppo, gppo, gspo) or whose weight is at the cap (cispo)."""
    if recipe.objective in ("score", "unit"):
        return 0.0
    log_ratio_RT = torch.where(mask_RT, cur_RT - base_RT, 0.0)
    if recipe.objective == "gspo":
        log_ratio_RT = (log_ratio_RT.sum(-1) / mask_RT.sum(-1).clamp(min=1))[:, None].expand_as(log_ratio_RT)
    ratio_RT, advantage_RT = ratio(log_ratio_RT), advantage_R[:, None]
    if recipe.objective == "cispo":
        at_bound_RT = ratio_RT > recipe.cap
    else:
        at_bound_RT = ((ratio_RT > 1 + recipe.clip_high) & (advantage_RT > 0)) | ((ratio_RT < 1 - recipe.clip_low) & (advantage_RT < 0))
    return float((at_bound_RT & mask_RT).sum()) / max(1, int(mask_RT.sum()))
