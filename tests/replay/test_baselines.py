"""Greedy baselines (ReMax): a group is complete only with its own, and nothing of it is ever among what is trained on."""

from collections.abc import Callable
from typing import Any

import pytest

from replay.books import books, imbalance
from replay.recall import recall
from replay.sampler import Group, GroupBook, Transition
from tests.replay.conftest import Stage
from tests.support.replay import LightActor, LightLearner, notice, rollout
from wire.errors import ProtocolError
from wire.messages import Checkpointed, Fork, GiveBack, Leased, Rows, SampleFailure, Unscored
from wire.record import Failed, Sampling, Scored, Span, WorkOrder

REMAX = {"estimator": "remax"}
GREEDY = Sampling(0.0, 8)


# ---------------------------------------------------------------- the book
def granted(book: GroupBook, name: str, attempt: int = 1) -> Group:
    group = Group(f"{name}.{attempt}", name, attempt, 2, baseline=True)
    book.grant(group, "a0", 0.0)
    return group


def make_book(**changes: Any) -> GroupBook:
    return GroupBook(**{"max_staleness": 1, "groups_per_update": 2, "min_scored": 1, "max_attempts": 3, **changes})


def test_the_last_outcome_may_be_the_greedy_one_or_not() -> None:
    book = make_book()
    one, two = granted(book, "x"), granted(book, "y")
    assert [book.outcome("x.1", sample, "scored", 5) for sample in (0, 1)] == [None, None]
    assert book.outcome("x.1", 2, "scored", 5) == Transition(one, "complete")
    assert [book.outcome("y.1", sample, "scored", 5) for sample in (2, 0)] == [None, None]
    assert book.outcome("y.1", 1, "scored", 5) == Transition(two, "complete")
    assert (one.scored, two.scored) == (2, 2)


@pytest.mark.parametrize("outcome", ["failed", "quarantined", "aborted"])
def test_without_a_greedy_reward_the_group_is_incomplete(outcome: Any) -> None:
    book = make_book()
    group = granted(book, "x")
    for sample in (0, 1):
        book.outcome("x.1", sample, "scored", 5)
    assert book.outcome("x.1", 2, outcome) == Transition(group, "dropped", "incomplete_group", requeue=True)
    assert book.live == 0


@pytest.mark.parametrize(("samples", "greedy", "excused"), [
    (("scored", "scored"), "aborted", 1), (("aborted", "scored"), "aborted", 1), (("aborted", "aborted"), "scored", 1),
    (("scored", "scored"), "failed", 0), (("failed", "failed"), "aborted", 0), (("aborted", "scored"), "quarantined", 0)])
def test_only_weight_swaps_excuse_an_attempt(samples: Any, greedy: Any, excused: int) -> None:
    book = make_book(min_scored=2)
    group = granted(book, "x", attempt=3)
    for sample, outcome in enumerate((*samples, greedy)):
        settled = book.outcome("x.3", sample, outcome)
    assert settled == Transition(group, "dropped", "incomplete_group", requeue=bool(excused))
    assert group.excused == excused


def test_the_greedy_response_is_no_sample() -> None:
    book = make_book(min_scored=2)
    group = granted(book, "x", attempt=3)
    book.outcome("x.3", 0, "scored", 5)
    book.outcome("x.3", 2, "scored", 5)
    assert group.scored == 1
    assert book.outcome("x.3", 1, "failed") == Transition(group, "dropped", "incomplete_group", requeue=False)


def test_a_lease_that_ends_before_it_came_leaves_the_group_incomplete() -> None:
    book = make_book()
    group = granted(book, "x")
    for sample in (0, 1):
        book.outcome("x.1", sample, "scored", 5)
    assert book.expire_orders(61.0, 60.0) == [Transition(group, "dropped", "incomplete_group", requeue=True)]


