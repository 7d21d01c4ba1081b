"""Group advantages: on the whole batch, on complete groups, before any token is masked and before any split.

A group whose rewards are all equal gets exactly 0 from every estimator that centres, so `advantage != 0` finds signal.
"""

import torch
from torch import Tensor

from correction.groups import Groups

EPSILON = 1e-6
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "remax")


def group_advantages(
    rewards_R: Tensor, group_R: Tensor, *, estimator: str, greedy_reward_R: Tensor | None = None
) -> Tensor:
    """One advantage per response, [R], detached, of the rewards' dtype. group_R: int64 labels, members not adjacent.

    grpo          centred / (population std of the group + 1e-6)                  Shao et al. 2024, arXiv 2402.03300
    dr_grpo       centred: reward - group mean                                    Liu et al. 2025, arXiv 2503.20783
    rloo          reward - mean of the group's other rewards                      Ahmadian et al. 2024, arXiv 2402.14740
    reinforce_pp  centred / (sqrt(mean over the batch of centred^2) + 1e-6)       Hu et al. 2025, arXiv 2501.03262
    remax         reward - greedy_reward_R, the reward of the group's greedy      Li et al. 2023, arXiv 2310.10505
                  response from the same weight version
    A group of one gets 0, except that rloo refuses it and remax takes it.
    ValueError for a non-finite reward, a group of one under rloo, an unknown estimator, or greedy rewards with an
    estimator other than remax. Status: established.
    """
    if estimator not in ESTIMATORS:
        known = f"{', '.join(ESTIMATORS)}; of their own: ema_scaled_advantages, zcpo_coefficients"
        raise ValueError(f"unknown advantage estimator {estimator!r}; known: {known}")
    if (estimator == "remax") != (greedy_reward_R is not None):
        raise ValueError("greedy rewards go with estimator remax, and with no other")
    groups = Groups(group_R)
    if greedy_reward_R is not None:
        return _checked(rewards_R, groups) - _checked(greedy_reward_R, groups)
    centred_R = _centred(rewards_R, groups)
    if estimator == "dr_grpo":
        return centred_R
    if estimator == "grpo":
        return centred_R / (groups.mean(centred_R.square()).sqrt() + EPSILON)
    if estimator == "rloo":
        if bool((groups.size_R < 2).any()):
            label = int(group_R[groups.size_R < 2][0])
            raise ValueError(f"rloo needs at least two rewards per group; group {label} has one")
        size_R = groups.size_R.to(centred_R.dtype)
        return centred_R * size_R / (size_R - 1)
    return centred_R / (centred_R.square().mean().sqrt() + EPSILON)


def ema_scaled_advantages(
    rewards_R: Tensor, group_R: Tensor, second_moment: float | None, *, decay: float = 0.99
) -> tuple[Tensor, float]:
    """REINFORCE++ with a running scale: centred / (sqrt(second_moment) + 1e-6), and the updated second moment.

    The moment, an exponential mean of centred^2, is training state: it moves by one batch per stepped update, never on
    an evaluation or a skipped update; None starts it at this batch's. ValueError unless 0 <= decay < 1.
    Source: Hu et al. 2025, arXiv 2501.03262, the EMA form from a description. Status: reconstructed.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")
    centred_R = _centred(rewards_R, Groups(group_R))
    here = float(centred_R.double().square().mean())
    second_moment = here if second_moment is None else decay * second_moment + (1 - decay) * here
    return centred_R / (second_moment**0.5 + EPSILON), second_moment


def zcpo_coefficients(rewards_R: Tensor, group_R: Tensor, mean_kl_R: Tensor, *, beta: float = 4.0) -> Tensor:
    """`A/s - beta * K`, [R]: rewards and KL penalties both centred in the group, s = the group's largest |A|.

    mean_kl_R: mean over the response's tokens of the full-vocabulary KL(cur || ref); a sampled log-ratio will not do.
    Exactly 0 for a group of one or without contrast in its rewards, whatever the KL: such a group makes no step.
    ValueError for beta < 0. Source: ZCPO, arXiv 2610.12161. Status: established.
    """
    if not beta >= 0:
        raise ValueError(f"zcpo beta must be >= 0, got {beta}")
    groups = Groups(group_R)
    centred_R = _centred(rewards_R, groups)
    scale_R = groups.max(centred_R.abs())
    penalty_R = _centred(mean_kl_R, groups)
    coefficient_R = centred_R / torch.where(scale_R > 0, scale_R, 1.0) - beta * penalty_R
    return torch.where(scale_R > 0, coefficient_R, 0.0)


def overlong_penalty(length_R: Tensor, *, limit: int = 20480, cache: int = 4096) -> Tensor:
    """Added to the reward, [R]: 0 up to limit - cache tokens, falling linearly to -1 at limit, -1 above.

    length_R: response lengths in tokens, floating point. ValueError unless 0 < cache <= limit.
    Source: DAPO's soft overlong punishment, arXiv 2503.14476. Status: established.
    """
    if not 0 < cache <= limit:
        raise ValueError(f"overlong shaping needs 0 < cache <= limit, got cache={cache} limit={limit}")
    return ((limit - cache - length_R) / cache).clamp(-1.0, 0.0)


def _centred(value_R: Tensor, groups: Groups) -> Tensor:
    """Value minus group mean, exactly 0 in a group without contrast: a rounded mean would leave a false signal."""
    value_R = _checked(value_R, groups)
    no_contrast_R = groups.max(value_R) == groups.min(value_R)
    return torch.where(no_contrast_R, 0.0, value_R - groups.mean(value_R))


def _checked(value_R: Tensor, groups: Groups) -> Tensor:
    if not value_R.is_floating_point():
        raise TypeError(f"rewards must be floating point, got {value_R.dtype}")
    if value_R.shape != groups.index_R.shape:
        raise ValueError(f"{tuple(value_R.shape)} rewards for {tuple(groups.index_R.shape)} group labels")
    bad = (~value_R.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"non-finite reward at response {bad[0]} ({len(bad)} in all)")
    return value_R.detach()
