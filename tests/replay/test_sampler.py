"""GroupBook: literal cases, and the property that nothing stops it and nothing gets past the budget."""

import copy
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay.sampler import Group, GroupBook, Transition


def make_book(**changes: int) -> GroupBook:
    return GroupBook(**{"max_staleness": 1, "groups_per_update": 2, "min_scored": 2, "max_attempts": 3, **changes})


def granted(book: GroupBook, name: str, *, attempt: int = 1, n: int = 2, now: float = 0.0) -> Group:
    group = Group(f"{name}.{attempt}", name, attempt, n)
    book.grant(group, "a0", now)
    return group


def names(transitions: list[Transition]) -> list[tuple[str, str, str | None, bool]]:
    return [(t.group.group_id, t.to, t.reason, t.requeue) for t in transitions]


def test_a_group_settles_when_every_sample_has_an_outcome() -> None:
    book = make_book()
    group = granted(book, "x")
    assert book.outcome("x.1", 0, "scored", 4) is None
    assert book.outcome("x.1", 1, "scored", 3) == Transition(group, "complete")
    assert (group.state, group.oldest_version) == ("complete", 3)


@pytest.mark.parametrize("outcome", ["failed", "quarantined", "aborted"])
def test_too_few_scored_samples_drop_the_group_and_ask_again(outcome: Any) -> None:
    book = make_book()
    granted(book, "x")
    book.outcome("x.1", 0, "scored", 0)
    settled = book.outcome("x.1", 1, outcome)
    assert settled is not None
    assert names([settled]) == [("x.1", "dropped", "incomplete_group", True)]
    assert book.live == 0


def test_enough_scored_samples_complete_it() -> None:
    book = make_book(min_scored=1)
    granted(book, "x")
    book.outcome("x.1", 0, "failed")
    settled = book.outcome("x.1", 1, "scored", 0)
    assert settled is not None
    assert settled.to == "complete"


def test_the_last_attempt_is_not_asked_again() -> None:
    book = make_book()
    granted(book, "x", attempt=3)
    book.outcome("x.3", 0, "failed")
    settled = book.outcome("x.3", 1, "failed")
    assert settled is not None
    assert names([settled]) == [("x.3", "dropped", "incomplete_group", False)]


def test_what_weight_swaps_aborted_is_always_asked_again_and_does_not_count() -> None:
    book = make_book()
    group = granted(book, "x", attempt=3)
    book.outcome("x.3", 0, "scored", 0)
    settled = book.outcome("x.3", 1, "aborted")
    assert settled is not None
    assert names([settled]) == [("x.3", "dropped", "incomplete_group", True)]
    assert group.excused == 1


@pytest.mark.parametrize(("excused", "again"), [(0, False), (1, False), (2, True)])
def test_a_failure_counts_although_another_sample_was_aborted(excused: int, again: bool) -> None:
    book = make_book()
    group = granted(book, "x", attempt=4)
    group.excused = excused  # attempt 4 is the third that counts when one was excused
    book.outcome("x.4", 0, "aborted")
    settled = book.outcome("x.4", 1, "failed")
    assert settled is not None
    assert (settled.requeue, group.excused) == (again, excused)


def test_orders_end_with_their_lease_unless_touched() -> None:
    book = make_book()
    for name in ("x", "y", "z"):
        granted(book, name)
    book.outcome("z.1", 0, "scored", 0)
    book.outcome("z.1", 1, "scored", 0)
    book.touch(["x.1", "z.1", "nobody"], "a0", 50.0)
    book.touch(["y.1"], "another", 50.0)
    assert names(book.expire_orders(60.0, 60.0)) == []
    assert names(book.expire_orders(60.1, 60.0)) == [("y.1", "dropped", "incomplete_group", True)]
    assert [group.group_id for group in book.in_state("complete")] == ["z.1"]  # complete groups have no lease


