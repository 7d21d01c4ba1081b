"""DAPO's dynamic sampling: a group without contrast leaves as it settles, is counted, and another prompt takes its place."""

from collections.abc import Callable

import pytest

from replay.books import books, imbalance
from replay.sampler import GroupBook, Transition
from tests.replay.conftest import Stage
from tests.replay.test_sampler import granted
from tests.support.replay import rollout
from wire.errors import RunError
from wire.record import Failed, Scored

ON = {"dynamic_sampling": True}


def test_equal_rewards_drop_the_group_and_ask_no_second_time() -> None:
    book = GroupBook(max_staleness=1, groups_per_update=2, min_scored=2, max_attempts=3, dynamic_sampling=True)
    flat, lively = granted(book, "x"), granted(book, "y")
    assert book.allowance(0, 0) == 2
    for sample, reward in ((0, 0.5), (1, 0.5)):
        book.outcome("x.1", sample, "scored", 0, reward)
    assert "x.1" not in book.groups
    assert book.allowance(0, 0) == 3
    assert book.outcome("y.1", 0, "scored", 0, 0.5) is None
    assert book.outcome("y.1", 1, "scored", 0, 0.25) == Transition(lively, "complete")
    assert flat.rewards == {0.5}


def test_without_the_key_nothing_is_dropped(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    actor.pull()
    actor.answer(verdict=Scored(1.0))
    assert stage.rows("SELECT DISTINCT state FROM groups") == [("complete",)]


def test_they_are_counted_and_refilled(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recipe=ON)
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull().orders
    actor.answer(orders[:2], verdict=Scored(1.0))
    assert books(stage.core.store.db)["dropped"] == {"no_contrast": 4}
    assert imbalance(books(stage.core.store.db)) == 0
    assert stage.rows("SELECT group_id, state, reason FROM groups WHERE state = 'dropped'") == [
        ("t0000000.1", "dropped", "no_contrast"), ("t0000001.1", "dropped", "no_contrast")]
    more = actor.pull().orders
    assert [order.order_id for order in more] == ["t0000004", "t0000005"]  # other prompts: these are not asked again
    actor.answer()
    assert learner.lease().group_ids == ["t0000002.1", "t0000003.1"]


def test_members_without_a_verdict_go_with_their_group(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recipe=ON, sampling={"n": 3, "max_new_tokens": 8}, replay={"max_staleness": 1, "min_scored": 2})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    actor.put([rollout(order, 0, 0, verdict=Scored(1.0)), rollout(order, 1, 0, verdict=Failed("crash")),
               rollout(order, 2, 0, verdict=Scored(1.0))])
    assert stage.rows("SELECT DISTINCT state, reason FROM rollouts") == [("dropped", "no_contrast")]


def test_a_restart_in_the_middle_of_a_group_forgets_no_reward(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recipe=ON)
    stage.learner()
    actor = stage.actor()
    actor.pull()
    flat, lively = actor.pull(want=2).orders
    actor.put([rollout(flat, 0, 0, verdict=Scored(1.0)), rollout(lively, 0, 0, verdict=Scored(1.0))])
    stage.reopen()
    assert stage.core.book.groups["t0000000.1"].rewards == {1.0}
    again = stage.actor()
    again.pull()
    again.put([rollout(flat, 1, 0, verdict=Scored(1.0)), rollout(lively, 1, 0, verdict=Scored(0.0))])
    assert stage.rows("SELECT group_id, state, reason FROM groups WHERE state != 'granted' ORDER BY 1") == [
        ("t0000000.1", "dropped", "no_contrast"), ("t0000001.1", "complete", None)]


def test_too_many_in_a_row_end_the_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recipe=ON, learner={"groups_per_update": 2, "updates": 4, "max_consecutive_skips": 2})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    actor.pull()
    actor.answer(verdict=Scored(1.0))
    actor.pull(want=1)
    with pytest.raises(RunError, match="5 groups in a row had equal rewards"):
        actor.answer(verdict=Scored(1.0))