def test_its_tokens_count_for_the_budget() -> None:
    book = make_book(groups_per_update=1)
    group = granted(book, "x")
    for sample, oldest in ((0, 5), (1, 5), (2, 4)):
        book.outcome("x.1", sample, "scored", oldest)
    assert group.oldest_version == 4
    assert book.lease(6) == ([], [Transition(group, "expired", "staleness", requeue=True)])


def test_contrast_is_with_the_greedy_reward() -> None:
    book = make_book(dynamic_sampling=True)
    flat, lively = granted(book, "x"), granted(book, "y")
    for sample in (0, 1):
        book.outcome("x.1", sample, "scored", 5, 1.0)
        book.outcome("y.1", sample, "scored", 5, 1.0)
    assert book.outcome("x.1", 2, "scored", 5, 1.0) == Transition(flat, "dropped", "no_contrast")
    assert book.outcome("y.1", 2, "scored", 5, 0.0) == Transition(lively, "complete")


# ---------------------------------------------------------------- the store
@pytest.fixture
def remax(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(recipe=REMAX)


def begin(stage: Stage, want: int = 2) -> tuple[LightLearner, LightActor, list[WorkOrder]]:
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    return learner, actor, actor.pull(want=want).orders


def states(stage: Stage) -> dict[str, Any]:
    return {group: state if reason is None else f"{state}({reason})"
            for group, state, reason in stage.rows("SELECT group_id, state, reason FROM groups WHERE purpose = 'train' ORDER BY rowid")}


def test_an_order_asks_for_one_greedy_response_more(remax: Stage) -> None:
    _, _, (order, _) = begin(remax)
    assert (order.purpose, order.n, order.rows, order.baseline) == ("train", 2, 3, GREEDY)
    assert [order.sampling_of(sample) for sample in range(3)] == [Sampling(1.0, 8), Sampling(1.0, 8), GREEDY]


def test_another_recipe_asks_for_none(stage: Stage) -> None:
    learner, actor, orders = begin(stage)
    assert [order.baseline for order in orders] == [None, None]
    with_one = rollout(orders[0], 2, 0, sampling=GREEDY)
    assert actor.put([with_one]).refused == [("t0000000.1.2", "sample 2 of 2")]
    actor.answer()
    assert learner.lease().baselines == []


def test_a_group_is_complete_with_it_and_is_leased_with_its_head_alone(remax: Stage) -> None:
    learner, actor, (one, two) = begin(remax)
    actor.put([rollout(one, 0, 0), rollout(one, 1, 0)])
    actor.answer([two], verdict=Scored(0.25))
    assert states(remax) == {"t0000000.1": "granted", "t0000001.1": "complete"}
    spans = (Span(0, 0, 2), Span(0, 2, 3, False))
    actor.put([rollout(one, 2, 0, verdict=Scored(0.75), spans=spans)])
    assert states(remax)["t0000000.1"] == "complete"
    leased = learner.lease()
    assert [head.rollout_id for head in leased.heads] == ["t0000000.1.0", "t0000000.1.1", "t0000001.1.0", "t0000001.1.1"]
    assert [(head.rollout_id, head.verdict, head.sampling) for head in leased.baselines] == [
        ("t0000000.1.2", Scored(0.75), GREEDY), ("t0000001.1.2", Scored(0.25), GREEDY)]
    assert leased.baselines[0].spans == spans
    assert len(learner.bulk) == 4 * 4 * (4 + 3 + 3)  # four payloads, of 4 prompt and 3 response tokens: the greedy ones stay at replay


def test_it_is_outside_the_books_and_never_anchored(remax: Stage) -> None:
    learner, actor, _ = begin(remax)
    actor.answer()
    found = books(remax.core.store.db)
    assert (found["produced"], found["buffered"], imbalance(found)) == (4, 4, 0)
    assert remax.core.store.counters["greedy_rollouts"] == 2
    assert remax.rows("SELECT count(*) FROM spans WHERE rollout_id LIKE '%.2'") == [(0,)]
    rows, _ = learner.client.call(Unscored(learner.epoch, 0, 100))
    assert isinstance(rows, Rows)
    assert [head.sample for head in rows.heads] == [0, 1, 0, 1]
    assert remax.rows("SELECT rollout_id, eval_id, purpose, version, reward FROM eval_rollouts") == [
        ("t0000000.1.2", 0, "greedy_baseline", 0, 0.0), ("t0000001.1.2", 0, "greedy_baseline", 0, 0.0)]


@pytest.mark.parametrize("how", ["failed", "aborted", "no token", "sampled otherwise"])
def test_when_it_came_to_nothing_the_prompt_is_asked_again(remax: Stage, how: str) -> None:
    _, actor, (one, _) = begin(remax)
    rows, failures = [rollout(one, 0, 0), rollout(one, 1, 0)], []
    match how:
        case "failed":
            rows.append(rollout(one, 2, 0, verdict=Failed("timeout")))
        case "aborted":
            rows.append(rollout(one, 2, 0, verdict=Failed("aborted")))
        case "no token":
            failures.append(SampleFailure(one.order_id, 1, 2, "no_token"))
        case "sampled otherwise":
            rows.append(rollout(one, 2, 0, sampling=one.sampling))
    stored = actor.put(rows, failures)
    assert [rollout for rollout, _ in stored.quarantined] == (["t0000000.1.2"] if how == "sampled otherwise" else [])
    assert states(remax) == {"t0000000.1": "dropped(incomplete_group)", "t0000001.1": "granted", "t0000000.2": "queued"}
    assert imbalance(books(remax.core.store.db)) == 0
    actor.holding.pop("t0000000.1")
    again = actor.pull(want=1).orders[0]
    assert (again.order_id, again.attempt, again.baseline) == ("t0000000", 2, GREEDY)


def test_a_second_one_is_a_duplicate_before_and_after_the_group_settled(remax: Stage) -> None:
    _, actor, (one, _) = begin(remax)
    assert actor.put([rollout(one, 2, 0), rollout(one, 2, 0)]).duplicates == 1
    assert actor.put([rollout(one, 2, 0)]).duplicates == 1
    actor.put([rollout(one, 0, 0), rollout(one, 1, 0)])
    assert actor.put([rollout(one, 2, 0)]).duplicates == 1
    assert states(remax)["t0000000.1"] == "complete"


def test_given_back_groups_forget_their_half_of_it(remax: Stage) -> None:
    _, actor, (one, _) = begin(remax)
    actor.put([rollout(one, 2, 0)])
    actor.client.call(GiveBack(actor.epoch, ["t0000000.1"], "stop"))
    del actor.holding["t0000000.1"]
    again = actor.pull(want=1).orders[0]
    actor.put([rollout(again, 0, 0), rollout(again, 1, 0)])
    assert states(remax)["t0000000.2"] == "granted"  # the first attempt's greedy reward is not this one's
    actor.put([rollout(again, 2, 0)])
    assert states(remax)["t0000000.2"] == "complete"


def test_a_restart_in_the_middle_of_a_group_forgets_nothing(remax: Stage) -> None:
    _, actor, (one, two) = begin(remax)
    actor.put([rollout(one, 2, 0, verdict=Scored(0.5)), rollout(two, 0, 0), rollout(two, 1, 0)])
    before = dict(remax.core.book.groups)
    remax.reopen()
    after = remax.core.book.groups
    assert [(g.outcomes, g.oldest_version, g.rewards, g.baseline) for g in after.values()] == [
        (g.outcomes, g.oldest_version, g.rewards, g.baseline) for g in before.values()]
    assert after["t0000000.1"].rewards == {0.5}
    learner, again = remax.learner(), remax.actor()
    again.pull(want=0)
    assert again.put([rollout(one, 2, 0)]).duplicates == 1
    again.put([rollout(one, 0, 0), rollout(one, 1, 0), rollout(two, 2, 0, verdict=Scored(0.125))])
    first = learner.lease()
    remax.reopen()
    reissued = remax.learner().lease()
    assert isinstance(first, Leased)
    assert (reissued.group_ids, reissued.baselines) == (first.group_ids, first.baselines)
    assert [head.verdict for head in first.baselines] == [Scored(0.5), Scored(0.125)]


def test_a_greedy_response_that_got_too_old_expires_its_group(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recipe=REMAX, replay={"max_staleness": 0}, learner={"groups_per_update": 1, "updates": 4})
    learner, actor, (one,) = begin(stage, 1)
    stage.core.book.max_staleness = 1
    two = actor.pull(want=1).orders[0]
    actor.answer([one])
    learner.commit(learner.lease())
    actor.pull(want=0)
    assert actor.confirmed == 1
    stage.core.book.max_staleness = 0
    actor.put([rollout(two, 0, 1), rollout(two, 1, 1), rollout(two, 2, 0, spans=(Span(0, 0, 1), Span(1, 1, 3)))])
    assert stage.rows("SELECT state, oldest_version FROM groups WHERE group_id = 't0000001.1'") == [("complete", 0)]
    learner.lease()
    assert states(stage) == {"t0000000.1": "trained", "t0000001.1": "expired(staleness)", "t0000001.2": "queued"}
    assert books(stage.core.store.db)["expired"] == 2


def test_a_commit_has_to_name_the_greedy_rewards_of_its_groups(remax: Stage) -> None:
    learner, actor, _ = begin(remax)
    actor.answer(verdict=Scored(0.5))
    leased = learner.lease()
    for wrong in ([], [0.5], [0.5, 0.25]):
        with pytest.raises(ProtocolError, match="greedy_rewards are not those of the lease"):
            learner.commit(leased, greedy_rewards=wrong)
    learner.commit(leased)
    reply, _ = recall(remax.core.store.db, 1)
    assert reply.record.greedy_rewards == [0.5, 0.5]
    assert reply.baselines == leased.baselines


def test_a_fork_drops_groups_whose_greedy_response_holds_an_orphaned_token(remax: Stage) -> None:
    learner, actor, _ = begin(remax, 2)
    learner.client.call(Checkpointed(learner.epoch, 0, "checkpoints/v000000", "d" * 64))
    one, two, three, four = [*actor.holding.values(), *actor.pull(want=2).orders]
    actor.answer([one, two])
    learner.commit(learner.lease())
    actor.pull(want=0)
    actor.put([rollout(three, 0, 0), rollout(three, 1, 0), rollout(three, 2, 0, spans=(Span(0, 0, 1), Span(1, 1, 3)))])
    actor.put([rollout(four, sample, 0) for sample in range(3)])
    learner.client.call(Fork(learner.epoch, 0, notice(2)))
    assert {name: state for name, state in states(remax).items() if not state.startswith(("queued", "lost"))} == {
        "t0000002.1": "dropped(orphaned)", "t0000003.1": "complete"}


def test_retention_takes_its_tokens_with_its_groups(remax: Stage) -> None:
    learner, actor, _ = begin(remax)
    for version in (1, 2, 3):
        actor.answer()
        learner.commit(learner.lease())
        learner.client.call(Checkpointed(learner.epoch, version, f"checkpoints/v{version:06d}", "d" * 64))
        remax.core.keep_house_before_commit()
        remax.core.store.commit()
        actor.pull(want=2)
    gone = "SELECT {}.rollout_id FROM {} WHERE payload IS NULL ORDER BY 1"
    groups = {name.rpartition(".")[0] for name, in remax.rows(gone.format("rollouts", "rollouts"))}
    assert groups == {f"t000000{number}.1" for number in range(4)}  # of updates 1 and 2; update 3 is after the oldest checkpoint kept
    assert {name.rpartition(".")[0] for name, in remax.rows(gone.format("eval_rollouts", "eval_rollouts"))} == groups
