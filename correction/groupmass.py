"""Group-mass capping of whole-response importance ratios."""

import math

import torch
from torch import Tensor

from correction.groups import Groups
from correction.ratios import TotalLogRatio, plain


def cap_group_mass(log_ratio_R: Tensor | TotalLogRatio, group_R: Tensor, *, cap: float | Tensor) -> Tensor:
    """`r_i * min(1, cap / sum of the group's r)`, [R], detached, in log space: long responses do not overflow.

    log_ratio_R: whole-response `prox - mu`, as the update begins, summed over the original mask; -inf for a response
    that is not there. cap: absolute mass of a group, or one value per response [R], equal within a group. Groups must
    be complete. Ratios within a group are preserved, and groups never mix. ValueError for NaN, +inf or a cap <= 0.
    Source: GMC-GRPO, arXiv 2610.01896. No default: the paper prints no number. Status: established (the choice of cap:
    reconstructed).
    """
    log_ratio_R = plain(log_ratio_R, TotalLogRatio).detach()
    if log_ratio_R.shape != group_R.shape:
        raise ValueError(f"log_ratio_R {tuple(log_ratio_R.shape)} and group_R {tuple(group_R.shape)} differ in shape")
    if not bool((log_ratio_R < math.inf).all()):
        raise ValueError("cap_group_mass got a log-ratio that is NaN or +inf")
    log_cap = torch.as_tensor(cap, dtype=log_ratio_R.dtype, device=log_ratio_R.device).log()
    if not bool((log_cap > -math.inf).all()):
        raise ValueError(f"group-mass cap must be > 0, got {cap}")
    groups = Groups(group_R)
    top_R = groups.max(log_ratio_R)
    top_R = torch.where(top_R > -math.inf, top_R, 0.0)  # a group of absent responses only
    below_R = log_ratio_R - top_R  # float32 keeps no decimals of a log-ratio in the thousands
    return (below_R + torch.minimum(top_R, log_cap - groups.logsumexp(below_R))).exp()
