"""One update: a lease whose spans all have anchors becomes optimizer steps, and the columns and numbers of its record.

Advantages, correction weights and denominators are made on the whole lease by every rank alike; ranks then run their own micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Recipe
from correction.pipeline import Correction, CorrectionChoice, correct
from correction.table import PolicyTable
from learner.advantage import group_advantages
from learner.batch import LeaseRows, MicroBatch, Table, padded_ids, plan_steps, tabulate, to_table
from learner.deepspeed_engine import TrainEngine
from learner.logprobs import predicting_positions
from learner.measure import measure
from learner.objective import aggregate, denominator_of, token_losses
from learner.ranks import Ranks
from learner.scoring import Row
from wire.errors import RunError
from wire.record import F32

ScoreLive = Callable[[list[Row]], list[np.ndarray]]


@dataclass(frozen=True)
class Outcome:
    """What the record of an update needs. `columns` are empty when the lease was skipped."""

    skipped: bool
    steps: list[dict[str, Any]]
    columns: list[tuple[str, str, bytes]]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A lease ready to train on. `prox_RT` is None when prox is the training forward itself (one step per update)."""

    table: Table
    advantage_R: Tensor
    prox_RT: Tensor | None
    correction: Correction

    @property
    def signal_R(self) -> Tensor:
        """Rows that can teach something: a kept token and an advantage."""
        return self.correction.keep_RT.any(-1) & (self.advantage_R != 0)


def correction_choice(config: Config) -> CorrectionChoice:
    recipe = config.recipe
    return CorrectionChoice(
        engine=recipe.engine, level=recipe.engine_level, cap=recipe.engine_cap, low=recipe.engine_low, high=recipe.engine_high,
        threshold=recipe.kpop_threshold, carry=recipe.kpop_carry, group_mass_cap_per_response=recipe.group_mass_cap,
        objective=recipe.objective, base=recipe.base, steps_per_update=config.learner.steps_per_update)


def hyper_parameters(recipe: Recipe) -> dict[str, float]:
    """Keyword arguments of the recipe's objective."""
    if recipe.objective == "score":
        return {}
    return {"cap": recipe.cap} if recipe.objective == "cispo" else {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high}


def run_update(engine: TrainEngine, ranks: Ranks, config: Config, lease: LeaseRows, score_live: ScoreLive) -> Outcome:
    """Train on the lease, or skip it when nothing in it teaches. Raises RunError on a loss or gradient that is not finite."""
    ready = prepare(lease, config, score_live)
    if not bool(ready.signal_R.any()):
        return Outcome(True, [], [], {"reward": float(ready.table.reward_R.mean()), "tokens": int(ready.table.mask_RT.sum())})
    plan = plan_steps(lease.lengths, lease.group_of, groups=len(lease.group_ids), steps=config.learner.steps_per_update, ranks=ranks.world,
                      micro_batch_rows=config.learner.micro_batch_rows, bucket=config.learner.length_bucket)
    cur_RT = torch.zeros_like(ready.table.mu_RT)
    steps = [run_step(engine, ranks, config, lease, ready, step, cur_RT) for step in plan]
    cur_RT = ranks.sum(cur_RT)
    prox_RT = ready.prox_RT if ready.prox_RT is not None else prox_from(ready.table, cur_RT, lease.version_in)
    metrics = measure(ready.table, prox_RT, cur_RT, ready.advantage_R, ready.correction, config.recipe, lease.version_in)
    taken = [step for step in steps if step["stepped"]]
    metrics |= {key: float(np.mean([step[key] for step in taken])) for key in ("loss", "grad_norm", "lr")}
    return Outcome(False, steps, make_columns(ready, prox_RT, cur_RT), metrics)


def prepare(lease: LeaseRows, config: Config, score_live: ScoreLive) -> Prepared:
    table = tabulate(lease)
    rewards_R = table.reward_R
    if config.task.shuffle_rewards:
        rewards_R = rewards_R[torch.from_numpy(np.random.default_rng([config.run.seed, lease.update]).permutation(len(rewards_R)))]
    advantage_R = group_advantages(rewards_R.float(), table.group_R, estimator=config.recipe.estimator)
    scored = config.learner.steps_per_update > 1 or config.recipe.base == "prox" or config.recipe.group_mass_cap is not None
    prox_RT = scored_prox(lease, table, score_live) if scored else None
    policy = PolicyTable(mu_RT=table.mu_RT, old_RT=table.old_RT, prox_RT=prox_RT, cur_RT=None, ref_RT=None, mask_RT=table.mask_RT,
                         version_RT=table.version_RT, group_R=table.group_R)
    return Prepared(table, advantage_R, prox_RT, correct(policy, correction_choice(config)))


