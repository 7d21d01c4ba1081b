"""One update: a lease whose spans all have anchors becomes optimizer steps, and the columns and numbers of its record.

`learner/prepare.py` makes advantages, correction weights and masks on the whole lease, by every rank alike; here ranks run their own
micro-batches with the losses of `learner/loss.py`. What an update does is a function of the engine (weights, optimizer, `memory`), the
lease and its anchors, so a rerun repeats it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.needs import whole_vocabulary
from configs.schema import Config
from correction.ewma import ewma_beta
from learner.batch import LeaseRows, MicroBatch, Table, padded_ids, plan_steps, to_table
from learner.deepspeed_engine import TrainEngine
from learner.distribution import LOG_PROB, WholeVocabulary
from learner.logprobs import predicting_positions
from learner.loss import count_mask, divisors, loss_measures, micro_loss, regularisers, whole_surrogate
from learner.measure import measure
from learner.prepare import Prepared, ScoreLive, prepare, prox_from
from learner.ranks import Ranks
from wire.errors import RunError
from wire.record import F32


@dataclass(frozen=True)
class Outcome:
    """What the record of an update needs. `columns` are empty when the lease was skipped."""

    skipped: bool
    steps: list[dict[str, Any]]
    columns: list[tuple[str, str, bytes]]
    metrics: dict[str, Any]


class Seen(NamedTuple):
    """What the training forwards said of the lease, [R, T] and [3, R, T]; filled row by row, then summed over ranks."""

    cur_RT: Tensor
    whole_CRT: Tensor | None


def run_update(engine: TrainEngine, ranks: Ranks, config: Config, lease: LeaseRows, score_live: ScoreLive) -> Outcome:
    """Train on the lease, or skip it when nothing in it teaches. Raises RunError on a loss or gradient that is not finite."""
    ready = prepare(lease, config, score_live, engine)
    if not bool(ready.signal_R.any()):
        metrics = {"reward": float(ready.table.reward_R.mean()), "tokens": int(ready.table.mask_RT.sum())}
        return Outcome(True, [], [], metrics | greedy(lease))
    plan = plan_steps(lease.lengths, lease.group_of, groups=len(lease.group_ids), steps=config.learner.steps_per_update, ranks=ranks.world,
                      micro_batch_rows=config.learner.micro_batch_rows, bucket=config.learner.length_bucket)
    empty_RT = torch.zeros_like(ready.table.mu_RT)
    seen = Seen(empty_RT, torch.zeros(3, *empty_RT.shape) if whole_vocabulary(config) else None)
    steps = [run_step(engine, ranks, config, lease, ready, step, seen) for step in plan]
    cur_RT = ranks.sum(seen.cur_RT)
    whole_CRT = None if seen.whole_CRT is None else ranks.sum(seen.whole_CRT)
    prox_RT = ready.prox_RT if ready.prox_RT is not None else prox_from(ready.table, cur_RT, lease.version_in)
    objective = whole_surrogate(config.recipe, ready, cur_RT)
    metrics = measure(ready.table, prox_RT, cur_RT, ready.advantage_R, ready.correction, objective.side_RT, lease.version_in)
    metrics |= loss_measures(config, ready, objective.slope_RT, cur_RT, whole_CRT) | greedy(lease)
    taken = [step for step in steps if step["stepped"]]
    metrics |= {key: float(np.mean([step[key] for step in taken])) for key in ("loss", "grad_norm", "lr")}
    remember(engine, config, ready, metrics)
    return Outcome(False, steps, make_columns(ready, prox_RT, cur_RT), metrics)


def greedy(lease: LeaseRows) -> dict[str, float]:
    """The mean reward of the groups' greedy responses, where there are some."""
    return {"greedy_reward": float(np.mean(lease.greedy_rewards))} if lease.baselines else {}


def remember(engine: TrainEngine, config: Config, ready: Prepared, metrics: dict[str, Any]) -> None:
    """What the recipe carries on moves by one update that made a step."""
    recipe, memory = config.recipe, engine.memory
    memory.reward_moment = ready.moment
    if recipe.prox != "ewma":
        return
    metrics["prox_reset"] = metrics["active"] < recipe.ewma_reset
    if metrics["prox_reset"]:
        memory.restart_anchor(engine.full_state())
    else:
        window = config.replay.max_staleness if recipe.ewma_window is None else recipe.ewma_window
        memory.follow(engine.full_state(), ewma_beta(window))


