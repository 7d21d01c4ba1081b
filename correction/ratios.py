"""Log-ratios between two policies. Their signs, their types and their clamp live here and nowhere else.

`log cur/mu = log old/mu (mismatch) + log prox/old (staleness) + log cur/prox (update)`. Mismatch, policy and total
log-ratios are three types, so that a corrector meant for one cannot be fed another; every function that takes one
takes a plain tensor too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from correction.masked import check_mask, response_sum

LOG_RATIO_LIMIT = 20.0
"""exp() sees log-ratios clamped to +-20. It only prevents overflow; it also stops the gradient there, so hits are
counted."""


@dataclass(frozen=True, slots=True, eq=False)
class LogRatio:
    """A log-ratio between two policies, [R, T] per token or [R] per response."""

    value: Tensor


class MismatchLogRatio(LogRatio):
    """`old - mu`: two programs at equal weights. Its corrector is an engine corrector."""

    __slots__ = ()


class PolicyLogRatio(LogRatio):
    """`cur - old`, `cur - prox` or `prox - old`: one program at two weights."""

    __slots__ = ()


class TotalLogRatio(LogRatio):
    """`prox - mu` or `cur - mu`: mismatch and staleness in one number."""

    __slots__ = ()


AnyLogRatio = TypeVar("AnyLogRatio", Tensor, MismatchLogRatio, PolicyLogRatio, TotalLogRatio)


def mismatch_log_ratio(old_RT: Tensor, mu_RT: Tensor) -> MismatchLogRatio:
    """`old - mu`, detached: above 0 where the trainer finds the token likelier than the engine did."""
    return MismatchLogRatio(old_RT.detach() - mu_RT.detach())


def policy_log_ratio(cur_RT: Tensor, base_RT: Tensor) -> PolicyLogRatio:
    """`cur - base`, differentiable in `cur` only."""
    return PolicyLogRatio(cur_RT - base_RT.detach())


def total_log_ratio(now_RT: Tensor, mu_RT: Tensor) -> TotalLogRatio:
    """`now - mu`, detached, where `now` is prox or cur."""
    return TotalLogRatio(now_RT.detach() - mu_RT.detach())


def plain(log_ratio: Tensor | LogRatio, wanted: type[LogRatio]) -> Tensor:
    """The tensor inside; TypeError when `log_ratio` is a typed ratio of another kind than `wanted`."""
    if isinstance(log_ratio, Tensor):
        return log_ratio
    if not isinstance(log_ratio, wanted):
        raise TypeError(f"wanted a {wanted.__name__} or a tensor, got a {type(log_ratio).__name__}")
    return log_ratio.value


def response_log_ratio(log_ratio_RT: AnyLogRatio, mask_RT: Tensor) -> AnyLogRatio:
    """Whole-response log-ratio: the sum over masked-in tokens, [R], of the same type as the input."""
    if isinstance(log_ratio_RT, Tensor):
        check_mask(mask_RT, log_ratio_RT)
        return response_sum(log_ratio_RT, mask_RT)
    check_mask(mask_RT, log_ratio_RT.value)
    return type(log_ratio_RT)(response_sum(log_ratio_RT.value, mask_RT))


def ratio(log_ratio: Tensor) -> Tensor:
    """`exp` of a sanitised log-ratio, clamped to +-LOG_RATIO_LIMIT first."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()


def clamped_count(log_ratios_RT: Iterable[LogRatio], mask_RT: Tensor) -> int:
    """How many masked-in tokens have one of the log-ratios beyond the clamp of `ratio`. Anything but 0 is an alarm."""
    hit_RT = torch.zeros_like(mask_RT)
    for log_ratio in log_ratios_RT:
        check_mask(mask_RT, log_ratio.value)
        hit_RT |= log_ratio.value.abs() > LOG_RATIO_LIMIT
    return int(torch.count_nonzero(hit_RT & mask_RT))
