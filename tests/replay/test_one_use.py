"""A use of a batch is a committed update: the same lease again, and a rerun, are the same use; anything else is refused. Online IcePop
needs it: its ratio is 1 only while the batch was never trained on."""

from collections.abc import Callable
from typing import Any

import pytest

from replay.recall import recall
from tests.replay.conftest import Stage
from tests.support.replay import LightActor, LightLearner, rollout
from wire.errors import ProtocolError, TryAgainError
from wire.messages import Commit, Committed, Leased

ONCE = {"estimator": "grpo", "objective": "unit", "engine": "icepop"}


@pytest.fixture
def once(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(recipe=ONCE, replay={"max_staleness": 0}, learner={"updates": 4})


def begin(stage: Stage) -> tuple[LightLearner, LightActor, Leased]:
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    actor.work()
    leased = learner.lease()
    assert isinstance(leased, Leased)
    return learner, actor, leased


def uses(stage: Stage) -> list[Any]:
    """(update, rollouts trained in it) of each update, and how many rollouts are in some state else."""
    return [*stage.rows("SELECT g.update_id, count(*) FROM rollouts r JOIN groups g USING (group_id) WHERE r.state = 'trained' GROUP BY 1"),
            stage.rows("SELECT count(*) FROM rollouts WHERE state <> 'trained'")[0][0]]


def test_a_lease_that_is_given_out_again_and_a_commit_that_is_sent_again_are_one_use(once: Stage) -> None:
    """The learner dies with its lease, then replay does; the answer to the commit is lost, and replay dies once more."""
    _, _, leased = begin(once)
    assert once.learner().lease() == leased
    once.reopen()
    learner = once.learner()
    assert learner.lease() == leased
    record, bulk, new = learner.record(leased)
    first, _ = learner.client.call(Commit(learner.epoch, record, new), bulk)
    assert isinstance(first, Committed)
    assert uses(once) == [(1, 4), 0]
    once.reopen()
    later = once.learner()
    again, _ = later.client.call(Commit(later.epoch, record, new), bulk)
    assert isinstance(again, Committed)
    assert (again.version, again.done) == (first.version, first.done) == (1, False)
    assert uses(once) == [(1, 4), 0]
    assert once.rows("SELECT update_id, version_out FROM updates") == [(1, 1)]
    assert once.kinds().count("commit") == 1


def test_a_rerun_writes_nothing(once: Stage) -> None:
    learner, _, leased = begin(once)
    learner.commit(leased)
    head = once.core.store.ledger.head
    for _ in range(2):
        reply, _ = recall(once.core.store.db, 1)
        assert reply.record.group_ids == leased.group_ids
        assert [row.rollout_id for row in reply.heads] == [row.rollout_id for row in leased.heads]
    assert (once.core.store.ledger.head, uses(once)) == (head, [(1, 4), 0])


def test_another_use_of_the_same_groups_is_refused_and_changes_nothing(once: Stage) -> None:
    learner, actor, first = begin(once)
    orders = list(actor.holding.values())
    learner.commit(first)
    with pytest.raises(TryAgainError, match="update 2 is not the one that is leased: the next is 2, 0 groups are leased"):
        learner.commit(first, update=2)  # as the next update
    with pytest.raises(TryAgainError, match="update 1 is not the one that is leased"):
        learner.commit(first)  # as the same update, from the version that it made
    actor.pull(want=0)
    actor.work()
    second = learner.lease()
    assert not {*second.group_ids} & {*first.group_ids}
    ids = [head.rollout_id for head in first.heads]
    with pytest.raises(TryAgainError, match="its groups are not those of the lease"):
        learner.commit(second, group_ids=first.group_ids, rollout_ids=ids)
    with pytest.raises(ProtocolError, match="not the scored rollouts of the lease"):
        learner.commit(second, rollout_ids=ids)  # under the new groups' names
    assert uses(once) == [(1, 4), 4]
    learner.commit(second)
    assert uses(once) == [(1, 4), (2, 4), 0]
    for order in orders:  # a resend of what was trained makes no second row to train on
        assert actor.put([rollout(order, sample, 0) for sample in range(order.n)]).stored == 0
    assert uses(once) == [(1, 4), (2, 4), 0]
