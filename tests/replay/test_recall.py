"""A committed update, asked for again: as it was leased, as long as a checkpoint before it is kept."""

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import replay.recall as recall_module
from replay.recall import check_way, recall, updates_since
from tests.replay.conftest import Stage
from tests.replay.test_fork import advance, at_version_three
from tests.replay.test_store import facts
from tests.support.replay import LightLearner, notice
from wire.digest import digest
from wire.errors import ProtocolError, RefusedError, RunError, StoreError, TryAgainError
from wire.messages import Checkpointed, Fork, Leased, Ok, Recall, Recalled
from wire.record import VersionNotice


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(learner={"updates": 20, "keep_checkpoints": 2})


def ask(learner: LightLearner, version: int, after: int) -> tuple[Recalled | Ok, bytes]:
    reply, bulk = learner.client.call(Recall(learner.epoch, version, after))
    assert isinstance(reply, Recalled | Ok)
    return reply, bulk


def test_an_update_comes_back_as_it_was_leased(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    actor.work()
    learner.score()
    leased = learner.lease()
    assert isinstance(leased, Leased)
    bulk = learner.bulk
    record, columns, _ = learner.record(leased)
    learner.commit(leased)
    reply, again = ask(learner, 0, 0)
    assert isinstance(reply, Recalled)
    assert (reply.record, reply.heads, reply.anchors, again) == (record, leased.heads, leased.anchors, bulk)
    tokens = sum(record.response_lens)
    assert len(reply.anchors) == len(reply.heads) == 4
    assert reply.column_digests == [digest(columns[: 4 * tokens]), digest(columns[4 * tokens :])]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_json_does_not_know_is_null_or_refused(stage: Stage, value: float) -> None:
    """What is committed can be asked for again, and a restarted replay knows what this one knew."""
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    actor.work()
    leased = learner.lease()
    with pytest.raises(ProtocolError, match="update 1: seconds.wait is "):
        learner.commit(leased, seconds={"update": 0.5, "wait": value})
    learner.commit(leased, metrics={"loss": 0.5, "more": value}, steps=[{"lr": value}])
    assert ask(learner, 0, 0)[0].record.metrics == {"loss": 0.5, "more": None}  # type: ignore[union-attr]
    before = facts(stage)
    assert before["metrics"]["more"] is None
    stage.reopen()
    assert facts(stage) == before


def test_a_record_and_a_notice_of_different_weights_are_no_commit(stage: Stage) -> None:
    """Once taken, it could not be recalled: it looked like damage of the store."""
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    actor.work()
    leased = learner.lease()
    with pytest.raises(ProtocolError, match="update 1: the record and the notice name different weights for version 1"):
        learner.commit(leased, weights_digest_out="f" * 64)
    learner.commit(leased)
    assert ask(learner, 0, 0)[0].record.version_out == 1  # type: ignore[union-attr]


def test_updates_come_in_order_and_then_there_is_none(stage: Stage) -> None:
    learner, _ = at_version_three(stage)
    replies = [ask(learner, 1, after)[0] for after in (0, 2, 3)]
    assert [reply.record.update for reply in replies[:2]] == [2, 3]  # type: ignore[union-attr]
    assert replies[2] == Ok()
    assert ask(learner, 3, 0) == (Ok(), b"")


def test_a_skipped_update_comes_too_and_one_given_up_does_not(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    learner.committed = 4
    actor.pull(want=0)
    actor.work()
    learner.score()
    learner.commit(learner.lease(), skipped=True)
    advance(learner, actor)
    assert updates_since(stage.core.store.db, 1) == [4, 5]
    reply, _ = ask(learner, 1, 0)
    assert isinstance(reply, Recalled)
    assert (reply.record.update, reply.record.skipped, len(reply.heads)) == (4, True, 4)


def test_what_retention_keeps_is_enough_from_the_oldest_kept_checkpoint_on(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    for version in range(1, 8):
        skipped = version == 5
        actor.pull(want=0)
        actor.work()
        learner.score()
        learner.commit(learner.lease(), skipped=skipped)
        if version in (2, 3, 5, 7):  # versions 2, 3, 4 and 6: the skip made none
            learner.client.call(Checkpointed(learner.epoch, learner.committed, f"checkpoints/v{version}", "d" * 64))
            stage.core.keep_house_before_commit()
            stage.core.store.commit()
    kept = [version for version, in stage.rows("SELECT version FROM checkpoints WHERE state = 'complete' ORDER BY version")]
    assert kept == [4, 6]
    assert updates_since(stage.core.store.db, 4) == [5, 6, 7]
    for update in (5, 6, 7):
        assert len(recall(stage.core.store.db, update)[0].heads) == 4
    for update in (1, 2, 3, 4):
        with pytest.raises(RunError, match=f"not retained: what update {update} was trained on"):
            recall(stage.core.store.db, update)
    with pytest.raises(RefusedError, match="not retained: what update 3 was trained on"):
        ask(learner, 2, 0)


def test_only_the_learner_of_today_may_ask(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    with pytest.raises(ProtocolError, match="not for a process of role actor"):
        actor.client.call(Recall(actor.epoch, 0, 0))
    stage.learner()
    with pytest.raises(TryAgainError, match="was replaced"):
        ask(learner, 0, 0)


@pytest.mark.parametrize("parent", [8, 9])
def test_a_version_that_is_its_own_parent_is_damage_and_no_endless_way(parent: int) -> None:
    """A bit of `versions.parent` turned over: 8 -> 8, or 8 -> 9 -> 8."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(Path(recall_module.__file__).with_name("schema.sql").read_text())
        db.executemany("INSERT INTO versions VALUES (?, ?, NULL, '', '', '', 'live', 1, 0.0)", [(0, None), (8, parent), (9, 8)])
        with pytest.raises(StoreError, match="an update between versions 0 and 9 in the store is not what was acknowledged"):
            check_way(db, 0, VersionNotice(9, "", "", ""))