def run_step(engine: TrainEngine, ranks: Ranks, config: Config, lease: LeaseRows, ready: Prepared, plan: list[list[MicroBatch]],
             seen: Seen) -> dict[str, Any]:
    """One optimizer step over the minibatch in `plan[rank]`; fills this rank's rows of `seen`. Without signal: forward only."""
    rows = [row for mine in plan for batch in mine for row in batch.rows]
    count_RT, by = count_mask(config.recipe, ready), divisors(config.recipe, ready, rows)
    record = {"micro_batches": [[[list(batch.rows), batch.width] for batch in mine] for mine in plan], "denominator": by.loss}
    batches = plan[ranks.rank]
    if not bool(ready.signal_R[rows].any()):
        with torch.no_grad():
            for batch in batches:
                forward(engine, lease, ready.table, batch, seen)
        return record | {"stepped": False}
    total = torch.zeros(1)
    for index, batch in enumerate(batches):
        cur, whole = forward(engine, lease, ready.table, batch, seen)
        mine = list(batch.rows)
        loss = micro_loss(config, ready, mine, cur, count_RT, by.loss) + regularisers(config, ready, mine, cur, whole, by)
        engine.backward(loss, last=index == len(batches) - 1)
        total += loss.detach().cpu()
    loss_value = float(ranks.sum(total))
    if not np.isfinite(loss_value):
        raise RunError(f"the loss of update {lease.update} is {loss_value}: stopped before anything was published")
    norm, lr = engine.step()
    return record | {"stepped": True, "loss": loss_value, "grad_norm": norm, "lr": lr}


def forward(engine: TrainEngine, lease: LeaseRows, table: Table, batch: MicroBatch, seen: Seen) -> tuple[Tensor, Tensor | None]:
    """`cur` [rows, T] of a micro-batch and, where the recipe reads them, `WholeVocabulary`'s channels [3, rows, T], with gradient; also
    written to `seen`. A batch without rows runs one dummy row, to keep step with other ranks."""
    rows, device = list(batch.rows), engine.device
    if rows:
        position_N = predicting_positions(table.prompt_lens_R[rows], table.response_lens_R[rows], batch.width)
        ids, temperature = padded_ids(lease, rows, batch.width), table.temperature_R[rows]
    else:
        ids, position_N, temperature = torch.zeros((1, batch.width), dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    inputs = ids.to(device), temperature.to(device), position_N.to(device)
    if seen.whole_CRT is None:
        cur_N = engine.forward(*inputs)
    else:
        reference = engine.reference
        terms = WholeVocabulary() if reference is None else WholeVocabulary(reference.head, reference.hidden(*inputs))
        whole_CN = engine.forward(*inputs, terms)
        cur_N = whole_CN[LOG_PROB]
    if not rows:
        return cur_N[:, None] * 0, None
    response_RT = table.response_RT[rows].to(device)
    cur = to_table(cur_N, response_RT)
    seen.cur_RT[rows] = cur.detach().cpu()
    if seen.whole_CRT is None:
        return cur, None
    whole = torch.stack([to_table(channel_N, response_RT) for channel_N in whole_CN])
    seen.whole_CRT[:, rows] = whole.detach().cpu()
    return cur, whole


def make_columns(ready: Prepared, prox_RT: Tensor, cur_RT: Tensor) -> list[tuple[str, str, bytes]]:
    """Every response token of every row, in row order. `old` is NaN where the source is `missing`; `ref`, `start_kl` and `accepted` are
    there where the recipe has them."""
    table, correction = ready.table, ready.correction
    floats = {"old": table.old_RT, "prox": prox_RT, "cur": cur_RT, "weight": correction.weight_RT, "ref": ready.ref_RT,
              "start_kl": ready.start_kl_RT}
    bytes_ = {"keep": correction.keep_RT, "old_source": table.source_RT, "accepted": ready.accepted_RT}
    return [*((name, "f4", value[table.response_RT].numpy().astype(F32).tobytes()) for name, value in floats.items() if value is not None),
            *((name, "u1", value[table.response_RT].numpy().astype("u1").tobytes()) for name, value in bytes_.items() if value is not None)]
