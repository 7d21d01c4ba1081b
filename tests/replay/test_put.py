"""What is stored, what is refused, what is quarantined."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.books import books, imbalance
from tests.replay.conftest import Stage
from tests.support.replay import ENGINE, PRINT, rollout
from wire.digest import digest
from wire.errors import ProtocolError, RefusedError, RunError
from wire.messages import Engine, Put, SampleFailure
from wire.record import Failed, RolloutHead, Scored, Span, fingerprint_id, pack_payload


def with_mu(head: RolloutHead, *mu: float) -> tuple[RolloutHead, bytes]:
    return head, pack_payload(np.arange(1, 5), np.full(len(mu), 7), np.array(mu))


def test_a_put_is_stored_with_its_spans_and_ledger_row(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    stored = actor.answer([order])
    assert (stored.stored, stored.duplicates, stored.quarantined, stored.refused) == (2, 0, [], [])
    assert stage.rows("SELECT rollout_id, state, reward, response_len, oldest_version FROM rollouts") == [
        ("t0000000.1.0", "buffered", 0.0, 3, 0), ("t0000000.1.1", "buffered", 1.0, 3, 0)]
    assert stage.rows('SELECT rollout_id, span, version, start, "end", source FROM spans') == [
        ("t0000000.1.0", 0, 0, 0, 3, None), ("t0000000.1.1", 0, 0, 0, 3, None)]
    assert stage.rows("SELECT state, oldest_version FROM groups") == [("complete", 0)]
    assert stage.kinds()[-3:] == ["grant", "put", "groups"]
    body = json.loads(stage.rows("SELECT body FROM ledger WHERE kind = 'put'")[0][0])
    payload = stage.rows("SELECT payload FROM rollouts ORDER BY sample")[0][0]
    assert body["rollouts"]["t0000000.1.0"] == digest(payload)


def test_what_was_put_is_stored_to_the_byte_and_the_ledger_names_those_bytes(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    sent = [rollout(order, sample, 0, verdict=Scored(1.0, "détail \u2192 \U0001f600", "exact", 0.25)) for sample in range(2)]
    actor.put(sent)
    rows = stage.rows("SELECT rollout_id, typeof(head), CAST(head AS BLOB), typeof(payload), payload, payload_digest FROM rollouts "
                      "ORDER BY sample")
    assert rows == [(head.rollout_id, "text", msgspec.json.encode(head), "blob", payload, digest(payload)) for head, payload in sent]
    body = json.loads(stage.rows("SELECT body FROM ledger WHERE kind = 'put'")[0][0])
    assert body["heads"] == {name: digest(head) for name, _, head, _, _, _ in rows}
    assert body["rollouts"] == {name: told for name, _, _, _, _, told in rows}


def test_a_resend_is_a_duplicate(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    orders = actor.pull().orders
    actor.answer(orders)
    again = actor.answer(orders)
    assert (again.stored, again.duplicates) == (0, 8)
    assert stage.core.store.counters["duplicates_refused"] == 8
    assert len(stage.rows("SELECT 1 FROM rollouts")) == 8


@pytest.mark.parametrize("end", ["trained", "dropped", "failed"])
def test_a_resend_after_its_group_is_over_is_a_duplicate_and_nothing_is_refused(stage: Stage, end: str) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull(want=2).orders
    rows = [rollout(order, sample, 0) for order in orders for sample in range(2)]
    failures = [SampleFailure(order.order_id, 1, 1, "no_token") for order in orders]
    if end == "failed":
        actor.put(rows[::2], failures)
    else:
        actor.put(rows)
        learner.commit(learner.lease(), skipped=end == "dropped")
    assert stage.core.book.groups == {}
    again = actor.put(rows[::2], failures) if end == "failed" else actor.put(rows)
    assert (again.stored, again.duplicates, again.refused) == (0, 4, [])
    assert "refused_closed" not in {name for name, count in stage.core.store.counters.items() if count}


def test_the_same_sample_twice_in_one_put_is_stored_once(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    stored = actor.put([rollout(order, 0, 0), rollout(order, 0, 0)])
    assert (stored.stored, stored.duplicates) == (1, 1)


def with_tokens(head: RolloutHead, prompt: list[int], response: list[int]) -> tuple[RolloutHead, bytes]:
    return head, pack_payload(np.array(prompt), np.array(response), np.full(len(response), -1.0))


POISON: dict[str, tuple[Callable[[RolloutHead], tuple[RolloutHead, bytes]], str]] = {
    "nan": (lambda h: with_mu(h, -1.0, math.nan, -1.0), "log-prob of response token 1 is nan"),
    "positive": (lambda h: with_mu(h, -1.0, -1.0, 1e-6), "log-prob of response token 2"),
    "minus infinity": (lambda h: with_mu(h, -math.inf, -1.0, -1.0), "log-prob of response token 0 is -inf"),
    "infinity": (lambda h: with_mu(h, math.inf, -1.0, -1.0), "log-prob of response token 0 is inf"),
    "negative token": (lambda h: with_tokens(h, [1, 2, 3, 4], [7, -1, 7]), "response token id -1 is outside the vocabulary of 50000"),
    "a token beyond the vocabulary": (lambda h: with_tokens(h, [1, 2, 3, 4], [7, 50_000, 49_999]), "response token id 50000 is"),
    "a prompt token beyond the vocabulary": (lambda h: with_tokens(h, [1, 2, 3, 2**31 - 1], [7, 7, 7]), "prompt token id 2147483647"),
    "too few payload bytes": (lambda h: with_mu(h, -1.0, -1.0), "wrong lengths"),
    "hole in the spans": (lambda h: changed(h, spans=(Span(0, 0, 1), Span(0, 2, 3))), "spans do not cover"),
    "overlapping spans": (lambda h: changed(h, spans=(Span(0, 0, 2), Span(0, 1, 3))), "spans do not cover"),
    "spans that end early": (lambda h: changed(h, spans=(Span(0, 0, 2),)), "spans cover 2 of 3"),
    "spans that end late": (lambda h: changed(h, spans=(Span(0, 0, 4),)), "spans cover 4 of 3"),
    "no spans": (lambda h: changed(h, spans=()), "spans cover 0 of 3"),
    "empty span": (lambda h: changed(h, spans=(Span(0, 0, 0), Span(0, 0, 3))), "spans do not cover"),
    "a future version": (lambda h: changed(h, spans=(Span(5, 0, 3),)), "version 5 was never committed"),
    "a version below 0": (lambda h: changed(h, spans=(Span(-1, 0, 3),)), "version -1 was never committed"),
    "nan reward": (lambda h: changed(h, verdict=Scored(math.nan)), "reward is nan"),
    "infinite reward": (lambda h: changed(h, verdict=Scored(math.inf)), "reward is inf"),
    "a reward beyond float32": (lambda h: changed(h, verdict=Scored(-1e39)), "reward is -1e+39"),
    "another temperature": (lambda h: changed(h, sampling=msgspec.structs.replace(h.sampling, temperature=0.9)), "sampled in another way"),
    "another prompt length": (lambda h: changed(h, prompt_len=5, response_len=2), "wrong lengths"),
    "no prompt": (
        lambda h: (msgspec.structs.replace(h, prompt_len=0), pack_payload(np.array([]), np.full(3, 7), np.full(3, -1.0))),
        "no prompt",
    ),
    "an unknown engine": (lambda h: changed(h, fingerprint="f9"), "unknown engine fingerprint"),
    "another id": (lambda h: changed(h, rollout_id="t0000000.1.7"), "rollout id"),
    "backward time": (lambda h: changed(h, started=3.0), "times"),
    "a verdict that took nan seconds": (lambda h: changed(h, verdict=Scored(1.0, seconds=math.nan)), "times"),
    "a failure that took infinite seconds": (lambda h: changed(h, verdict=Failed("timeout", seconds=math.inf)), "times"),
    "nan time": (lambda h: changed(h, engine_seconds=math.nan), "times"),
}


def changed(head: RolloutHead, **fields: Any) -> tuple[RolloutHead, bytes]:
    return msgspec.structs.replace(head, **fields), pack_payload(np.arange(1, 5), np.full(3, 7), np.full(3, -1.0))


@pytest.mark.parametrize("name", POISON)
def test_poison_is_quarantined_with_its_evidence(stage: Stage, name: str) -> None:
    spoil, reason = POISON[name]
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    head, payload = spoil(rollout(order, 0, 0)[0])
    stored = actor.put([(head, payload)])
    assert stored.stored == 0
    assert [(rollout_id, reason in why) for rollout_id, why in stored.quarantined] == [(head.rollout_id, True)], stored.quarantined
    kept = stage.rows("SELECT rollout_id, actor, payload, head FROM quarantine")
    assert kept[0][:3] == (head.rollout_id, "a0", payload)
    assert json.loads(kept[0][3])["response_len"] == head.response_len
    assert stage.rows("SELECT 1 FROM rollouts") == []
    actor.put([rollout(order, 1, 0)])
    assert stage.rows("SELECT group_id, state, reason FROM groups") == [
        ("t0000000.1", "dropped", "incomplete_group"), ("t0000000.2", "queued", None)]


def test_the_vocabulary_is_that_of_the_engine_that_the_rollout_names(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    larger = msgspec.structs.replace(PRINT, vocabulary=50_001)
    actor.client.call(Engine(actor.epoch, fingerprint_id(larger), larger))
    with pytest.raises(ProtocolError, match="vocabulary of 0 tokens"):
        actor.client.call(Engine(actor.epoch, "f2", msgspec.structs.replace(PRINT, vocabulary=0)))
    stage.reopen()
    actor = stage.actor()
    rows = [with_tokens(rollout(order, sample, 0, fingerprint=name)[0], [1, 2, 3, 4], [7, 50_000, 7])
            for sample, name in enumerate((fingerprint_id(larger), ENGINE))]
    stored = actor.put(rows)
    assert (stored.stored, [rollout_id for rollout_id, _ in stored.quarantined]) == (1, ["t0000000.1.1"])


def test_a_wrong_digest_is_poison(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    head, payload = rollout(actor.pull(want=1).orders[0], 0, 0)
    reply, _ = actor.client.call(Put(actor.epoch, [head], [digest(b"other")], []), payload)
    assert "does not match its digest" in reply.quarantined[0][1]  # type: ignore[union-attr]


def test_the_sound_neighbours_of_poison_are_stored(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    orders = actor.pull(want=2).orders
    stored = actor.put([rollout(orders[0], 0, 0), with_mu(rollout(orders[0], 1, 0)[0], -1.0, math.nan, -1.0), rollout(orders[1], 0, 0)])
    assert (stored.stored, len(stored.quarantined)) == (2, 1)


def test_versions_of_a_response_may_not_decrease(stage: Stage) -> None:
    learner = stage.learner()
    actor = stage.actor()
    actor.pull()
    actor.work()
    learner.commit(learner.lease())
    actor.pull(want=0)
    order = actor.pull(want=1).orders[0]
    stored = actor.put(
        [rollout(order, 0, 0, spans=(Span(1, 0, 1), Span(0, 1, 3))), rollout(order, 1, 0, spans=(Span(0, 0, 1), Span(1, 1, 3)))]
    )
    assert (stored.stored, stored.quarantined[0][1]) == (1, "version decreases within the response: 0 after 1")


def test_what_does_not_belong_is_refused_and_counted(stage: Stage) -> None:
    stage.learner()
    one, other = stage.actor("a0"), stage.actor("a1")
    one.pull()
    other.pull()
    order = one.pull(want=1).orders[0]
    assert other.put([rollout(order, 0, 0)]).refused == [("t0000000.1.0", "its order is held by a0")]
    assert one.put([rollout(order, 2, 0)]).refused == [("t0000000.1.2", "sample 2 of 2")]
    unknown = msgspec.structs.replace(order, order_id="nobody")
    assert one.put([rollout(unknown, 0, 0)]).refused == [("nobody.1.0", "this attempt is closed")]
    stage.clock.at += 31
    one.pull(want=0)
    stage.clock.at += 31
    one.pull(want=0)
    assert one.put([rollout(order, 0, 0)]).stored == 1  # holding it renewed its lease
    one.holding.clear()
    stage.clock.at += 31
    one.pull(want=0)
    late = one.put([rollout(order, 1, 0)])
    assert late.refused == [("t0000000.1.1", "this attempt is closed")]
    assert stage.core.store.counters["refused_closed"] == 4
    assert imbalance(books(stage.core.store.db)) == 0


def test_a_failed_verdict_is_not_a_reward(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(replay={"min_scored": 1})
    learner = stage.learner()
    actor = stage.actor()
    actor.pull()
    orders = actor.pull(want=2).orders
    for order in orders:
        actor.put([rollout(order, 0, 0), rollout(order, 1, 0, verdict=Failed("timeout"))])
    assert stage.rows("SELECT sample, reward, failure, state FROM rollouts WHERE group_id = 't0000000.1'") == [
        (0, 0.0, None, "buffered"), (1, None, "timeout", "buffered")]
    leased = learner.lease()
    assert [head.sample for head in leased.heads] == [0, 0]
    learner.commit(leased)
    assert books(stage.core.store.db)["dropped"] == {"unverified": 2}


def test_aborted_rollouts_are_dropped_at_once_and_their_order_asked_again(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    actor.put([rollout(order, 0, 0, verdict=Failed("aborted"))], [SampleFailure(order.order_id, 1, 1, "aborted_without_token")])
    assert books(stage.core.store.db)["dropped"] == {"aborted": 1}
    assert stage.core.store.counters["aborted_without_token"] == 1
    again = actor.pull(want=1).orders[0]
    assert (again.order_id, again.attempt, again.prompt) == (order.order_id, 2, order.prompt)


def test_weight_swaps_never_use_up_a_prompts_attempts(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(replay={"max_attempts": 2})
    stage.learner()
    for swap in range(5):
        actor = stage.actor()
        actor.pull(want=0)
        order, = actor.pull(want=1).orders
        assert (order.order_id, order.attempt, order.excused) == ("t0000000", swap + 1, swap)
        actor.put([], [SampleFailure(order.order_id, order.attempt, 0, "aborted_without_token")])
        stage.reopen()
        actor = stage.actor()
        actor.put([rollout(order, 1, 0, verdict=Failed("aborted"))])
    for failure in range(2):
        actor.pull(want=0)
        order, = actor.pull(want=1).orders
        assert (order.order_id, order.attempt, order.excused) == ("t0000000", 6 + failure, 5)
        actor.put([rollout(order, sample, 0, verdict=Failed("crash")) for sample in range(2)])
    assert actor.pull(want=1).orders[0].order_id == "t0000001"


def test_an_engine_that_makes_only_poison_is_stopped(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(actor={"max_quarantined": 3})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    orders = actor.pull().orders
    bad = [with_mu(rollout(order, sample, 0)[0], math.nan, -1.0, -1.0) for order in orders for sample in range(2)]
    actor.put(bad[:2])
    actor.put([rollout(orders[1], 0, 0)])
    actor.put([bad[3], bad[4]])
    actor.put([bad[5]])
    with pytest.raises(RefusedError, match="3 rollouts in a row were quarantined"):
        actor.pull()


def test_too_many_failed_verdicts_stop_the_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(sampling={"n": 50}, replay={"min_scored": 1})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    one, other = actor.pull(want=2).orders
    actor.put([rollout(one, sample, 0, verdict=Failed("crash") if sample < 10 else None) for sample in range(50)])
    actor.put([rollout(other, sample, 0, verdict=Failed("crash") if sample < 10 else None) for sample in range(50)])
    third = actor.pull(want=1).orders[0]
    with pytest.raises(RunError, match=r"21 of the last 101 verdicts failed, more than .*; the commonest reason \(20\): crash$"):
        actor.put([rollout(third, 0, 0, verdict=Failed("exception: TypeError", "exact() missing 'answer'"))])


def test_the_commonest_reason_is_one_line_with_its_detail(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(sampling={"n": 100}, replay={"min_scored": 1})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    order = actor.pull(want=1).orders[0]
    verdict = Failed("exception: TypeError", "exact() missing\n\x1b[2J'answer'")
    with pytest.raises(RunError) as error:
        actor.put([rollout(order, sample, 0, verdict=verdict) for sample in range(100)])
    assert str(error.value).endswith("the commonest reason (100): exception: TypeError; exact() missing ?[2J'answer'")


def test_digests_and_heads_go_together(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    head, payload = rollout(actor.pull(want=1).orders[0], 0, 0)
    with pytest.raises(ProtocolError, match="1 rollouts with 0 digests"):
        actor.client.call(Put(actor.epoch, [head], [], []), payload)
