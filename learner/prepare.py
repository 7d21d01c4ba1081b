"""Before the first step: the lease becomes a table, advantages, correction weights and masks; whole, and on every rank alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.needs import scores_prox
from configs.schema import Config
from correction.pipeline import Correction, CorrectionChoice, correct
from correction.sis import counter_uniform, sis_accept
from correction.table import PolicyTable
from learner.batch import LeaseRows, Table, tabulate
from learner.deepspeed_engine import TrainEngine
from learner.distribution import KL, AtTokens, WholeVocabulary
from learner.lease_pass import lease_pass
from learner.rewards import make_advantages
from learner.scoring import Row
from wire.errors import RunError

ScoreLive = Callable[[list[Row]], list[np.ndarray]]


@dataclass(frozen=True)
class Prepared:
    """A lease ready to train on. `prox_RT` is None when prox is the training forward itself (one step per update).

    ref_RT: the reference's log-probs. accepted_RT: tokens that SIS takes as the current policy's. start_kl_RT: KL(live || reference) over
    the whole vocabulary as the update begins, where advantages read it. moment: see `Advantages`. Each None where the recipe does without.
    """

    table: Table
    advantage_R: Tensor
    prox_RT: Tensor | None
    correction: Correction
    ref_RT: Tensor | None = None
    accepted_RT: Tensor | None = None
    start_kl_RT: Tensor | None = None
    moment: float | None = None

    @property
    def signal_R(self) -> Tensor:
        """Rows that can teach something: a kept token and an advantage."""
        return self.correction.keep_RT.any(-1) & (self.advantage_R != 0)


def prepare(lease: LeaseRows, config: Config, score_live: ScoreLive, engine: TrainEngine | None = None) -> Prepared:
    """`engine` is needed by recipes with a reference policy, SIS or a running average; the live weights are read, never changed."""
    table, recipe = trainable(lease, config), config.recipe
    carried = engine.memory.reward_moment if engine is not None else None
    ref_RT = start_kl_RT = accepted_RT = None
    if config.learner.reference is not None:
        ref_RT = reference_column(needed(engine), config, lease, table)
        if recipe.estimator == "zcpo" or recipe.kl > 0 and recipe.kl_in == "reward" and recipe.kl_estimator == "full":
            start_kl_RT = whole_kl(needed(engine), config, lease, table)
    advantage_R, moment = make_advantages(lease, config, table, ref_RT, start_kl_RT, carried)
    prox_RT = None
    if recipe.prox == "ewma":
        prox_RT = averaged_prox(needed(engine), lease, table, score_live)
    elif scores_prox(config):
        prox_RT = scored_prox(lease, table, score_live)
    if recipe.staleness == "sis":
        accepted_RT = sis_accepted(needed(engine), config, lease, table)
    policy = PolicyTable(mu_RT=table.mu_RT, old_RT=table.old_RT, prox_RT=prox_RT, cur_RT=None, ref_RT=ref_RT, mask_RT=table.mask_RT,
                         version_RT=table.version_RT, group_R=table.group_R)
    correction = correct(policy, correction_choice(config), advantage_R, accepted_RT)
    return Prepared(table, advantage_R, prox_RT, correction, ref_RT, accepted_RT, start_kl_RT, moment)


def needed(engine: TrainEngine | None) -> TrainEngine:
    if engine is None:
        raise RunError("this recipe reads the live model (a reference policy, SIS or a running average): prepare() needs the engine")
    return engine


def trainable(lease: LeaseRows, config: Config) -> Table:
    table = tabulate(lease)
    if not config.recipe.mask_truncated:
        return table
    whole_R = torch.tensor([head.finish_reason != "length" for head in lease.heads])
    return replace(table, mask_RT=table.mask_RT & whole_R[:, None])


# ---------------------------------------------------------------- the recipe as the pure functions take it
class FilterKeys(NamedTuple):
    """Argument of the filter's function that `filter_low`, `filter_high` and `filter_threshold` stand for; None: it takes no such thing."""

    low: str | None = None
    high: str | None = None
    threshold: str | None = None


FILTER_KEYS = {"none": FilterKeys(), "sequence": FilterKeys("low", "high"), "geometric": FilterKeys("low", "high"),
               "carm": FilterKeys(threshold="threshold"), "k3": FilterKeys(threshold="threshold"), "veto": FilterKeys(threshold="floor")}


def correction_choice(config: Config) -> CorrectionChoice:
    recipe = config.recipe
    names, values = FILTER_KEYS[recipe.filter], (recipe.filter_low, recipe.filter_high, recipe.filter_threshold)
    return CorrectionChoice(
        engine=recipe.engine, level=recipe.engine_level, cap=recipe.engine_cap, low=recipe.engine_low, high=recipe.engine_high,
        threshold=recipe.kpop_threshold, carry=recipe.kpop_carry,
        filter=recipe.filter, filter_hyper={name: value for name, value in zip(names, values) if name is not None and value is not None},
        staleness=recipe.staleness, staleness_hyper=staleness_arguments(config), group_mass_cap_per_response=recipe.group_mass_cap,
        objective=recipe.objective, base=recipe.base, prox_source=recipe.prox, steps_per_update=config.learner.steps_per_update,
        aggregation=recipe.aggregation)


