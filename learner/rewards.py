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
        return Advantages(zcpo_coefficients(rewards_R, table.group_R, response_mean(kl_RT, table.mask_RT), beta=recipe.zcpo_beta), moment)
    if recipe.estimator == "reinforce_pp_ema":
        return Advantages(*ema_scaled_advantages(rewards_R, table.group_R, moment, decay=recipe.ema_decay))
    return Advantages(group_advantages(rewards_R, table.group_R, estimator=recipe.estimator), moment)


def shaped_rewards(lease: LeaseRows, config: Config, table: Table, ref_RT: Tensor | None, kl_RT: Tensor | None) -> Tensor:
    recipe, rewards_R = config.recipe, table.reward_R.float()
    if config.task.shuffle_rewards:
        rewards_R = rewards_R[torch.from_numpy(np.random.default_rng([config.run.seed, lease.update]).permutation(len(rewards_R)))]
    if recipe.overlong is not None:
        limit = recipe.overlong_limit or config.sampling.max_new_tokens
        rewards_R = rewards_R + overlong_penalty(table.response_lens_R.float(), limit=limit, cache=max(1, round(recipe.overlong * limit)))
    if recipe.kl > 0 and recipe.kl_in == "reward":
        if recipe.kl_estimator != "full":
            assert ref_RT is not None
            kl_RT = reference_kl(table.old_RT, ref_RT, table.mask_RT, estimator=recipe.kl_estimator)
        assert kl_RT is not None
        rewards_R = rewards_R - recipe.kl * response_sum(kl_RT, table.mask_RT)
    return rewards_R
