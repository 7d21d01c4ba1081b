"""Run a committed update again from its record: same rows in the same order, the stored anchors, the recorded learning rates.

On the same kind of machine the result is the same, bit for bit. A learner that went back to a checkpoint catches up this way, and the
audit checks an update this way. The plan of minibatches, micro-batches and padding, the correction weights and `prox` follow from rows
and config, as they did the first time; `differences` says where anything came out otherwise.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Config
from learner.batch import LeaseRows, lease_rows
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.session import Session
from learner.update import Outcome, ScoreLive, run_update
from wire.digest import digest
from wire.messages import Ok, Recall, Recalled, UpdateRecord


class Past(NamedTuple):
    """A committed update. `column_digests` are in the order of the record's columns."""

    record: UpdateRecord
    column_digests: list[str]
    lease: LeaseRows


class Again(NamedTuple):
    """What running it again gave. `weights`: the live weights, on rank 0; `state`: step counts and generator, as in the record."""

    outcome: Outcome
    weights: dict[str, Tensor]
    weights_digest: str
    state: dict[str, int | str]


def read_past(reply: Recalled, bulk: bytes) -> Past:
    record = reply.record
    return Past(record, reply.column_digests,
                lease_rows(record.update, record.version_in, record.group_ids, reply.heads, reply.anchors, bulk,
                           reply.baselines))


def next_past(session: Session, version: int, after: int | None) -> Past | None:
    """The first committed update after `after` that began from `version` or a later one; None when there is none. RefusedError when
    something that it needs is no longer retained."""
    reply, bulk = session.call(Recall(session.epoch, version, after or 0) if session.ranks.is_first else None)
    if isinstance(reply, Ok):
        return None
    assert isinstance(reply, Recalled)
    return read_past(reply, bulk)


def rerun(engine: TrainEngine, config: Config, past: Past, score_live: ScoreLive) -> Again:
    """On an engine that holds what the update began from: weights, optimizer, scheduler, generator. Every rank calls it."""
    engine.rates = [step["lr"] for step in past.record.steps if step["stepped"]]
    outcome = run_update(engine, engine.ranks, config, past.lease, score_live)
    engine.rates = []
    weights = engine.full_state()
    weights_digest = engine.ranks.broadcast(digest_state(weights).encode() if engine.ranks.is_first else None).decode()
    return Again(outcome, weights, weights_digest, engine_state(engine))


def engine_state(engine: TrainEngine) -> dict[str, Any]:
    """What of the engine's state a record holds."""
    return {"optimizer_steps": engine.steps, "scheduler_step": engine.scheduler.last_epoch,
            "rng": digest(torch.get_rng_state().numpy().tobytes()), **engine.memory.summary()}


def differences(past: Past, again: Again) -> list[str]:
    """Empty when all is as it was, bit for bit; else one sentence for each thing that is not."""
    record, outcome, found = past.record, again.outcome, []
    if record.skipped != outcome.skipped:
        return [f"it was {'skipped' if record.skipped else 'stepped'} and is {'skipped' if outcome.skipped else 'stepped'} now"]
    if record.greedy_rewards != past.lease.greedy_rewards:
        found.append("the greedy rewards are not the recorded ones")
    for index, (then, now) in enumerate(zip(record.steps, outcome.steps, strict=True)):
        found += [f"step {index}: {name} was {_short(then.get(name))}, is {_short(now.get(name))}"
                  for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    columns = {name: digest(data) for name, _, data in outcome.columns}
    found += [f"column {name} differs" for (name, _), then in zip(record.columns, past.column_digests, strict=True)
              if columns.get(name) != then]
    found += [f"state: {name} was {record.state[name]}, is {now}" for name, now in again.state.items()
              if record.state.get(name, now) != now]
    if again.weights_digest != record.weights_digest_out:
        found.append(f"weights digest was {record.weights_digest_out[:16]}, is {again.weights_digest[:16]}")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
