"""Rules that span several tables of the config. Each refusal is one line: what is wrong, and what to do."""

import re
from typing import TYPE_CHECKING

from configs.stacking import check_stacking

if TYPE_CHECKING:
    from configs.schema import Config

ENDPOINT = re.compile(r"tcp://([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-f:]+\]):(\d+|\*)")
MOST_ROWS = 32_768
"""Rollouts of one lease: see the limits in wire/codec.py."""


def check_tree(config: "Config") -> None:
    """Raises ValueError with one line for the first rule that does not hold."""
    for rule in (_endpoint, _sampling_contract, _group_sizes, _batch_shape, _one_message, _no_deadlock, check_stacking, _minirl):
        rule(config)


def _endpoint(config: "Config") -> None:
    endpoint = config.replay.endpoint
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or found[2] != "*" and int(found[2]) > 65535:
        raise ValueError(f"replay.endpoint = {endpoint!r}: write it as tcp://ADDRESS:PORT with a port of at most 65535, "
                         "for example tcp://127.0.0.1:5757")


def _sampling_contract(config: "Config") -> None:
    """The engine's log-prob is over the full vocabulary at the temperature, before any truncation or penalty."""
    sampling = config.sampling
    if sampling.temperature <= 0:
        raise ValueError("sampling.temperature must be above 0: a greedy policy has no log-prob to train on")
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
               "min_new_tokens": 0, "ignore_eos": False, "logit_bias": {}}
    for key, value in neutral.items():
        if getattr(sampling, key) != value:
            raise ValueError(f"sampling.{key} = {getattr(sampling, key)!r}: the engine's log-prob is taken before {key} acts, so it would "
                             f"not be the distribution sampled from; set it to {value!r}")


def _group_sizes(config: "Config") -> None:
    n, least = config.sampling.n, config.replay.min_scored or config.sampling.n
    if least > n:
        raise ValueError(f"replay.min_scored = {least} is more than sampling.n = {n}")
    if config.recipe.estimator == "rloo" and least < 2:
        raise ValueError("recipe.estimator = 'rloo' leaves one out, so it needs at least two scored samples: "
                         "set sampling.n >= 2 and replay.min_scored >= 2")
    if config.recipe.estimator != "remax" and n < 2:
        raise ValueError(f"recipe.estimator = {config.recipe.estimator!r} compares the samples of a group, so with sampling.n = 1 every "
                         "advantage is 0: set sampling.n >= 2, or recipe.estimator = 'remax'")
    contrast = least + (config.recipe.estimator == "remax")  # there the greedy response is one of those compared
    if config.recipe.dynamic_sampling and contrast < 2:
        raise ValueError("recipe.dynamic_sampling drops groups whose rewards are all equal, and a group of one always is: "
                         "set sampling.n >= 2 and replay.min_scored >= 2")


def _batch_shape(config: "Config") -> None:
    learner = config.learner
    groups, steps, ranks = learner.groups_per_update, learner.steps_per_update, learner.ranks
    if groups % steps:
        raise ValueError(f"learner.groups_per_update = {groups} cannot be split into learner.steps_per_update = {steps} "
                         "minibatches of whole groups")
    check_ranks(groups // steps, ranks)


def check_ranks(groups_per_step: int, ranks: int) -> None:
    """Also called by the learner with the number of ranks that torchrun really started."""
    if groups_per_step % ranks:
        raise ValueError(f"{groups_per_step} groups per optimizer step cannot be shared by {ranks} ranks: make "
                         f"learner.groups_per_update / learner.steps_per_update a multiple of the number of ranks")


def _minirl(config: "Config") -> None:
    """Its objective is a sum over tokens of R - group mean: a mean over lengths or a division by a deviation makes another method of it."""
    recipe = config.recipe
    if recipe.objective != "minirl":
        return
    if recipe.aggregation not in ("length_weighted", "constant"):
        raise ValueError(f"recipe.objective = 'minirl' has no length normalisation, which aggregation = {recipe.aggregation!r} is: set "
                         "recipe.aggregation = 'length_weighted' or 'constant'")
    if recipe.estimator not in ("dr_grpo", "rloo", "remax"):
        raise ValueError(f"recipe.objective = 'minirl' takes unscaled advantages, which estimator = {recipe.estimator!r} does not give: "
                         "set recipe.estimator = 'dr_grpo'")


def _one_message(config: "Config") -> None:
    if (rows := config.learner.groups_per_update * config.sampling.n) > MOST_ROWS:
        raise ValueError(f"learner.groups_per_update x sampling.n = {rows} rollouts per update, and a lease goes in one message, which "
                         f"holds {MOST_ROWS}: lower one of them")


def _no_deadlock(config: "Config") -> None:
    need = (config.replay.max_staleness + 1) * config.learner.groups_per_update * config.sampling.n
    if config.replay.max_rollouts < need:
        raise ValueError(f"replay.max_rollouts = {config.replay.max_rollouts} would deadlock: a budget of "
                         f"{config.replay.max_staleness} may hold (max_staleness + 1) x groups_per_update x n = {need} rollouts; "
                         "raise it or lower the budget")