def staleness_arguments(config: Config) -> dict[str, float | str]:
    recipe = config.recipe
    match recipe.staleness:
        case "decoupled":
            return {"cap": recipe.staleness_cap, "mode": recipe.staleness_mode}
        case "m2_mask":
            return {"budget": recipe.m2_budget}
        case "m2_range":
            return {"budget": recipe.m2_budget, "floor_low": recipe.m2_floor_low, "floor_high": recipe.m2_floor_high}
        case "opsm":
            return {"threshold": recipe.opsm_threshold}
    return {}


# ---------------------------------------------------------------- columns that are scored
def scored_prox(lease: LeaseRows, table: Table, score_live: ScoreLive) -> Tensor:
    """prox from a scoring pass under version_in, run only for rows where `old` is not already it."""
    fresh_RT = table.mask_RT & (table.version_RT == lease.version_in)
    stale = (table.response_RT & ~fresh_RT).any(-1).nonzero().flatten().tolist()
    prox_RT = table.old_RT.clone()
    for row, values in zip(stale, score_live([lease.row(row) for row in stale]), strict=True):
        prox_RT[row, : len(values)] = torch.where(fresh_RT[row, : len(values)], prox_RT[row, : len(values)], torch.from_numpy(values))
    return prox_RT


def averaged_prox(engine: TrainEngine, lease: LeaseRows, table: Table, score_live: ScoreLive) -> Tensor:
    """prox of every token under the running average of the weights, which begins as the live ones."""
    if not engine.memory.anchor_mass:
        engine.memory.restart_anchor(engine.full_state())
    prox_RT = torch.zeros_like(table.old_RT)
    with engine.holding(engine.memory.anchor):
        for row, values in enumerate(score_live([lease.row(row) for row in range(len(lease.heads))])):
            prox_RT[row, : len(values)] = torch.from_numpy(values)
    return prox_RT


def prox_from(table: Table, cur_RT: Tensor, version_in: int) -> Tensor:
    """prox when one step was made: `old` where the token's version is version_in, else the training forward before the step."""
    return torch.where(table.mask_RT & (table.version_RT == version_in), table.old_RT, cur_RT)


def reference_column(engine: TrainEngine, config: Config, lease: LeaseRows, table: Table) -> Tensor:
    reference = engine.reference
    assert reference is not None  # learner.reference is set
    return lease_pass(engine.ranks, config, lease, table, lambda ids, temperature, position, rows:
                      reference.score(ids, temperature, position)[None], 1)[0]


def whole_kl(engine: TrainEngine, config: Config, lease: LeaseRows, table: Table) -> Tensor:
    reference = engine.reference
    assert reference is not None  # learner.reference is set
    return lease_pass(engine.ranks, config, lease, table, lambda ids, temperature, position, rows: engine.score(
        ids, temperature, position, WholeVocabulary(reference.head, reference.hidden(ids, temperature, position))), 3)[KL]


def sis_accepted(engine: TrainEngine, config: Config, lease: LeaseRows, table: Table) -> Tensor:
    """SIS's draws against the live weights, as the update begins. The counter is the row's place in the lease, which a reissue keeps."""
    count = config.sampling.top_logprobs
    for head, payload in zip(lease.heads, lease.payloads, strict=True):
        if payload.top_ids.shape[1] != count:
            raise RunError(f"rollout {head.rollout_id} holds {payload.top_ids.shape[1]} top log-probs per token, SIS needs {count}: was "
                           "sampling.top_logprobs changed?")
    top_ids, top_mu = ([getattr(payload, name) for payload in lease.payloads] for name in ("top_ids", "top_logprobs"))

    def at_top(ids: Tensor, temperature: Tensor, position: Tensor, rows: list[int]) -> Tensor:
        token_NK = torch.from_numpy(np.concatenate([top_ids[row] for row in rows]).astype(np.int64))
        return engine.score(ids, temperature, position, AtTokens(token_NK.to(ids.device)))

    now_RTK = lease_pass(engine.ranks, config, lease, table, at_top, count).permute(1, 2, 0)
    token_RTK, mu_RTK = torch.zeros(now_RTK.shape, dtype=torch.int64), torch.full(now_RTK.shape, -torch.inf)
    token_RT = torch.zeros(table.response_RT.shape, dtype=torch.int64)
    token_RTK[table.response_RT] = torch.from_numpy(np.concatenate(top_ids).astype(np.int64))
    mu_RTK[table.response_RT] = torch.from_numpy(np.concatenate(top_mu).astype(np.float32))
    token_RT[table.response_RT] = torch.from_numpy(np.concatenate([payload.response_ids for payload in lease.payloads]).astype(np.int64))
    uniform_RT = counter_uniform(config.run.seed, lease.update, torch.arange(len(lease.heads)), token_RT.shape[1])
    return sis_accept(token_RT, token_RTK, now_RTK, mu_RTK, table.mask_RT, uniform_RT=uniform_RT)
