"""Clip intervals that depend on the frozen old probability of the sampled token. Ratios r = cur/old, q = e^old."""

from collections.abc import Callable

import torch
from torch import Tensor

from correction.mismatch import LARGEST_LOG_PROB
from correction.ratios import LOG_RATIO_LIMIT

BISECTIONS = {torch.float32: 28, torch.float64: 56}
"""Enough to reach the last bits of each dtype."""
SMALLEST_LOG_RATIO = -LOG_RATIO_LIMIT


def ripo_bounds(old_RT: Tensor, *, delta: float, cap: float) -> tuple[Tensor, Tensor]:
    """`1 -+ sqrt(delta / q)`, cut to [0, cap]; a low end of 0 never binds. Detached. ValueError unless delta > 0, cap > 1."""
    if not (delta > 0 and cap > 1):
        raise ValueError(f"ripo needs delta > 0 and cap > 1, got delta={delta} cap={cap}")
    width_RT = (delta / old_RT.detach().exp()).sqrt()
    return (1 - width_RT).clamp(min=0.0), (1 + width_RT).clamp(max=cap)


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda r: torch.xlogy(r, r) - r + 1,
    "reverse_kl": lambda r: r - 1 - r.log(),
    "tv": lambda r: (r - 1).abs() / 2,
    "chi2": lambda r: (r - 1).square() / 2,
    "abs_log": lambda r: r.log().abs(),
}
"""Generators f with f(1) = 0, falling before 1 and rising after it. kl and reverse_kl are r log r and -log r plus the
multiple of (r - 1) that makes them so; under the binary topology that term cancels."""
TOPOLOGIES = ("mc", "atomic", "binary")


def fdiv_estimate(ratio_RT: Tensor, old_RT: Tensor, *, divergence: str, topology: str) -> Tensor:
    """One token's estimate of the f-divergence between cur and old.

    mc `f(r)`, atomic `q f(r)`, binary `q f(r) + (1 - q) f((1 - q r) / (1 - q))`, for r <= 1/q.
    divergence: kl, reverse_kl, tv, chi2, abs_log (two-sided log, a separate thing from kl). ValueError for other names.
    Binary identities: tv gives |p - q|; kl and reverse_kl give the two directions of KPop's binary KL.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; known: {', '.join(DIVERGENCES)}")
    if topology not in TOPOLOGIES:
        raise ValueError(f"unknown topology {topology!r}; known: {', '.join(TOPOLOGIES)}")
    f = DIVERGENCES[divergence]
    if topology == "mc":
        return f(ratio_RT)
    old_RT = old_RT.clamp(max=LARGEST_LOG_PROB)
    prob_RT = old_RT.exp()
    if topology == "atomic":
        return prob_RT * f(ratio_RT)
    rest_RT = -torch.expm1(old_RT)
    return prob_RT * f(ratio_RT) + rest_RT * f(((1 - prob_RT * ratio_RT) / rest_RT).clamp(min=0.0))


def fdiv_bounds(
    old_RT: Tensor, *, divergence: str, topology: str, delta: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Ends of the interval of ratios around 1 whose `fdiv_estimate` is <= delta, by bisection on log r. Detached.

    The low end is 0 where no ratio is too small; the high end is at most min(cap, 1/q under binary).
    ValueError for unknown names, delta <= 0 or cap <= 1. Source: GPPO (f-divergence x topology). Status: reconstructed.
    """
    if not (delta > 0 and cap > 1):
        raise ValueError(f"fdiv needs delta > 0 and cap > 1, got delta={delta} cap={cap}")
    old_RT = old_RT.detach()
    top_RT = torch.full_like(old_RT, cap).log()
    if topology == "binary":
        top_RT = torch.minimum(top_RT, -old_RT.clamp(max=LARGEST_LOG_PROB))

    def furthest(limit_RT: Tensor) -> Tensor:
        inside_RT, outside_RT = torch.zeros_like(old_RT), limit_RT.clone()
        for _ in range(BISECTIONS[old_RT.dtype]):
            middle_RT = (inside_RT + outside_RT) / 2
            legal_RT = fdiv_estimate(middle_RT.exp(), old_RT, divergence=divergence, topology=topology) <= delta
            inside_RT = torch.where(legal_RT, middle_RT, inside_RT)
            outside_RT = torch.where(legal_RT, outside_RT, middle_RT)
        return inside_RT

    low_RT = furthest(torch.full_like(old_RT, SMALLEST_LOG_RATIO))
    never_too_small_RT = low_RT < SMALLEST_LOG_RATIO * (1 - 1e-6)
    return low_RT.exp().masked_fill(never_too_small_RT, 0.0), furthest(top_RT).exp()