def scored_prox(lease: LeaseRows, table: Table, score_live: ScoreLive) -> Tensor:
    """prox from a scoring pass under version_in, run only for rows where `old` is not already it."""
    fresh_RT = table.mask_RT & (table.version_RT == lease.version_in)
    stale = (table.response_RT & ~fresh_RT).any(-1).nonzero().flatten().tolist()
    prox_RT = table.old_RT.clone()
    for row, values in zip(stale, score_live([lease.row(row) for row in stale]), strict=True):
        prox_RT[row, : len(values)] = torch.where(fresh_RT[row, : len(values)], prox_RT[row, : len(values)], torch.from_numpy(values))
    return prox_RT


def prox_from(table: Table, cur_RT: Tensor, version_in: int) -> Tensor:
    """prox when one step was made: `old` where the token's version is version_in, else the training forward before the step."""
    return torch.where(table.mask_RT & (table.version_RT == version_in), table.old_RT, cur_RT)


def run_step(engine: TrainEngine, ranks: Ranks, config: Config, lease: LeaseRows, ready: Prepared, plan: list[list[MicroBatch]],
             cur_RT: Tensor) -> dict[str, Any]:
    """One optimizer step over the minibatch in `plan[rank]`; fills this rank's rows of `cur_RT`. Without signal: forward only."""
    recipe, mode, table = config.recipe, config.recipe.aggregation, ready.table
    rows = [row for mine in plan for batch in mine for row in batch.rows]
    count_RT = table.mask_RT if recipe.denominator == "original" else ready.correction.keep_RT
    denominator = denominator_of(count_RT[rows], mode=mode, constant=recipe.constant)
    record = {"micro_batches": [[[list(batch.rows), batch.width] for batch in mine] for mine in plan], "denominator": denominator}
    batches = plan[ranks.rank]
    if not bool(ready.signal_R[rows].any()):
        with torch.no_grad():
            for batch in batches:
                forward(engine, lease, table, batch, cur_RT)
        return record | {"stepped": False}
    total = torch.zeros(1)
    for index, batch in enumerate(batches):
        loss = micro_loss(config, ready, list(batch.rows), forward(engine, lease, table, batch, cur_RT), count_RT, denominator)
        engine.backward(loss, last=index == len(batches) - 1)
        total += loss.detach().cpu()
    loss_value = float(ranks.sum(total))
    if not np.isfinite(loss_value):
        raise RunError(f"the loss of update {lease.update} is {loss_value}: stopped before anything was published")
    norm, lr = engine.step()
    return record | {"stepped": True, "loss": loss_value, "grad_norm": norm, "lr": lr}


def forward(engine: TrainEngine, lease: LeaseRows, table: Table, batch: MicroBatch, cur_RT: Tensor) -> Tensor:
    """`cur` [rows, T] of a micro-batch, with gradient; also written to `cur_RT`. A batch without rows runs one dummy row, to keep step with
    other ranks."""
    rows, device = list(batch.rows), engine.device
    if not rows:
        ids, position_N, temperature = torch.zeros((1, batch.width), dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1)
        return engine.forward(ids.to(device), temperature.to(device), position_N.to(device))[:, None] * 0
    position_N = predicting_positions(table.prompt_lens_R[rows], table.response_lens_R[rows], batch.width)
    ids = padded_ids(lease, rows, batch.width)
    cur_N = engine.forward(ids.to(device), table.temperature_R[rows].to(device), position_N.to(device))
    cur = to_table(cur_N, table.response_RT[rows].to(device))
    cur_RT[rows] = cur.detach().cpu()
    return cur


def micro_loss(config: Config, ready: Prepared, rows: list[int], cur: Tensor, count_RT: Tensor, denominator: float) -> Tensor:
    """This micro-batch's part of the step's loss."""
    if not rows:
        return cur.sum()
    recipe, table, device = config.recipe, ready.table, cur.device
    base_RT = None
    if recipe.objective != "score":
        base = table.old_RT if recipe.base == "old" else ready.prox_RT
        assert base is not None  # prepare() scores prox when it is the base
        base_RT = base[rows].to(device)
    loss_RT = token_losses(cur, base_RT, ready.advantage_R[rows].to(device), table.mask_RT[rows].to(device), objective=recipe.objective,
                           **hyper_parameters(recipe))
    weight_RT, keep_RT = ready.correction.weight_RT[rows].to(device), ready.correction.keep_RT[rows].to(device)
    return aggregate(loss_RT * weight_RT, keep_RT, mode=recipe.aggregation, constant=recipe.constant,
                     count_mask_RT=count_RT[rows].to(device), denominator=denominator)


def make_columns(ready: Prepared, prox_RT: Tensor, cur_RT: Tensor) -> list[tuple[str, str, bytes]]:
    """Every response token of every row, in row order. `old` is NaN where the source is `missing`."""
    table, correction = ready.table, ready.correction
    floats = {"old": table.old_RT, "prox": prox_RT, "cur": cur_RT, "weight": correction.weight_RT}
    bytes_ = {"keep": correction.keep_RT, "old_source": table.source_RT}
    return [*((name, "f4", value[table.response_RT].numpy().astype(F32).tobytes()) for name, value in floats.items()),
            *((name, "u1", value[table.response_RT].numpy().astype("u1").tobytes()) for name, value in bytes_.items())]
