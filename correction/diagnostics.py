"""Scalars that say how far the data is off-policy."""

import torch
from torch import Tensor

from correction.masked import check_mask, masked_mean, sanitise
from correction.ratios import LOG_RATIO_LIMIT, LogRatio, plain


def effective_sample_size(weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Kish's effective share `(sum w)^2 / (n * sum w^2)`, scalar in [0, 1], n = masked-in elements; 0 if all weights
    are 0."""
    mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
    check_mask(mask, weight)
    weight = sanitise(weight.detach(), mask)
    scale = weight.amax() if weight.numel() else weight.new_zeros(())
    weight = weight / torch.where(scale > 0, scale, torch.ones_like(scale))  # squares of large weights overflow
    total, squares, count = weight.sum(), weight.square().sum(), mask.sum()
    return torch.where(squares > 0, total.square() / (count * squares).clamp(min=torch.finfo(weight.dtype).tiny), 0.0)


def k3(log_ratio: Tensor | LogRatio, mask: Tensor | None = None) -> Tensor:
    """Mean of `exp(x) - 1 - x` over masked-in elements, scalar >= 0: an estimate of KL(sampler || other), x = log
    other/sampler.

    Source: Schulman 2020, "Approximating KL divergence". Status: established.
    """
    value = plain(log_ratio, LogRatio).detach()
    if mask is not None:
        check_mask(mask, value)
        value = sanitise(value, mask)
    return masked_mean(torch.expm1(value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - value, mask)
