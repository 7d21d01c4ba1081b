"""Scalars that say how far the data is off-policy, and what the correctors made of it."""

import math

import torch
from torch import Tensor

from correction.masked import check_mask, masked_mean, sanitise
from correction.ratios import LOG_RATIO_LIMIT, LogRatio, plain, ratio


def effective_sample_size(weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Kish's effective share `(sum w)^2 / (n * sum w^2)`, scalar in [0, 1]; 0 if all weights are 0.

    n counts the masked-in elements. Source: Kish 1965. Status: established.
    """
    mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
    check_mask(mask, weight)
    weight = sanitise(weight.detach(), mask)
    scale = weight.amax() if weight.numel() else weight.new_zeros(())
    weight = weight / torch.where(scale > 0, scale, torch.ones_like(scale))  # squares of large weights overflow
    total, squares, count = weight.sum(), weight.square().sum(), mask.sum()
    return torch.where(squares > 0, total.square() / (count * squares).clamp(min=torch.finfo(weight.dtype).tiny), 0.0)


def k3(log_ratio: Tensor | LogRatio, mask: Tensor | None = None) -> Tensor:
    """Mean of `exp(x) - 1 - x` over masked-in elements, scalar >= 0.

    An estimate of KL(sampler || other) for x = log other/sampler. Source: Schulman 2020, "Approximating KL divergence".
    Status: established.
    """
    value = plain(log_ratio, LogRatio).detach()
    if mask is not None:
        check_mask(mask, value)
        value = sanitise(value, mask)
    return masked_mean(torch.expm1(value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - value, mask)


def weight_entropy(weight: Tensor, mask: Tensor) -> float:
    """Entropy of the weights, normalised to sum 1, over that of equal ones: 1 is even, 0 is one token; 0 without a
    weight or with a single token."""
    check_mask(mask, weight)
    share = sanitise(weight.detach(), mask).double()
    total, count = float(share.sum()), int(mask.sum())
    if total <= 0 or count < 2:
        return 0.0
    share = share / total
    return max(0.0, float(-torch.xlogy(share, share).sum()) / math.log(count))


def ratio_summary(log_ratio_RT: Tensor | LogRatio, mask_RT: Tensor) -> dict[str, float]:
    """One factor's drift over the masked-in tokens, for the metrics; all 0 when there are none.

    mean and mean_abs of the log-ratio x (both, since signed drift cancels in the first), k1 = -mean, k3,
    chi2 = mean of (ratio - 1)^2, ess of the raw ratios, max_ratio.
    """
    value_RT = plain(log_ratio_RT, LogRatio).detach()
    check_mask(mask_RT, value_RT)
    value_RT = sanitise(value_RT, mask_RT)
    ratio_RT = ratio(value_RT)
    mean = float(masked_mean(value_RT, mask_RT))
    return {
        "mean": mean,
        "mean_abs": float(masked_mean(value_RT.abs(), mask_RT)),
        "k1": -mean,
        "k3": float(k3(value_RT, mask_RT)),
        "chi2": float(masked_mean((ratio_RT - 1).square(), mask_RT)),
        "ess": float(effective_sample_size(ratio_RT, mask_RT)),
        "max_ratio": float(sanitise(ratio_RT, mask_RT).amax()) if mask_RT.numel() else 0.0,
    }


def kept_mass(log_ratio_RT: Tensor | LogRatio, keep_RT: Tensor, mask_RT: Tensor) -> float:
    """Share of the raw ratios' sum that the kept tokens hold; 0 when there is no token."""
    value_RT = plain(log_ratio_RT, LogRatio).detach()
    check_mask(mask_RT, value_RT, keep_RT)
    ratio_RT = sanitise(ratio(sanitise(value_RT, mask_RT)), mask_RT)
    total = float(ratio_RT.sum())
    return float(sanitise(ratio_RT, keep_RT).sum()) / total if total > 0 else 0.0


def quadrant_shares(
    hit_RT: Tensor, log_ratio_RT: Tensor | LogRatio, advantage_R: Tensor, mask_RT: Tensor
) -> dict[str, float]:
    """Share of masked-in tokens that are hit (masked away, clipped), by advantage sign and side of ratio 1; 0 without
    one.

    An exact ratio of 1 counts as high, and a token without an advantage as neither sign.
    """
    value_RT = plain(log_ratio_RT, LogRatio).detach()
    check_mask(mask_RT, value_RT, hit_RT)
    low_RT = sanitise(value_RT, mask_RT) < 0
    hit_RT = hit_RT & mask_RT
    count = max(int(mask_RT.sum()), 1)
    signs = {"positive": advantage_R > 0, "negative": advantage_R < 0}
    sides = {"low": low_RT, "high": ~low_RT}
    return {
        f"{sign}_{side}": int((hit_RT & side_RT & sign_R[:, None]).sum()) / count
        for sign, sign_R in signs.items()
        for side, side_RT in sides.items()
    }
