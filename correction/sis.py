"""Selective importance sampling: accept some stale tokens as if the current policy had sampled them.

An accepted token gets ratio 1 with a live gradient (`token_losses(..., accepted_RT=...)`); a rejected one keeps its
host objective. Randomness is counter-based: a draw depends only on its keys, never on order, rank or device.
"""

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def counter_uniform(seed: int, update: int, row_R: Tensor, width: int) -> Tensor:
    """Uniform draws in [0, 1), float64 [R, width], keyed by (seed, update, row, position).

    row_R: int64 number of each response that survives reordering and splitting (its place in the lease, say); TypeError otherwise.
    Source: splitmix64 (Steele et al. 2014), chained over the keys.
    """
    if row_R.dtype != torch.int64:
        raise TypeError(f"row numbers must be int64, got {row_R.dtype}")
    state = torch.full((1, 1), seed, dtype=torch.int64, device=row_R.device)
    for key in (torch.full_like(state, update), row_R[:, None], torch.arange(width, device=row_R.device)[None, :]):
        state = _splitmix64(state) ^ key
    return _shift_right(_splitmix64(state), 11).double() / (1 << 53)


def sis_accept(
    token_RT: Tensor,
    topk_token_RTK: Tensor,
    topk_now_RTK: Tensor,
    topk_mu_RTK: Tensor,
    mask_RT: Tensor,
    *,
    uniform_RT: Tensor,
) -> Tensor:
    """Which tokens to accept, bool [R, T]: a token in the behaviour top-K, with probability `w / max over top-K of w`.

    w = e^(now - mu); now: the current policy (cur, or prox as the update begins) at the behaviour policy's top-K ids.
    Entries whose mu is -inf are absent. With K = the vocabulary, accepted tokens follow the current policy exactly;
    with less, to within its mass outside the top-K. w is the total ratio, so an accepted token takes no engine weight.
    Source: SIS, arXiv 2607.04728; K = 10. Status: established. TypeError for a mask that is not bool,
    ValueError for NaN.
    """
    if mask_RT.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask_RT.dtype}")
    present_RTK = (topk_mu_RTK != -math.inf) & mask_RT[..., None]
    log_weight_RTK = torch.where(present_RTK, topk_now_RTK.detach() - topk_mu_RTK, -math.inf)
    if bool(log_weight_RTK.isnan().any()):
        raise ValueError("sis_accept got NaN among the top-K log-probs of trainable tokens")
    sampled_RTK = present_RTK & (topk_token_RTK == token_RT[..., None])
    envelope_RT = log_weight_RTK.amax(-1)
    log_weight_RT = log_weight_RTK.masked_fill(~sampled_RTK, -math.inf).amax(-1)
    # outside the top-K the probability is e^-inf = 0, in masked slots NaN: both compare False
    return uniform_RT < (log_weight_RT - envelope_RT).exp()


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(state: Tensor) -> Tensor:
    """The splitmix64 output function on int64, whose products wrap."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)
