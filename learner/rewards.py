"""From verdicts to advantages, on the whole lease: shuffling, overlong punishment, KL in the reward, estimator."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from correction.masked import response_mean, response_sum
from correction.reference import reference_kl
from learner.advantage import ema_scaled_advantages, group_advantages, overlong_penalty, zcpo_coefficients
from learner.batch import LeaseRows, Table
from wire.record import ANCHOR_SOURCES


class Advantages(NamedTuple):
    """`moment`: what `Memory.reward_moment` becomes if this update makes a step."""

    advantage_R: Tensor
    moment: float | None


def make_advantages(lease: LeaseRows, config: Config, table: Table, ref_RT: Tensor | None, kl_RT: Tensor | None,
                    moment: float | None) -> Advantages:
    """ref_RT: the reference's log-probs; kl_RT: KL(live || reference) over the whole vocabulary; each where the recipe reads it."""
    recipe = config.recipe
    rewards_R = shaped_rewards(lease, config, table, ref_RT, kl_RT)
    if recipe.estimator == "zcpo":
        assert kl_RT is not None
        mean_kl_R = response_mean(kl_RT, table.response_RT)  # trained on or not: the group's mean needs all of them
        return Advantages(zcpo_coefficients(rewards_R, table.group_R, mean_kl_R, beta=recipe.zcpo_beta), moment)
    if recipe.estimator == "reinforce_pp_ema":
        return Advantages(*ema_scaled_advantages(rewards_R, table.group_R, moment, decay=recipe.ema_decay))
    greedy_R = greedy_rewards(lease, config)[table.group_R] if recipe.estimator == "remax" else None
    return Advantages(group_advantages(rewards_R, table.group_R, estimator=recipe.estimator, greedy_reward_R=greedy_R), moment)


def greedy_rewards(lease: LeaseRows, config: Config) -> Tensor:
    """Of each group's greedy response, [groups], with the overlong punishment of its own length. It has no KL: a baseline need not be the
    value. ValueError when the lease has none."""
    if not lease.baselines:
        raise ValueError("needs a greedy response per group, which this run did not sample")
    greedy_G = torch.tensor(lease.greedy_rewards)
    return greedy_G + punishment(torch.tensor([float(head.response_len) for head in lease.baselines]), config)


def punishment(length_R: Tensor, config: Config) -> Tensor:
    recipe = config.recipe
    if recipe.overlong is None:
        return torch.zeros_like(length_R)
    limit = recipe.overlong_limit or config.sampling.max_new_tokens
    return overlong_penalty(length_R, limit=limit, cache=max(1, round(recipe.overlong * limit)))


def shaped_rewards(lease: LeaseRows, config: Config, table: Table, ref_RT: Tensor | None, kl_RT: Tensor | None) -> Tensor:
    recipe, rewards_R = config.recipe, table.reward_R.float()
    if config.task.shuffle_rewards:
        rewards_R = rewards_R[torch.from_numpy(np.random.default_rng([config.run.seed, lease.update]).permutation(len(rewards_R)))]
    rewards_R = rewards_R + punishment(table.response_lens_R.float(), config)
    if recipe.kl > 0 and recipe.kl_in == "reward":  # also of a response that is not trained on: its reward counts in the group
        counted_RT = table.response_RT
        if recipe.kl_estimator != "full":
            assert ref_RT is not None
            counted_RT = counted_RT & (table.source_RT != ANCHOR_SOURCES.index("missing"))
            kl_RT = reference_kl(table.old_RT, ref_RT, counted_RT, estimator=recipe.kl_estimator)
        assert kl_RT is not None
        rewards_R = rewards_R - recipe.kl * response_sum(kl_RT, counted_RT)
    return rewards_R
