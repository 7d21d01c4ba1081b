"""Evaluation orders: when, to whom, with which version, and what they add up to."""

from collections.abc import Callable

import pytest

from replay.books import books
from replay.evals import evaluation_due
from tests.replay.conftest import Stage
from tests.support.replay import LightActor, notice, rollout
from wire.messages import Checkpointed, Fork, GiveBack, NotYet, SampleFailure
from wire.record import Failed, Scored, Span


@pytest.mark.parametrize(("stepped", "every", "at", "due"), [
    (0, None, [], True), (0, None, [0], False), (1, None, [0], False), (10, None, [0], True), (10, None, [0, 10], False),
    (5, 5, [0], True), (5, 5, [0, 5], False), (6, 5, [0, 5], False), (3, None, [], True),
])
def test_when(stepped: int, every: int | None, at: list[int], due: bool) -> None:
    assert evaluation_due(stepped=stepped, total=10, every=every, at=at) is due


def evaluate(actor: LightActor) -> None:
    while (orders := actor.pull(want=4).orders) and orders[0].version is not None:
        actor.answer(orders)


def test_no_training_order_before_the_first_evaluation_is_stored(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=3)
    learner, actor, other = stage.learner(), stage.actor("a0"), stage.actor("a1")
    work = actor.pull(want=4)
    assert work.notice == notice(0)
    assert [(o.purpose, o.n, o.sampling.temperature, o.version) for o in work.orders] == [("eval", 2, 1.0, 0)] * 3 + [
        ("greedy_baseline", 1, 0.0, 0)
    ]
    assert other.pull().orders == []
    assert other.pull().orders == []  # one actor has the evaluation, nobody trains
    assert learner.lease() == NotYet("first evaluation: 0 of 9 answers")
    actor.answer(work.orders)
    assert learner.lease() == NotYet("first evaluation: 7 of 9 answers")
    assert other.pull().orders == []
    actor.answer(actor.pull().orders)
    assert stage.rows("SELECT state, version, updates, sampled, greedy, failed FROM evals") == [("done", 0, 0, 0.5, 0.0, 0)]
    assert [order.purpose for order in other.pull().orders] == ["train"] * 4
    assert books(stage.core.store.db)["produced"] == 0  # outside the books
    assert stage.rows("SELECT count(*) FROM eval_rollouts") == [(9,)]


def test_the_last_evaluation_follows_the_last_update_and_ends_the_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2, learner={"updates": 2}, eval={"every": 1})
    learner, actor = stage.learner(), stage.actor()
    evaluate(actor)
    for _ in range(2):
        actor.answer()
        actor.pull(want=0)
        actor.work()
        learner.commit(learner.lease())
        evaluate(actor)
    assert stage.rows("SELECT version, updates, state FROM evals") == [(0, 0, "done"), (1, 1, "done"), (2, 2, "done")]
    assert {version for _, version in actor.evaluated} == {0, 1, 2}
    assert actor.done


def test_an_actor_with_eval_orders_gets_no_other_notice_and_catches_up_after(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=3, learner={"updates": 2}, eval={"every": 1})
    learner, actor, other = stage.learner(), stage.actor("a0"), stage.actor("a1")
    evaluate(actor)
    actor.answer()
    other.pull()
    other.work()
    learner.commit(learner.lease())
    work = actor.pull(want=1)  # an evaluation of version 1 begins
    assert (work.notice, work.orders[0].version) == (notice(1), 1)
    other.pull()
    other.work()
    learner.commit(learner.lease())
    assert learner.committed == 2
    assert actor.pull(want=0).notice is None
    rest = actor.pull(want=20)
    assert (rest.notice, {order.version for order in rest.orders}) == (None, {1})
    actor.answer()
    later = actor.pull(want=20)  # the evaluation of version 2
    assert (later.notice, {order.version for order in later.orders}) == (notice(2), {2})


def test_eval_orders_of_a_dead_actor_go_to_another(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2)
    stage.learner()
    dead, other = stage.actor("a0"), stage.actor("a1")
    orders = dead.pull().orders
    dead.answer(orders[:1])
    assert other.pull().orders == []
    stage.clock.at += 31
    other.pull(want=0)
    again = other.pull().orders
    assert [order.order_id for order in again] == [order.order_id for order in orders[1:]]
    other.answer(again)
    assert stage.rows("SELECT state FROM evals") == [("done",)]
    assert dead.put([rollout(orders[1], 0, 0)]).duplicates == 1


