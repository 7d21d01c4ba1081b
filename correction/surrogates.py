"""Surrogate losses, to be minimised, each as its value and its slope. `learner.objective.token_losses` picks one by
name.

The slope, d loss / d cur, says outright what a stop-gradient would only imply: what is frozen has no part in it. The
side says whose slope it is: +1 that of an upper bound on the ratio (0, or the bound's own), -1 that of a lower one, 0 the
free ratio's. The ratio is the one that the bound is on: of a token, a prefix or a whole response.

All take cur, base (old or prox: the frozen policy) and mask, [R, T], and the advantage A, [R, 1], and return [R, T].
Masked slots are 0 in cur and base, and junk in the result. r = cur/base; its log is clamped, and the slope through a
clamped r is 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from correction.bounds import fdiv_bounds, ripo_bounds
from correction.masked import response_mean, sanitise
from correction.ratios import LOG_RATIO_LIMIT, policy_log_ratio, ratio
from correction.staleness import prefix_log_ratio


class Surrogate(NamedTuple):
    value_RT: Tensor
    slope_RT: Tensor
    side_RT: Tensor
    """int8; of no meaning where the advantage is 0."""


def score(cur_RT: Tensor, base_RT: Tensor, advantage_R1: Tensor, mask_RT: Tensor) -> Surrogate:
    """`-A cur`: REINFORCE's score function; base is ignored. Status: established."""
    return Surrogate(-advantage_R1 * cur_RT, (-advantage_R1).expand_as(cur_RT), _unbounded(cur_RT))


def unit(cur_RT: Tensor, base_RT: Tensor, advantage_R1: Tensor, mask_RT: Tensor) -> Surrogate:
    """`-A cur/stop_gradient(cur)`: ratio 1 with a live gradient, for one optimizer step per batch; base is ignored.

    Source: Online IcePop (with icepop weights); NeMo-RL `force_on_policy_ratio`. Status: established.
    """
    loss_RT = (-advantage_R1).expand_as(cur_RT)
    return Surrogate(loss_RT, loss_RT, _unbounded(cur_RT))