@pytest.mark.parametrize(("least", "outcomes", "again"), [
    (2, [], True), (2, ["scored"], True), (2, ["aborted"], True), (2, ["failed"], False), (2, ["quarantined"], False),
    (1, ["failed"], True),  # the other sample would have been enough
])
def test_an_actor_that_vanishes_uses_up_no_attempt_unless_the_prompt_had_failed_already(least: int, outcomes: list[Any],
                                                                                       again: bool) -> None:
    book = make_book(min_scored=least)
    group = granted(book, "x", attempt=3)
    if outcomes == ["scored"]:
        book.outcome("x.3", 1, "scored", 0)
    elif outcomes:
        book.outcome("x.3", 0, outcomes[0])
    assert names(book.expire_orders(61.0, 60.0)) == [("x.3", "dropped", "incomplete_group", again)]
    assert (group.excused, group.outlived) == (int(again), 1)


def test_the_greedy_response_of_an_actor_that_vanished_is_no_failure_either() -> None:
    book = make_book()
    group = Group("x.3", "x", 3, 2, baseline=True)
    book.grant(group, "a0", 0.0)
    for sample in range(2):
        book.outcome("x.3", sample, "scored", 0)
    assert names(book.expire_orders(61.0, 60.0)) == [("x.3", "dropped", "incomplete_group", True)]
    assert group.excused == 1


def test_a_lease_that_ends_keeps_what_is_enough() -> None:
    book = make_book(min_scored=1)
    granted(book, "x")
    book.outcome("x.1", 0, "scored", 0)
    assert names(book.expire_orders(61.0, 60.0)) == [("x.1", "complete", None, False)]


def test_what_is_given_back_is_always_asked_again() -> None:
    book = make_book()
    granted(book, "x", attempt=3)
    assert names(book.give_back(["x.3", "nobody"], "another")) == []
    assert names(book.give_back(["x.3", "nobody"], "a0")) == [("x.3", "dropped", "given_back", True)]


def test_expired_groups_are_asked_again_and_at_last_dropped() -> None:
    book = make_book()
    for name, attempt in (("x", 1), ("y", 3), ("z", 1)):
        granted(book, name, attempt=attempt)
        for sample in range(2):
            book.outcome(f"{name}.{attempt}", sample, "scored", 5 if name == "z" else 4)
    groups, transitions = book.lease(6)
    assert groups == []
    assert names(transitions) == [("x.1", "expired", "staleness", True), ("y.3", "dropped", "too_slow", False)]
    assert [group.group_id for group in book.in_state("complete")] == ["z.1"]