def test_given_back_eval_orders_go_to_another(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2)
    stage.learner()
    actor, other = stage.actor("a0"), stage.actor("a1")
    orders = actor.pull().orders
    actor.client.call(GiveBack(actor.epoch, [f"{o.order_id}.1" for o in orders], "weights_refused"))
    assert [o.order_id for o in other.pull().orders] == [o.order_id for o in orders]


def test_answers_without_a_verdict_are_counted_and_left_out(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2, eval={"samples": 2})
    stage.learner()
    actor = stage.actor()
    one, two, *greedy = actor.pull().orders
    actor.put(
        [rollout(one, 0, 0, verdict=Scored(1.0)), rollout(one, 1, 0, verdict=Failed("timeout")), rollout(two, 0, 0, verdict=Scored(0.5))],
        [SampleFailure(two.order_id, 1, 1, "no_token")],
    )
    actor.answer(greedy)
    assert stage.rows("SELECT sampled, greedy, failed FROM evals") == [(0.75, 0.0, 2)]


def test_an_eval_answer_of_another_version_is_poison(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=1, eval={"every": 1, "greedy": False})
    learner, actor = stage.learner(), stage.actor()
    evaluate(actor)
    actor.answer()
    actor.work()
    learner.commit(learner.lease())
    order = actor.pull().orders[0]
    stored = actor.put([rollout(order, 0, 1, spans=(Span(0, 0, 3),))])
    assert stored.quarantined[0][1] == "answered with version 0, the order names 1"


def test_evaluations_survive_a_restart(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=3)
    stage.learner()
    actor = stage.actor()
    orders = actor.pull(want=4).orders
    actor.answer(orders[:2])
    stage.reopen()
    current = stage.core.evals[0]
    assert (current.answered, current.total, current.actor, len(current.queue)) == (4, 9, "a0", 2)
    again = LightActor(stage.core, stage.config, "a0")
    assert [o.order_id for o in again.pull(want=2).orders] == [o.order_id for o in orders[2:]]
    again.answer()
    evaluate(again)
    assert stage.rows("SELECT state FROM evals") == [("done",)]


def test_an_evaluation_of_an_orphaned_version_is_given_up(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2, eval={"every": 2}, learner={"updates": 10})
    learner, actor = stage.learner(), stage.actor()
    evaluate(actor)
    actor.answer()
    for update in range(2):
        learner.commit(learner.lease())
        if update == 0:
            learner.client.call(Checkpointed(learner.epoch, 1, "checkpoints/v000001", "d" * 64))
            actor.pull(want=0)
            actor.work()
    assert stage.rows("SELECT version, state FROM evals") == [(0, "done"), (2, "pending")]
    learner.client.call(Fork(learner.epoch, 1, notice(3)))
    assert stage.rows("SELECT version, state FROM evals") == [(0, "done"), (2, "lost")]
    assert stage.rows("SELECT DISTINCT state, reason FROM groups WHERE eval_id = 2") == [("dropped", "orphaned")]
    actor.holding.clear()
    actor.pull(want=0)
    actor.work()
    learner.committed = 3
    learner.commit(learner.lease())
    assert stage.rows("SELECT version, updates, state FROM evals WHERE state = 'pending'") == [(4, 2, "pending")]


def test_an_actor_that_lost_its_version_is_told_of_it_while_it_holds_an_evaluation(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=3)
    stage.learner()
    actor = stage.actor()
    assert len(actor.pull(want=2).orders) == 2
    actor.confirmed = -1  # its engine died
    assert actor.pull(want=0).notice == notice(0)
    assert actor.confirmed == 0
    assert actor.pull(want=0).notice is None
    actor.answer()


def test_an_evaluation_that_falls_due_while_one_is_open_is_skipped_but_the_last_is_made(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=2, learner={"updates": 4}, eval={"every": 1})
    learner, slow, actor = stage.learner(), stage.actor("a0"), stage.actor("a1")
    evaluate(slow)
    slow.answer()  # the training orders that came after it
    for _ in range(4):
        actor.pull(want=0)
        actor.work()
        learner.commit(learner.lease())
        slow.pull(want=1)  # it takes the first evaluation that it can, and never answers
    assert stage.rows("SELECT updates, state FROM evals") == [(0, "done"), (1, "pending"), (4, "pending")]
    assert stage.core.store.counters["evaluations_skipped"] == 2
