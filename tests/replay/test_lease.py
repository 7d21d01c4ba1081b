"""Leases, commits, budget, expiry, skips."""

import json
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from replay.books import books, imbalance
from replay.handlers import arrive
from replay.watchdog import awaited
from tests.replay.conftest import Stage
from tests.support.replay import notice, rollout
from wire.errors import ProtocolError, TryAgainError
from wire.messages import Commit, Done, Lease, Leased, NotYet, Pull, PutAnchors, Unscored


def states(stage: Stage) -> dict[str, str]:
    return dict(stage.rows("SELECT group_id, state FROM groups ORDER BY grant_seq"))


def test_groups_are_leased_in_the_order_they_were_granted(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull().orders
    assert [order.order_id for order in orders] == ["t0000000", "t0000001", "t0000002", "t0000003"]  # (1 + 1) x 2 groups
    actor.answer([orders[3]])
    actor.answer([orders[1]])
    actor.answer([orders[2]])
    leased = learner.lease()
    assert isinstance(leased, Leased)
    assert leased.group_ids == ["t0000001.1", "t0000002.1"]
    assert [head.rollout_id for head in leased.heads] == ["t0000001.1.0", "t0000001.1.1", "t0000002.1.0", "t0000002.1.1"]
    assert stage.rows("SELECT update_id, state FROM groups WHERE state = 'leased'") == [(1, "leased"), (1, "leased")]


def test_admission_counts_granted_complete_and_leased_groups(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    assert [len(actor.pull(want=3).orders), len(actor.pull(want=3).orders), len(actor.pull(want=3).orders)] == [3, 1, 0]
    actor.answer()
    assert actor.pull().orders == []
    learner.lease()
    assert actor.pull().orders == []
    learner.commit(learner.lease())
    assert actor.pull().orders == []  # v = 1, a = 0: (1 + 1 - 1) x 2 = 2 groups, and 2 are live
    assert actor.confirmed == 1
    assert len(actor.pull().orders) == 2


def test_an_unproved_engine_gets_nothing(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.confirmed = 0  # claimed, never proved
    assert actor.pull().orders == []


def test_a_lease_is_handed_out_again_the_same(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    first = learner.lease()
    again = learner.lease()
    assert (first, learner.bulk) == (again, learner.bulk)
    successor = stage.learner()
    assert successor.lease() == first
    with pytest.raises(TryAgainError, match="replaced by a later one"):
        learner.lease()


def test_orders_of_actors_that_die_are_asked_again_however_often_and_the_prompt_is_named(stage: Stage,
                                                                                         caplog: pytest.LogCaptureFixture) -> None:
    stage.learner()
    asked = []
    for life in range(5):
        actor = stage.actor(f"a{life}")
        actor.pull(want=0)
        asked.append([(order.order_id, order.attempt, order.excused, order.outlived) for order in actor.pull(want=1).orders])
        stage.clock.at += 31
        stage.core.expire_orders()
        stage.core.store.commit()
        if life == 2:
            stage.reopen()  # the count is in the order
    assert asked == [[("t0000000", 1 + life, life, life)] for life in range(5)]
    named = [line for line in caplog.messages if line.startswith("order t0000000 (prompt ")]
    assert [line.partition(") ")[2].partition(": ")[0] for line in named] == [
        f"was left without an answer {times} times, the last time by a{times - 1}" for times in (3, 4, 5)]
    assert stage.core.store.counters["order_leases_ended"] == 5
    assert awaited(stage.core).endswith("; left without an answer by actors that vanished: t0000000 (prompt 30) 5 times")
    assert stage.rows("SELECT count(*), max(state) FROM groups WHERE state = 'dropped'") == [(5, "dropped")]


def test_a_prompt_that_ends_each_life_of_one_actor_is_named_too(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.learner()
    for _ in range(4):  # started again at once, by its supervisor: the lease never ends
        actor = stage.actor()
        actor.pull(want=0)
        assert [(order.order_id, order.attempt) for order in actor.pull(want=1).orders] == [("t0000000", 1)]
        stage.clock.at += 10
    assert [line.partition(") ")[2].partition(":")[0] for line in caplog.messages if line.startswith("order t0000000")] == [
        "was left without an answer 3 times, the last time by a0"]
    assert "t0000000 (prompt 30) 3 times" in awaited(stage.core)


@pytest.mark.parametrize("day", [86_400.0, -86_400.0])
def test_a_wall_clock_that_is_set_moves_no_lease_and_no_heartbeat(stage: Stage, day: float) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull(want=0)
    orders = actor.pull(want=2).orders
    stage.clock.at += 29
    stage.clock.set_ahead += day
    stage.core.expire_orders()
    assert len(stage.core.book.in_state("granted")) == 2
    assert "2 with a0 (heard of 29 s ago)" in awaited(stage.core)
    actor.pull(want=0)  # the heartbeat
    stage.clock.set_ahead -= day
    stage.clock.at += 29
    assert actor.answer(orders[:1]).stored == 2
    assert len(stage.core.book.in_state("granted")) == 1
    stage.clock.at += 2
    stage.core.expire_orders()
    assert stage.core.book.in_state("granted") == []


def test_an_older_group_that_completes_meanwhile_does_not_change_what_is_leased_again(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    first, second, third, _ = actor.pull().orders
    actor.answer([third])
    actor.answer([second])
    leased = learner.lease()
    assert leased.group_ids == ["t0000001.1", "t0000002.1"]
    actor.answer([first])  # granted before them
    successor = stage.learner()
    assert (successor.lease(), successor.bulk) == (leased, learner.bulk)
    stage.reopen()
    again = stage.learner()
    assert (again.lease(), again.bulk) == (leased, learner.bulk)
    assert again.commit(leased).version == 1


def test_a_learner_lease_never_ends_by_time(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    first = learner.lease()
    stage.clock.at += 1e6
    assert learner.lease() == first


def test_a_lease_from_another_version_is_refused(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    learner.committed = 3
    with pytest.raises(TryAgainError, match="version 0 is committed"):
        learner.lease()


def test_what_is_awaited_is_named(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    learner = stage.learner()
    assert learner.lease() == NotYet("0 of 2 groups complete; no actor connected")
    actor = stage.actor()
    actor.pull()
    orders = actor.pull().orders
    actor.answer(orders[:1])
    assert learner.lease() == NotYet("1 of 2 groups complete; 1 actor generating")


def test_a_planted_group_one_version_too_old_expires_at_the_lease(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull(want=4).orders
    slow, fast = orders[0], orders[1:]
    actor.put([rollout(slow, 0, 0)])
    actor.answer(fast)
    learner.commit(learner.lease())
    actor.pull(want=0)
    actor.work()
    learner.commit(learner.lease())
    assert learner.committed == 2
    actor.put([rollout(slow, 1, 0)])
    assert states(stage)["t0000000.1"] == "complete"
    assert isinstance(learner.lease(), NotYet)  # the lease is where it is refused: version 2 - version 0 > budget 1
    assert states(stage)["t0000000.1"] == "expired"
    assert books(stage.core.store.db)["expired"] == 2
    actor.pull(want=0)
    again = actor.pull(want=1).orders[0]
    assert (again.order_id, again.attempt) == ("t0000000", 2)  # at the head of the queue
    assert imbalance(books(stage.core.store.db)) == 0


def test_the_last_attempt_is_dropped_as_too_slow(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(replay={"max_attempts": 1, "max_staleness": 0})
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    slow, fast = actor.pull().orders
    actor.put([rollout(slow, 0, 0), rollout(slow, 1, 0)])
    stage.core.book.groups["t0000000.1"].oldest_version = -1  # as if it were older than the only version there is
    actor.answer([fast])
    assert isinstance(learner.lease(), NotYet)
    assert stage.rows("SELECT state, reason FROM groups WHERE order_id = 't0000000'") == [("dropped", "too_slow")]
    assert books(stage.core.store.db)["dropped"] == {"too_slow": 2}


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_stalled_learner_drives_staleness_to_exactly_the_budget(make_stage: Callable[..., Stage], budget: int) -> None:
    stage = make_stage(replay={"max_staleness": budget}, learner={"updates": 8})
    learner, actor = stage.learner(), stage.actor()
    found = []
    for _ in range(8):
        actor.pull(want=0)
        while actor.work():
            pass
        leased = learner.lease()
        found.append(max(learner.committed - span.version for head in leased.heads for span in head.spans))
        learner.commit(leased)
    assert max(found) == budget
    assert found[-1] == budget
    assert stage.rows("SELECT max(staleness) FROM trained_staleness") == [(budget,)]


def test_the_budget_is_asserted_once_more_at_the_commit(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    leased = learner.lease()
    stage.core.book.groups[leased.group_ids[0]].oldest_version = -2
    with pytest.raises(ProtocolError, match="older than the staleness budget"):
        learner.commit(leased)
    assert stage.rows("SELECT 1 FROM updates") == []


def test_a_commit_is_one_transaction_and_idempotent(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    leased = learner.lease()
    record, bulk, new = learner.record(leased)
    request = Commit(learner.epoch, record, new)
    first, _ = learner.client.call(request, bulk)
    head, rows = stage.core.store.ledger.head, stage.rows("SELECT count(*) FROM ledger")
    again, _ = learner.client.call(request, bulk)
    assert again == first
    assert (stage.core.store.ledger.head, stage.rows("SELECT count(*) FROM ledger")) == (head, rows)
    assert (first.version, first.done, first.ledger_head) == (1, False, head)  # type: ignore[union-attr]
    assert stage.rows("SELECT state, count(*) FROM rollouts GROUP BY state ORDER BY state") == [("buffered", 4), ("trained", 4)]
    assert stage.rows("SELECT version, parent, update_id FROM versions") == [(0, None, None), (1, 0, 1)]
    assert stage.rows("SELECT name, dtype, length(data) FROM update_columns") == [("old", "f4", 48), ("keep", "u1", 12)]
    assert stage.core.versions[1] == notice(1)


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"update": 2}, TryAgainError, "update 2 is not the one that is leased"),
    ({"version_in": 1}, TryAgainError, "began from version 1"),
    ({"version_out": 2}, TryAgainError, "makes version 2, the next is 1"),
    ({"group_ids": ["t0000001.1", "t0000000.1"]}, TryAgainError, "not those of the lease"),
    ({"rollout_ids": ["t0000000.1.0"], "response_lens": [12]}, ProtocolError, "not the scored rollouts"),
    ({"response_lens": [3, 3, 2, 4]}, ProtocolError, "not the scored rollouts"),
])
def test_a_commit_that_does_not_fit_changes_nothing(stage: Stage, change: dict, error: type[Exception], text: str) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    leased = learner.lease()
    with pytest.raises(error, match=text):
        learner.commit(leased, **change)
    assert stage.rows("SELECT 1 FROM updates UNION ALL SELECT 1 FROM versions WHERE version > 0") == []
    learner.commit(leased)


def test_a_skip_changes_no_version_and_drops_its_groups(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    committed = learner.commit(learner.lease(), skipped=True)
    assert (committed.version, stage.core.stepped, stage.core.skipped) == (0, 0, 1)
    assert books(stage.core.store.db)["dropped"] == {"no_signal": 4}
    assert stage.rows("SELECT update_id, skipped, version_in, version_out FROM updates") == [(1, 1, 0, 0)]
    assert learner.lease().update == 2
    assert len(actor.pull().orders) == 2  # its groups are no longer live


def test_after_the_last_update_there_is_nothing_to_lease(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(learner={"updates": 1})
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    assert actor.work() == 2  # no more than the rest of the run can use, though the budget allows 4
    assert learner.commit(learner.lease()).done
    assert learner.lease() == Done()
    assert actor.pull().done


def test_metrics_are_written_once_per_update(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    for _ in range(2):
        actor.pull(want=0)
        actor.work()
        learner.commit(learner.lease())
    lines = [json.loads(text) for text, in stage.rows("SELECT metrics FROM updates ORDER BY update_id")]
    assert [line["update"] for line in lines] == [1, 2]
    assert lines[1]["staleness"] == {"mean": 1.0, "max": 1, "histogram": {"1": 4}}
    assert (lines[0]["reward"], lines[0]["reward_std"], lines[0]["response_len"], lines[0]["loss"]) == (0.5, 0.5, 3.0, 0.5)


# ---------------------------------------------------------------- anchors
def test_every_span_is_anchored_once(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.answer(actor.pull(want=2).orders)
    rows, bulk = learner.client.call(Unscored(learner.epoch, 0, 3))
    assert len(rows.heads) == 3  # type: ignore[union-attr]
    assert (learner.score(), learner.score()) == (4, 0)
    leased = learner.lease()
    assert [(a.rollout_id, a.source, a.count) for a in leased.anchors][0] == ("t0000000.1.0", "resident", 3)
    olds = np.frombuffer(learner.bulk[-48:], "<f4")
    np.testing.assert_allclose(olds[:6], [-0.49, -0.49, -0.49, -1.49, -1.49, -1.49], rtol=1e-6)
    learner.client.call(PutAnchors(learner.epoch, [leased.anchors[0]]), np.zeros(3, "<f4").tobytes())
    assert stage.core.store.counters["anchors_refused"] == 1
    assert learner.lease() == leased
    assert np.frombuffer(learner.bulk[-48:], "<f4")[0] == olds[0]


def test_anchors_of_other_weights_or_not_finite_are_refused(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.answer(actor.pull(want=2).orders)
    learner.score()
    anchor = learner.lease().anchors[0]
    for wrong in ({"weights_digest": "0" * 64}, {"version": 3}):
        with pytest.raises(ProtocolError, match="scored with weights that are not version"):
            learner.client.call(PutAnchors(learner.epoch, [msgspec.structs.replace(anchor, **wrong)]), bytes(12))
    with pytest.raises(ProtocolError, match="not finite"):
        learner.client.call(PutAnchors(learner.epoch, [anchor]), np.full(3, np.nan, "<f4").tobytes())
    with pytest.raises(ProtocolError, match="0 log-probs with source resident"):
        learner.client.call(PutAnchors(learner.epoch, [msgspec.structs.replace(anchor, count=0)]))


def test_a_missing_anchor_says_so(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.answer(actor.pull(want=2).orders)
    learner.score()
    stage.core.store.db.execute("UPDATE spans SET source = NULL, old = NULL, old_digest = NULL, anchor_digest = NULL "
                                   "WHERE rollout_id = 't0000000.1.0'")
    anchor = learner.lease().anchors[0]
    learner.client.call(PutAnchors(learner.epoch, [msgspec.structs.replace(anchor, rollout_id="t0000000.1.0", source="missing", count=0)]))
    assert stage.rows("SELECT source, old, old_digest FROM spans WHERE rollout_id = 't0000000.1.0'") == [("missing", None, None)]
    leased = learner.lease()
    assert (leased.anchors[0].source, leased.anchors[0].count, len(learner.bulk)) == ("missing", 0, 4 * 4 * (4 + 6) + 36)


@pytest.mark.parametrize(("order_lease_s", "asked", "waits"), [(600.0, 1e9, 30.0), (600.0, 12.5, 12.5), (60.0, 1e9, 20.0),
                                                               (600.0, -1.0, 0.0)])
def test_a_request_waits_as_long_as_it_asks_at_most_30_s_and_a_third_of_a_lease(make_stage: Callable[..., Stage], order_lease_s: float,
                                                                                asked: float, waits: float) -> None:
    core = make_stage(replay={"order_lease_s": order_lease_s}).core
    for request in (Pull(1, 0, 1, asked, []), Lease(1, 0, asked)):
        assert arrive(core, b"", 1, request, b"").deadline - core.now == waits
