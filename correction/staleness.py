"""Staleness: the weights that sampled a token are older than the weights the update begins from."""

import math

import torch
from torch import Tensor

from correction.factor import Factor, make_factor
from correction.masked import check_advantage, check_known, check_mask, response_mean, sanitise
from correction.ratios import PolicyLogRatio, TotalLogRatio, plain, ratio

DECOUPLED_CAP = 5.0


def decoupled(
    log_ratio_RT: Tensor | PolicyLogRatio, mask_RT: Tensor, *, cap: float = DECOUPLED_CAP, mode: str = "cap"
) -> Factor:
    """Weight of decoupled PPO, `exp(prox - old)`, for an objective on cur/prox.

    mode: "cap", min(weight, cap), nothing dropped; "mask", tokens above cap are dropped. ValueError otherwise.
    Source: Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298, which folds the engine ratio in (prox/mu).
    Status: established (cap 5: AReaL's bound, above which it drops unless told to clamp).
    """
    if not cap > 0 or mode not in ("cap", "mask"):
        raise ValueError(f"decoupled needs cap > 0 and mode cap or mask, got cap={cap} mode={mode!r}")
    log_ratio_RT = plain(log_ratio_RT, PolicyLogRatio).detach()
    check_known(mask_RT, log_ratio_RT)
    weight_RT = ratio(sanitise(log_ratio_RT, mask_RT))
    if mode == "cap":
        return make_factor(weight_RT.clamp(max=cap), mask_RT, mask_RT)
    return make_factor(weight_RT, weight_RT <= cap, mask_RT)


def opsm(
    log_ratio_RT: Tensor | TotalLogRatio, advantage_R: Tensor, mask_RT: Tensor, *, threshold: float = 0.5
) -> Factor:
    """Off-policy sequence masking: drop a response iff A < 0 and `mean(mu - prox) > threshold`; else weight 1.

    log_ratio: `prox - mu` (or `cur - mu`): against the behaviour policy, never against a recomputed old.
    Source: DeepSeek-V3.2; threshold .5: TRL, 1e-4: slime. Status: established. ValueError for a threshold < 0.
    """
    if not threshold >= 0:
        raise ValueError(f"opsm threshold must be >= 0, got {threshold}")
    log_ratio_RT = plain(log_ratio_RT, TotalLogRatio).detach()
    check_known(mask_RT, log_ratio_RT)
    check_advantage(advantage_R, mask_RT)
    drop_R = (advantage_R < 0) & (-response_mean(log_ratio_RT, mask_RT) > threshold)
    return make_factor(torch.ones_like(log_ratio_RT), ~drop_R[:, None], mask_RT)


def m2_mask(
    log_ratio_RT: Tensor | TotalLogRatio, advantage_R: Tensor, mask_RT: Tensor, *, budget: float = 0.04
) -> Factor:
    """Of the trust region's tokens, drop those with the largest squared log-ratio until the mean of the rest is <=
    budget.

    These are the tokens that are further along already where their advantage pushes them: (A > 0, r > 1) and (A < 0,
    r < 1). No other is dropped: its gradient leads back. Weight 1; the paper's objective is then unclipped.
    log_ratio: `prox - mu`.
    Source: M2PO, arXiv 2510.01161, Algorithm 1, with the tokens as in the authors' code, whose clip is `m2_range`;
    AReaL's version takes all tokens. Status: established. ValueError for a budget <= 0 or another number of advantages.
    """
    if not budget > 0:
        raise ValueError(f"m2 budget must be > 0, got {budget}")
    log_ratio_RT = plain(log_ratio_RT, TotalLogRatio).detach()
    check_known(mask_RT, log_ratio_RT)
    pushed_RT = _pushed(log_ratio_RT, advantage_R, mask_RT)
    size_N, order_N = log_ratio_RT[pushed_RT].abs().sort(stable=True)
    mean_N = size_N.double().square_().cumsum_(0).div_(torch.arange(1, len(size_N) + 1, device=size_N.device))
    dropped_N = torch.zeros_like(order_N, dtype=torch.bool).index_fill_(0, order_N[int((mean_N <= budget).sum()) :], True)
    del size_N, mean_N
    dropped_RT = torch.zeros_like(mask_RT).masked_scatter(pushed_RT, dropped_N)
    return make_factor(torch.ones_like(log_ratio_RT), ~dropped_RT, mask_RT)


def _pushed(log_ratio_RT: Tensor, advantage_R: Tensor, mask_RT: Tensor) -> Tensor:
    """Masked-in tokens whose ratio is on the side of 1 to which the advantage pushes it: where a clip can bite."""
    check_advantage(advantage_R, mask_RT)
    return mask_RT & (sanitise(log_ratio_RT, mask_RT) * advantage_R.sign()[:, None] > 0)


def m2_range(
    log_ratio_RT: Tensor | TotalLogRatio,
    advantage_R: Tensor,
    mask_RT: Tensor,
    *,
    budget: float = 0.04,
    floor_low: float = 0.3,
    floor_high: float = 0.5,
) -> tuple[float, float]:
    """(clip_low, clip_high) for `ppo`, so that the clipped log-ratios where the clip can bite have mean square <=
    budget.

    The clip bites where (A > 0, r > 1) or (A < 0, r < 1). One half-width c in log r; clip_low = max(1 - e^-c,
    floor_low), clip_high = max(e^c - 1, floor_high); (1, inf) if the budget is met unclipped. Nothing is masked.
    Source: the released code of M2PO, arXiv 2510.01161. There c is the next smaller token's |log-ratio|, taken per
    micro-batch, and the floors are a function's defaults that its trainer does not use. Status: reconstructed.
    ValueError for a budget <= 0 or a floor < 0.
    """
    if not (budget > 0 and floor_low >= 0 and floor_high >= 0):
        raise ValueError(f"m2_range needs budget > 0 and floors >= 0, got budget={budget} floors {floor_low}, {floor_high}")
    log_ratio_RT = plain(log_ratio_RT, TotalLogRatio).detach()
    check_known(mask_RT, log_ratio_RT)
    square_N = log_ratio_RT[_pushed(log_ratio_RT, advantage_R, mask_RT)].abs().sort().values.double().square_()
    count = len(square_N)
    if count == 0 or float(square_N.mean()) <= budget:
        return 1.0, math.inf
    below_N = square_N.cumsum(0).sub_(square_N)  # sum of the squares before each
    square_N.mul_(torch.arange(count, 0, -1, device=square_N.device))  # if it and all after it were clipped to its size
    first = int((square_N.add_(below_N) > count * budget).nonzero()[0])
    width = math.sqrt((count * budget - float(below_N[first])) / (count - first))
    return max(-math.expm1(-width), floor_low), max(math.expm1(width), floor_high)


def prefix_log_ratio(log_ratio_RT: Tensor | PolicyLogRatio, mask_RT: Tensor) -> Tensor:
    """Mean log-ratio over the masked-in tokens up to and including each token, [R, T]; accumulated in float64.

    Source: TAPO's prefix-geometric ratio. Status: reconstructed.
    """
    log_ratio_RT = plain(log_ratio_RT, PolicyLogRatio)
    check_mask(mask_RT, log_ratio_RT)
    total_RT = sanitise(log_ratio_RT, mask_RT).cumsum(-1, dtype=torch.float64).to(log_ratio_RT.dtype)
    return total_RT / mask_RT.cumsum(-1).clamp(min=1).to(log_ratio_RT.dtype)