def ppo(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; zero slope where the clip binds.

    dual: with A < 0 the objective is also held above `dual * A`, so the slope is 0 for r > dual (> 1; usual 3).
    Unclipped importance sampling is clip_low=1, clip_high=inf.
    Source: Schulman et al. 2017, arXiv 1707.06347 (.2 / .2); unequal bounds: DAPO, arXiv 2503.14476 (.2 / .28);
    dual clip: Ye et al. 2019, arXiv 1912.09729. Status: established.
    """
    log_ratio_RT = policy_log_ratio(cur_RT, base_RT).value
    loss = _clipped(log_ratio_RT, advantage_R1, 1 - clip_low, 1 + clip_high)
    return _held(loss, log_ratio_RT, advantage_R1, dual)


def gppo(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Surrogate:
    """Gradient-preserving clip: PPO's value, and where PPO is flat the boundary's slope, `-(1 +- clip) A`.

    Value and slope are then the same number. dual: as in `ppo`, with slope 0 for A < 0, r > dual; the authors' code has 3.
    Source: Klear-Reasoner, arXiv 2508.07629, and its code. Usual .2 / .28. Status: established.
    """
    log_ratio_RT = policy_log_ratio(cur_RT, base_RT).value
    loss = _clipped(log_ratio_RT, advantage_R1, 1 - clip_low, 1 + clip_high)
    clamped_RT = log_ratio_RT * advantage_R1.sign() < -LOG_RATIO_LIMIT  # on the side without a bound
    return _held(loss._replace(slope_RT=sanitise(loss.value_RT, ~clamped_RT)), log_ratio_RT, advantage_R1, dual)


def gspo(
    cur_RT: Tensor, base_RT: Tensor, advantage_R1: Tensor, mask_RT: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO clip on the response's geometric-mean ratio s: one value and one clip decision for all tokens of a response.

    As in GSPO-token, the slope of a token is `-s A`: a response's mean has exactly GSPO's value and gradient, and a
    token that a corrector masks sends no gradient through its neighbours.
    Source: Zheng et al. 2025, arXiv 2507.18071. Usual 3e-4 / 4e-4 with sequence_mean. Status: established.
    """
    mean_R = response_mean(policy_log_ratio(cur_RT, base_RT).value, mask_RT)
    loss = _clipped(mean_R[:, None], advantage_R1, 1 - clip_low, 1 + clip_high)
    return Surrogate(*(one_R1.expand_as(cur_RT) for one_R1 in loss))


def luspo(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Surrogate:
    """GSPO times the response's length in tokens of the original mask; goes with sequence_mean and no other
    aggregation.

    Source: LUSPO, arXiv 2602.05261. Status: established.
    """
    loss = gspo(cur_RT, base_RT, advantage_R1, mask_RT, clip_low=clip_low, clip_high=clip_high)
    length_R1 = mask_RT.sum(-1, keepdim=True)
    return Surrogate(loss.value_RT * length_R1, loss.slope_RT * length_R1, loss.side_RT)


def cispo(cur_RT: Tensor, base_RT: Tensor, advantage_R1: Tensor, mask_RT: Tensor, *, cap: float) -> Surrogate:
    """`-stop_gradient(min(r, cap)) A cur`: the weight is capped, the slope never 0. cap is absolute, not 1 + epsilon;
    ValueError unless it is > 0.

    Source: MiniMax-M1, arXiv 2506.13585; cap 5: ScaleRL, arXiv 2510.13786. Status: established.
    """
    if not cap > 0:
        raise ValueError(f"cispo cap must be > 0, got {cap}")
    ratio_RT = ratio(policy_log_ratio(cur_RT, base_RT).value)
    slope_RT = ratio_RT.clamp(max=cap) * -advantage_R1
    return Surrogate(slope_RT * cur_RT, slope_RT, (ratio_RT > cap).to(torch.int8))


def ripo(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    delta: float = 0.05,
    cap: float = 10.0,
) -> Surrogate:
    """PPO clip with a half-width that follows the frozen old probability: `|r - 1| <= sqrt(delta / old)`.

    base has to be old. cap bounds the upper end, which is unbounded for rare tokens (reconstructed; .05 is the
    paper's). Source: RIPO, arXiv 2607.10169. Status: established (cap: reconstructed).
    """
    low_RT, high_RT = ripo_bounds(base_RT, delta=delta, cap=cap)
    return _clipped(policy_log_ratio(cur_RT, base_RT).value, advantage_R1, low_RT, high_RT)


def fdiv(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    divergence: str,
    topology: str,
    delta: float,
    cap: float = 10.0,
) -> Surrogate:
    """PPO clip to the interval of ratios whose f-divergence estimate is <= delta, solved per token.

    See `correction.bounds.fdiv_bounds` for divergence and topology.
    Source: GPPO, the f-divergence x topology framework. No default delta. Status: reconstructed.
    """
    low_RT, high_RT = fdiv_bounds(base_RT, divergence=divergence, topology=topology, delta=delta, cap=cap)
    return _clipped(policy_log_ratio(cur_RT, base_RT).value, advantage_R1, low_RT, high_RT)


def tapo(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    decay: float = 0.5,
    floor: float = 0.0,
) -> Surrogate:
    """PPO clip on `stop_gradient(g_t) cur/stop_gradient(cur)`, g_t the geometric mean of r over tokens 1 to t.

    Bounds tighten with the token's position t = 1, 2, ...: `max(clip * t^-decay, floor)`; the schedule is ours.
    The gradient of token t reaches no earlier token and is not divided by t.
    Source: TAPO (trajectory-aware policy optimisation). Status: reconstructed.
    """
    _check_clip(1 - clip_low, 1 + clip_high)
    log_ratio_RT = prefix_log_ratio(policy_log_ratio(cur_RT, base_RT), mask_RT)
    shrink_RT = mask_RT.cumsum(-1).clamp(min=1).to(cur_RT.dtype).pow(-decay)
    low_RT = 1 - (clip_low * shrink_RT).clamp(min=floor)
    high_RT = 1 + (clip_high * shrink_RT).clamp(min=floor)
    return _clipped(log_ratio_RT, advantage_R1, low_RT, high_RT)


def minirl(
    cur_RT: Tensor,
    base_RT: Tensor,
    advantage_R1: Tensor,
    mask_RT: Tensor,
    *,
    mu_RT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    cap: float = 5.0,
) -> Surrogate:
    """`-M stop_gradient(min(cur/mu, cap)) A cur`; M = 0 where (A > 0, r > 1 + clip_high) or (A < 0, r < 1 - clip_low).

    base has to be old. The weight is the total ratio, so no engine weight goes beside it. Goes with an aggregation
    without length normalisation (length_weighted or constant) and dr_grpo advantages. Dense models: no routing replay.
    Source: arXiv 2512.01374; clip .2 / .27 and cap 5 recalled, not checked. Status: reconstructed.
    """
    _check_clip(1 - clip_low, 1 + clip_high)
    if not cap > 0:
        raise ValueError(f"minirl cap must be > 0, got {cap}")
    ratio_RT = ratio(policy_log_ratio(cur_RT, base_RT).value)
    goes_on_RT = torch.where(advantage_R1 > 0, ratio_RT <= 1 + clip_high, ratio_RT >= 1 - clip_low)
    weight_RT = ratio(cur_RT - sanitise(mu_RT, mask_RT))
    slope_RT = sanitise(weight_RT.clamp(max=cap), goes_on_RT) * -advantage_R1
    side_RT = torch.where(goes_on_RT, weight_RT > cap, (ratio_RT - 1).sign()).to(torch.int8)
    return Surrogate(slope_RT * cur_RT, slope_RT, side_RT)


def _check_clip(low: float, high: float) -> None:
    if not low <= 1 <= high:
        raise ValueError(f"a clip needs clip_low >= 0 and clip_high >= 0, got an interval of {low} to {high}")


def _clipped(
    log_ratio: Tensor, advantage_R1: Tensor, low: float | Tensor, high: float | Tensor
) -> Surrogate:
    """PPO's pessimistic clip to [low, high]. ValueError for plain bounds that do not hold 1, or are NaN."""
    if isinstance(low, float | int) and isinstance(high, float | int):
        _check_clip(low, high)
    value = ratio(log_ratio)
    free = torch.where(advantage_R1 > 0, value <= high, value >= low)
    value = torch.where(free, value, value.clamp(low, high)) * -advantage_R1
    free = free & (log_ratio.abs() <= LOG_RATIO_LIMIT)
    return Surrogate(value, sanitise(value, free), sanitise(log_ratio.sign().to(torch.int8), ~free))


def _held(loss: Surrogate, log_ratio_RT: Tensor, advantage_R1: Tensor, dual: float | None) -> Surrogate:
    """The dual clip: where A < 0 and r > dual, the value is that of r = dual and the slope 0. ValueError unless dual > 1."""
    if dual is None:
        return loss
    if not dual > 1:
        raise ValueError(f"dual clip must be > 1, got {dual}")
    held_RT = (advantage_R1 < 0) & (log_ratio_RT > math.log(dual))
    return Surrogate(torch.where(held_RT, -dual * advantage_R1, loss.value_RT), sanitise(loss.slope_RT, ~held_RT),
                     loss.side_RT.masked_fill(held_RT, 1))


def _unbounded(cur_RT: Tensor) -> Tensor:
    return torch.zeros_like(cur_RT, dtype=torch.int8)
