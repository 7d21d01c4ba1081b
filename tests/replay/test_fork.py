"""The learner goes back to a checkpoint."""

from collections.abc import Callable

import pytest

from replay.books import books, imbalance
from tests.replay.conftest import Stage
from tests.support.replay import LightActor, LightLearner, notice, rollout
from wire.errors import TryAgainError
from wire.messages import Checkpointed, Fork
from wire.record import Span


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(learner={"updates": 20})


def advance(learner: LightLearner, actor: LightActor) -> None:
    actor.pull(want=0)
    actor.work()
    learner.score()
    learner.commit(learner.lease())


def at_version_three(stage: Stage) -> tuple[LightLearner, LightActor]:
    """A checkpoint of version 1; versions 2 and 3 after it."""
    learner, actor = stage.learner(), stage.actor()
    advance(learner, actor)
    learner.client.call(Checkpointed(learner.epoch, 1, "checkpoints/v000001", "d" * 64))
    advance(learner, actor)
    advance(learner, actor)
    return learner, actor


def test_later_updates_are_lost_and_every_prompt_is_asked_again(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    trained_after = {order for order, in stage.rows("SELECT order_id FROM groups WHERE update_id IN (2, 3)")}
    before = books(stage.core.store.db)
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    found = books(stage.core.store.db)
    assert (before["trained"], found["trained"], found["lost"]) == (12, 4, 8)
    assert imbalance(found) == 0
    assert stage.rows("SELECT version, state FROM versions") == [(0, "live"), (1, "live"), (2, "orphaned"), (3, "orphaned"), (4, "live")]
    assert stage.rows("SELECT parent, update_id FROM versions WHERE version = 4") == [(1, None)]
    assert stage.rows("SELECT update_id, state FROM updates") == [(1, "committed"), (2, "lost"), (3, "lost")]
    assert (stage.core.stepped, stage.core.committed, stage.core.next_update) == (1, 4, 4)
    assert trained_after <= {order.order_id for order in stage.core.queue}
    assert stage.rows("SELECT state, reason FROM groups WHERE update_id = 2") == [("lost", "fork")] * 2


def test_what_people_see_is_of_the_last_update_that_stands(stage: Stage) -> None:
    at_version_three(stage)
    assert stage.core.last_metrics["update"] == 3
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    assert stage.core.last_metrics["update"] == 1
    stage.learner().client.call(Fork(learner.epoch + 1, 0, notice(5)))
    assert stage.core.last_metrics == {}


def test_an_evaluation_of_a_lost_version_is_done_again_after_a_restart_too(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=1, eval={"samples": 1, "every": 2}, learner={"updates": 20})
    learner, actor = stage.learner(), stage.actor()
    for _ in range(2):
        actor.pull(want=0)
        while actor.work():
            pass
        learner.commit(learner.lease())
    actor.pull(want=0)
    actor.work()
    assert (stage.core.evaluated, stage.rows("SELECT version, updates, state FROM evals")) == ([0, 2], [(0, 0, "done"), (2, 2, "done")])
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 0, notice(3)))
    assert stage.core.evaluated == [0]
    stage.reopen()
    assert stage.core.evaluated == [0]


def test_rollouts_of_orphaned_versions_are_dropped(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    actor.pull(want=0)
    assert actor.confirmed == 3
    actor.work()
    buffered = books(stage.core.store.db)["buffered"]
    assert buffered > 0
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    found = books(stage.core.store.db)
    assert found["dropped"] == {"orphaned": buffered}
    assert (found["buffered"], imbalance(found)) == (0, 0)


def test_an_orphaned_engine_gets_no_orders_and_its_late_answers_are_refused(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    actor.pull(want=0)
    order = actor.pull(want=1).orders[0]
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    assert actor.put([rollout(order, 0, 3)]).refused == [(f"{order.order_id}.1.0", "this attempt is closed")]
    actor.holding.clear()
    work = actor.pull(want=8)
    assert (work.orders, work.notice) == ([], notice(4))
    orders = actor.pull(want=1).orders
    late = actor.put([rollout(orders[0], 0, 4, spans=(Span(3, 0, 1), Span(4, 1, 3)))])
    assert "version 3 was never committed, or was given up" in late.quarantined[0][1]


def test_a_leased_update_is_given_up(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    actor.pull(want=0)
    actor.work()
    learner.lease()
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    assert stage.rows("SELECT 1 FROM rollouts WHERE state = 'leased'") == []
    learner.committed = 4
    actor.pull(want=0)
    advance(learner, actor)
    assert stage.rows("SELECT update_id, version_in, version_out FROM updates WHERE state = 'committed'") == [(1, 0, 1), (4, 4, 5)]
    assert imbalance(books(stage.core.store.db)) == 0


def test_a_fork_is_idempotent_and_needs_a_checkpoint(stage: Stage) -> None:
    learner, _ = at_version_three(stage)
    with pytest.raises(TryAgainError, match="there must be a complete checkpoint"):
        learner.client.call(Fork(learner.epoch, 2, notice(4)))
    with pytest.raises(TryAgainError, match="the new version is number 4"):
        learner.client.call(Fork(learner.epoch, 1, notice(3)))
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    rows = stage.rows("SELECT count(*) FROM ledger")
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    assert stage.rows("SELECT count(*) FROM ledger") == rows


def test_without_a_checkpoint_a_fork_begins_again_from_version_zero(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    advance(learner, actor)
    learner.client.call(Fork(learner.epoch, 0, notice(2)))
    assert (stage.core.stepped, stage.core.committed) == (0, 2)
    assert books(stage.core.store.db)["lost"] == 4


def test_memory_after_a_fork_is_what_the_tables_say(stage: Stage) -> None:
    learner, actor = at_version_three(stage)
    actor.pull(want=0)
    actor.work()
    learner = stage.learner()
    learner.client.call(Fork(learner.epoch, 1, notice(4)))
    queue, versions = list(stage.core.queue), dict(stage.core.versions)
    assert stage.core.last_metrics["update"] == 1  # not that of an update that was given up
    stage.reopen()
    assert stage.core.last_metrics["update"] == 1
    assert (list(stage.core.queue), stage.core.versions, stage.core.committed) == (queue, versions, 4)
    assert (stage.core.stepped, stage.core.next_update, stage.core.next_version) == (1, 4, 5)
