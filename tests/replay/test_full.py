"""What is stored is bounded: a full store holds actors back, and lets the learner come to the checkpoint that makes room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import RESUMABLE
from replay import put
from replay.watchdog import awaited
from tests.replay.conftest import Stage
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, rollout, stats
from wire.messages import Checkpointed
from wire.record import pack_payload

LIMIT = 12
"""Rollouts. The budget alone would let (1 + 1) x 2 groups x 2 = 8 wait, however many are stored beside them."""


def full_stage(make_stage: Callable[..., Stage], **replay: Any) -> Stage:
    return make_stage(replay={"max_rollouts": LIMIT, **replay}, learner={"updates": 100, "keep_checkpoints": 1})


def checkpoint(learner: LightLearner) -> None:
    version = learner.committed
    core = learner.client.core  # type: ignore[union-attr]
    learner.client.call(Checkpointed(learner.epoch, version, f"checkpoints/v{version:06d}", "d" * 64))
    core.begin()
    core.keep_house_before_commit()  # as the daemon does, with its retention
    core.store.commit()


def one_update(learner: LightLearner, actor: LightActor) -> int:
    """How many groups were live when the actor had all that it could get."""
    actor.pull(want=0)
    while actor.work():
        pass
    live = actor.client.core.book.live  # type: ignore[union-attr]
    learner.commit(learner.lease())
    return live


def kept(stage: Stage) -> int:
    return stage.rows("SELECT count(*) FROM rollouts WHERE payload IS NOT NULL")[0][0]


def test_a_full_store_orders_no_more_than_the_next_update_needs_until_a_checkpoint_makes_room(make_stage: Callable[..., Stage],
                                                                                            caplog: pytest.LogCaptureFixture) -> None:
    stage = full_stage(make_stage)
    core, learner, actor = stage.core, stage.learner(), stage.actor()
    live = [one_update(learner, actor) for _ in range(5)]
    assert live == [4, 4, 2, 2, 2]  # 8 and 12 are stored; then 12, 16, 20 with one update's groups at a time
    assert (core.kept, kept(stage), core.full) == (20, 20, True)
    assert "actors are held back at replay.max_rollouts = 12 (20 are stored with their tokens, 0 on order" in awaited(core)
    assert [line for line in caplog.messages if "replay.max_rollouts = 12" in line] == [
        "actors are held back: 12 rollouts are stored with their tokens, and replay.max_rollouts = 12; what retention removes after a "
        "checkpoint makes room"]
    checkpoint(learner)
    assert (core.kept, kept(stage), core.full) == (0, 0, False)
    assert one_update(learner, actor) == 4


def test_it_never_stops_for_being_full(make_stage: Callable[..., Stage]) -> None:
    stage = full_stage(make_stage, retain_payloads=True)  # nothing ever makes room
    learner, actor = stage.learner(), stage.actor()
    for _ in range(12):
        one_update(learner, actor)
        checkpoint(learner)
    assert (stage.core.stepped, kept(stage), stage.core.full) == (12, 48, True)


def test_what_is_on_order_counts_and_what_was_dropped_too(make_stage: Callable[..., Stage]) -> None:
    stage = full_stage(make_stage)
    learner, actor = stage.learner(), stage.actor()
    for _ in range(2):
        actor.pull(want=0)
        actor.answer(actor.pull(want=2).orders)
        learner.commit(learner.lease(), skipped=True)
    assert (stage.core.kept, stage.core.full) == (8, False)  # dropped(no_signal), with their tokens
    assert len(actor.pull().orders) == 2  # and 4 on order make 12
    assert (stage.core.on_order, stage.core.full) == (4, True)
    assert actor.pull().orders == []


def test_the_count_outlives_a_restart_and_a_store_without_it(make_stage: Callable[..., Stage]) -> None:
    stage = full_stage(make_stage)
    learner, actor = stage.learner(), stage.actor()
    for _ in range(3):
        one_update(learner, actor)
    checkpoint(learner)
    assert stage.core.store.counters["payloads_freed"] > 0
    before = stage.core.kept
    stage.reopen()
    assert (stage.core.kept, kept(stage)) == (before, before)
    stage.core.begin().db.execute("DELETE FROM counters WHERE name = 'payloads_freed'")
    stage.core.store.commit()
    stage.reopen()
    assert stage.core.kept == before


def test_a_running_replay_says_that_it_is_full(tmp_path: Path) -> None:
    config = make_config(tmp_path, replay={"max_rollouts": 8})
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        while actor.work():
            pass
        found = stats(daemon.endpoint)
        assert (found["kept"], found["max_rollouts"], found["full"]) == (8, 8, True)
        assert "actors are held back at replay.max_rollouts = 8" in found["awaited"]
        for client in (learner, actor):
            client.close()


def test_the_limit_may_be_raised_on_resume(make_stage: Callable[..., Stage]) -> None:
    assert "replay.max_rollouts" in RESUMABLE
    stage = full_stage(make_stage)
    learner, actor = stage.learner(), stage.actor()
    for _ in range(3):
        one_update(learner, actor)
    assert stage.core.full
    stage.reopen(replay={"max_rollouts": 100})
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    actor.pull()
    assert (stage.core.full, stage.core.book.live) == (False, 4)


def test_evidence_of_poison_is_bounded_and_the_rest_is_counted(make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(actor={"max_quarantined": 100})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    bad = [(rollout(order, sample, 0)[0], pack_payload(np.arange(4), np.ones(3), np.full(3, np.nan)))
           for order in actor.pull().orders for sample in range(2)]
    monkeypatch.setattr(put, "MOST_EVIDENCE", 1500)
    stored = actor.put(bad)
    assert len(stored.quarantined) == 8
    rows = stage.rows("SELECT length(head), coalesce(length(payload), 0) FROM quarantine")
    evidence = [row for row in rows if row[1]]
    assert len(rows) == 8
    assert 1 <= len(evidence) < 8
    assert sum(head + payload for head, payload in evidence) == stage.core.store.counters["quarantine_bytes"] <= 1500
    assert stage.core.store.counters["quarantined_without_evidence"] == 8 - len(evidence)
    assert stage.core.store.counters["quarantined"] == 8
    assert stage.rows("SELECT head, payload FROM quarantine ORDER BY id DESC LIMIT 1") == [("{}", None)]


def test_a_name_of_a_megabyte_is_not_kept(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    head, payload = rollout(actor.pull(want=1).orders[0], 0, 0, rollout_id="x" * (1 << 20))
    assert len(actor.put([(head, payload)]).quarantined) == 1
    assert stage.rows("SELECT length(rollout_id), length(reason) <= 300 FROM quarantine") == [(100, 1)]
    assert stage.rows("SELECT max(length(body)) < 2000 FROM ledger WHERE kind = 'put'") == [(1,)]