class Run(RuleBasedStateMachine):
    """A whole run on the pure core: a reference queue; actors that swap late, die, fail and abort; a learner that steps, skips or
    stalls; crashes."""

    eta, B, n = 0, 2, 2

    @initialize(eta=st.sampled_from([0, 1, 2, 8]), least=st.integers(1, 2), attempts=st.integers(1, 3), baseline=st.booleans())
    def start(self, eta: int, least: int, attempts: int, baseline: bool) -> None:
        self.baseline = baseline
        self.book = GroupBook(max_staleness=eta, groups_per_update=self.B, min_scored=least, max_attempts=attempts)
        self.version, self.updates, self.now = 0, 0, 0.0
        self.queue: list[Group] = []
        self.asked = 0
        self.actors = {"a0": 0, "a1": 0}
        self.held: dict[str, str] = {}
        self.settled: dict[str, str] = {}
        self.trained: set[str] = set()

    def see(self, transitions: list[Transition]) -> None:
        for group, to, _, requeue in transitions:
            if to in ("complete", "leased"):
                continue
            assert group.group_id not in self.settled, "settled twice"
            self.settled[group.group_id] = to
            self.held.pop(group.group_id, None)
            if requeue:
                self.queue.append(Group(f"{group.order_id}.{group.attempt + 1}", group.order_id, group.attempt + 1, self.n,
                                        excused=group.excused, baseline=self.baseline))

    @rule(actor=st.sampled_from(["a0", "a1"]), want=st.integers(1, 4))
    def pull(self, actor: str, want: int) -> None:
        count = min(want, self.book.allowance(self.version, self.actors[actor]))
        for _ in range(count):
            if self.queue:
                group = self.queue.pop(0)
            else:
                group = Group(f"p{self.asked}.1", f"p{self.asked}", 1, self.n, baseline=self.baseline)
                self.asked += 1
            self.book.grant(group, actor, self.now)
            self.held[group.group_id] = actor

    @rule(actor=st.sampled_from(["a0", "a1"]))
    def swap(self, actor: str) -> None:
        self.actors[actor] = self.version

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=st.sampled_from(["scored", "scored", "scored", "failed", "quarantined", "aborted"]))
    def answer(self, data: st.DataObject, outcome: Any) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.held)))
        group = self.book.groups[group_id]
        open_samples = [sample for sample in range(group.rows) if sample not in group.outcomes]
        assume(group.state == "granted" and open_samples)
        settled = self.book.outcome(group_id, open_samples[0], outcome, self.actors[self.held[group_id]])
        if settled is not None:
            self.see([settled])
            self.held.pop(group_id, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.held)))
        self.see(self.book.give_back([group_id], self.held[group_id]))
        self.held.pop(group_id, None)

    @rule(dead=st.sampled_from(["a0", "a1"]))
    def die(self, dead: str) -> None:
        self.book.touch([g for g, actor in self.held.items() if actor != dead], "a0" if dead == "a1" else "a1", self.now + 61)
        self.now += 61
        for transition in self.book.expire_orders(self.now, 60):
            self.see([transition])
            self.held.pop(transition.group.group_id, None)

    @rule(step=st.booleans())
    def update(self, step: bool) -> None:
        leased = self.book.in_state("leased")
        if not leased:
            leased, transitions = self.book.lease(self.version)
            self.see(transitions)
        if not leased:
            return
        assert len(leased) == self.B
        for group in leased:
            assert self.version - group.oldest_version <= self.book.max_staleness, "trained past the budget"  # type: ignore[operator]
            assert group.scored >= self.book.min_scored
            assert not self.baseline or group.outcomes[self.n] == "scored"
            assert group.order_id not in self.trained or group.attempt > 1
        if step:
            self.see(self.book.trained())
            self.trained |= {group.order_id for group in leased}
            self.version += 1
        else:
            self.see(self.book.skipped())
        self.updates += 1

    @rule()
    def lease_and_stall(self) -> None:
        if not self.book.in_state("leased"):
            self.see(self.book.lease(self.version)[1])

    @rule()
    def crash(self) -> None:
        """Memory is rebuilt from what the tables hold."""
        old = self.book
        self.book = GroupBook(
            max_staleness=old.max_staleness, groups_per_update=self.B, min_scored=old.min_scored, max_attempts=old.max_attempts
        )
        for group in old.groups.values():
            self.book.restore(copy.deepcopy(group))
        assert (self.book.next_seq, self.book.live) == (max((g.seq + 1 for g in old.groups.values()), default=0), old.live)
        self.book.next_seq = old.next_seq

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "book"):
            assert self.book.live <= (self.book.max_staleness + 1) * self.B

    def teardown(self) -> None:
        """Whatever happened, a well-behaved actor and learner go on from here."""
        if not hasattr(self, "book"):
            return
        before = self.updates
        for _ in range(3 * (self.book.max_staleness + 2) + 6):
            self.actors["a0"] = self.version
            self.now += 61
            for transition in self.book.expire_orders(self.now, 60):
                self.see([transition])
                self.held.pop(transition.group.group_id, None)
            self.pull("a0", self.B * (self.book.max_staleness + 1))
            for group_id in [g for g in self.held if self.book.groups[g].state == "granted"]:
                for sample in range(self.n + self.baseline):
                    if sample not in self.book.groups[group_id].outcomes:
                        settled = self.book.outcome(group_id, sample, "scored", self.version)
                        if settled is not None:
                            self.see([settled])
                self.held.pop(group_id, None)
            self.update(True)
        assert self.updates >= before + 3, "progress stopped"


Run.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)
TestRun = Run.TestCase
