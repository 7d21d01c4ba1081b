import asyncio
from typing import Any

import numpy as np
import pytest

from actor.engine import Generated
from tests.actor.conftest import Stage
from tests.actor.fake_engine import FakeEngine
from tests.actor.orders import evaluation, train
from tests.support.versions import publish
from wire.errors import EngineError, RunError
from wire.messages import Applied, Engine, GiveBack, Hello, Pull
from wire.record import Failed, Sampling, Scored, Span


def broken() -> EngineError:
    return EngineError("/generate: the engine broke off")


def versions_of(stage: Stage, rollout: str) -> list[int]:
    return [span.version for span in stage.replay.heads[rollout].spans]


def names(stage: Stage) -> list[str]:
    return [name for name, _ in stage.engine.calls]


async def test_orders_become_judged_rollouts_with_the_engines_log_probs(stage: Stage) -> None:
    await stage.start()
    await stage.replay.grant(*(train(number, n=2, prompt=f"{number}") for number in range(5)))
    await stage.until(lambda: len(stage.replay.heads) == 10)
    await stage.until(lambda: stage.replay.holding == [])
    await stage.finish()

    hello, = stage.replay.of(Hello)
    assert (hello.role, hello.name) == ("actor", "a1")
    engine, = stage.replay.of(Engine)
    assert (engine.fingerprint.tokenizer, engine.fingerprint.engine_version) == ("digits", "fake 1")
    applied, = stage.replay.of(Applied)
    assert (applied.version, applied.weights_digest, applied.probe_mean) == (0, stage.replay.versions[0].weights_digest, 0.0)
    for rollout, head in stage.replay.heads.items():
        payload = stage.replay.payloads[rollout]
        tokens = [*payload.prompt_ids.tolist(), *payload.response_ids.tolist()]
        assert tokens[0] == 3 + int(head.order_id[1])
        np.testing.assert_array_equal(payload.mu, stage.engine.logprobs(0, tokens))
        assert head.spans == (Span(0, 0, 4),)
        assert (head.verdict, head.fingerprint, head.finish_reason) == (Scored(4.0), engine.id, "length")
        assert head.finished >= head.started
    assert stage.host.stopped
    assert list((stage.folder / "tmpfs").iterdir()) == []


async def test_a_retract_in_mid_response_gives_two_spans_each_with_its_versions_log_probs(stage: Stage) -> None:
    stage.engine.token_s = 0.02
    await stage.start()
    await stage.replay.grant(train(1, n=1, sampling=Sampling(1.0, 40)))
    await stage.until(lambda: stage.engine.tokens_made >= 5)
    await stage.publish(1)
    await stage.until(lambda: "t1.1.0" in stage.replay.heads)
    head, payload = stage.replay.heads["t1.1.0"], stage.replay.payloads["t1.1.0"]
    first, second = head.spans
    assert (first.version, first.start, second.version, second.end) == (0, 0, 1, 40)
    assert first.kv_clean
    assert second.kv_clean
    tokens, start = [*payload.prompt_ids.tolist(), *payload.response_ids.tolist()], head.prompt_len
    np.testing.assert_array_equal(payload.mu[:first.end], stage.engine.logprobs(0, tokens[:start + first.end], start))
    np.testing.assert_array_equal(payload.mu[first.end:], stage.engine.logprobs(1, tokens, start + first.end))
    assert stage.replay.applied == [0, 1]
    await stage.finish()


async def test_drain_finishes_what_is_in_flight_under_the_old_version(stage: Stage) -> None:
    stage.engine.token_s = 0.01
    await stage.start(on_new_weights="drain", requests_in_flight=1, orders_per_request=1)
    await stage.replay.grant(train(1), train(2))
    await stage.until(lambda: stage.engine.tokens_made > 0)
    await stage.publish(1)
    await stage.until(lambda: len(stage.replay.heads) == 4)
    assert versions_of(stage, "t1.1.0") == versions_of(stage, "t1.1.1") == [0]
    assert versions_of(stage, "t2.1.0") == versions_of(stage, "t2.1.1") == [1]
    await stage.finish()


async def test_abort_puts_what_was_made_and_fails_what_was_not(stage: Stage) -> None:
    stage.engine.token_s = 0.01
    await stage.start(on_new_weights="abort")
    await stage.replay.grant(train(1, sampling=Sampling(1.0, 500)))
    await stage.until(lambda: stage.engine.tokens_made >= 6)
    stage.engine.hang = True
    await stage.replay.grant(train(2))  # sent, and without a token when the abort comes
    await stage.until(lambda: stage.engine.in_flight == 2)
    await stage.publish(1)
    await stage.until(lambda: len(stage.replay.heads) == 2 and len(stage.replay.failures) == 2)
    for head in stage.replay.heads.values():
        assert (head.order_id, head.finish_reason, head.verdict) == ("t1", "abort", Failed("aborted"))
        assert 0 < head.response_len < 500
    assert {(failure.order_id, failure.reason) for failure in stage.replay.failures} == {("t2", "aborted_without_token")}
    stage.engine.hang = False
    await stage.replay.grant(train(3))
    await stage.until(lambda: "t3.1.1" in stage.replay.heads)
    assert versions_of(stage, "t3.1.1") == [1]
    await stage.finish()


async def test_in_place_marks_tokens_made_from_a_stale_cache(stage: Stage) -> None:
    stage.engine.token_s = 0.01
    await stage.start(on_new_weights="in_place", requests_in_flight=3)
    assert ("load_weights", True) not in stage.engine.calls
    long = Sampling(1.0, 60)
    await stage.replay.grant(train(1, n=1, sampling=long))
    await stage.until(lambda: stage.engine.tokens_made >= 3)
    await stage.publish(1)
    await stage.until(lambda: stage.replay.applied == [0, 1])
    await stage.replay.grant(train(2, n=1))  # sent while the stale cache is in use
    await stage.until(lambda: len(stage.replay.heads) == 2)
    await stage.until(lambda: stage.engine.in_flight == 0)
    await stage.replay.grant(train(3, n=1))  # nothing in flight: the cache is flushed first
    await stage.until(lambda: len(stage.replay.heads) == 3)
    spans = {rollout: [(span.version, span.kv_clean) for span in head.spans] for rollout, head in stage.replay.heads.items()}
    assert spans == {"t1.1.0": [(0, True), (1, False)], "t2.1.0": [(1, False)], "t3.1.0": [(1, True)]}
    flushes = [argument[2] for name, argument in stage.engine.calls if name == "load_weights"]
    assert flushes == [True, False]  # with nothing in flight even in_place flushes
    assert "flush_cache" in names(stage)
    await stage.finish()


async def test_an_eval_is_answered_with_exactly_its_version_even_backwards_and_then_the_actor_catches_up(stage: Stage) -> None:
    await stage.start()
    for version in (1, 2, 3):
        await stage.publish(version)
    await stage.replay.grant(train(1))
    await stage.until(lambda: "t1.1.1" in stage.replay.heads)
    await stage.replay.grant(*(evaluation(number, 1, n=2) for number in range(7)))
    await stage.replay.grant(*(evaluation(number, 1, greedy=True) for number in range(7, 12)))
    await stage.publish(4)
    await stage.replay.grant(train(2))
    await stage.until(lambda: "t2.1.1" in stage.replay.heads)
    answers = [head for head in stage.replay.heads.values() if head.order_id.startswith("e")]
    assert len(answers) == 7 * 2 + 5
    assert {span.version for head in answers for span in head.spans} == {1}
    assert {head.sampling.temperature for head in answers if int(head.order_id[1:]) >= 7} == {0.0}
    temperatures = [request.sampling["temperature"] for name, request in stage.engine.calls if name == "generate"]
    assert 0.0 in temperatures
    assert versions_of(stage, "t2.1.1") == [4]
    answered = max(at for at, version in enumerate(stage.replay.applied) if version == 1)
    assert stage.replay.applied[answered + 1 :] in ([4], [3, 4])  # it may not have heard of version 4 yet when the last answer is done
    await stage.finish()


async def test_generation_goes_on_while_verdicts_are_awaited_and_a_pull_waits(stage: Stage) -> None:
    await stage.start(requests_in_flight=1, orders_per_request=1)
    stage.pool.gate.clear()
    await stage.replay.grant(*(train(number) for number in range(6)))
    await stage.until(lambda: stage.pool.calls == 6)  # each group was generated although no verdict came
    assert stage.replay.heads == {}
    assert len(stage.replay.holding) == 6  # still alive for replay
    stage.pool.gate.set()
    await stage.until(lambda: len(stage.replay.heads) == 12)
    await stage.finish()


async def test_failed_verdicts_are_failures_not_zeros(stage: Stage) -> None:
    stage.pool.failing = True
    await stage.start()
    await stage.replay.grant(train(1))
    await stage.until(lambda: len(stage.replay.heads) == 2)
    assert {head.verdict for head in stage.replay.heads.values()} == {Failed("timeout")}
    await stage.finish()


async def test_prompts_that_would_harm_the_engine_are_never_sent(stage: Stage) -> None:
    await stage.start()
    await stage.replay.grant(train(1, prompt="1?"), train(2, prompt="1" * 2000), train(3, prompt=""), train(4))
    await stage.until(lambda: len(stage.replay.failures) == 6 and len(stage.replay.heads) == 2)
    reasons = {failure.order_id: failure.reason for failure in stage.replay.failures}
    assert reasons == {"t1": "token_out_of_vocabulary", "t2": "prompt_too_long", "t3": "empty_prompt"}
    sent = [prompt for name, request in stage.engine.calls if name == "generate" for prompt in request.prompts]
    assert sent == [[4, 5], [4, 5]]
    await stage.until(lambda: stage.replay.holding == [])
    await stage.finish()


async def test_while_replay_is_silent_nothing_is_lost(stage: Stage) -> None:
    stage.engine.token_s = 0.02
    await stage.start()
    await stage.replay.grant(train(1), train(2))
    await stage.until(lambda: stage.engine.tokens_made > 0)
    stage.replay.answering.clear()
    await stage.until(lambda: stage.pool.calls == 2)
    await asyncio.sleep(0.1)
    assert stage.replay.heads == {}
    stage.replay.answering.set()
    await stage.until(lambda: len(stage.replay.heads) == 4)
    await stage.finish()


async def test_poison_in_a_row_stops_the_actor(stage: Stage) -> None:
    def no_number(row: Generated) -> Generated:
        return Generated(row.output_ids, np.full(len(row.output_ids), np.nan, np.float32), row.spans, row.finish_reason)

    stage.engine.alter = no_number
    stage.replay.poison = lambda head: head.order_id != "t2"
    await stage.start(max_quarantined=5, requests_in_flight=1, orders_per_request=1)
    for number in range(1, 6):
        await stage.replay.grant(train(number))
    assert stage.task is not None
    with pytest.raises(RunError, match="5 rollouts in a row .* poison"):
        async with asyncio.timeout(10):
            await stage.task
    assert stage.host.stopped


async def test_interrupted_it_gives_back_what_it_holds(stage: Stage) -> None:
    stage.engine.token_s = 1.0
    await stage.start()
    await stage.replay.grant(train(1), train(2, attempt=3))
    await stage.until(lambda: stage.engine.in_flight == 1)
    assert stage.task is not None
    stage.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.task
    back, = stage.replay.of(GiveBack)
    assert (back.group_ids, back.reason) == (["t1.1", "t2.3"], "actor_stopped")
    assert stage.host.stopped


async def test_orders_under_way_to_it_when_it_was_interrupted_are_given_back_too(stage: Stage) -> None:
    await stage.start()
    call = stage.replay.call

    async def slow_once_answered(request: Any, bulk: bytes = b"") -> Any:
        answer = await call(request, bulk)
        if isinstance(request, Pull):
            if answer[0].orders and stage.task is not None:
                stage.task.cancel()
            await asyncio.sleep(0.03)  # each answer is on its way as long as another
        return answer

    stage.replay.call = slow_once_answered  # type: ignore[method-assign]
    await stage.replay.grant(train(1), train(2))
    assert stage.task is not None
    with pytest.raises(asyncio.CancelledError):
        await stage.task
    back, = stage.replay.of(GiveBack)
    assert (back.group_ids, back.reason) == (["t1.1", "t2.1"], "actor_stopped")


async def test_no_order_comes_to_it_after_it_gave_back_what_it_held(stage: Stage) -> None:
    """A Pull that waits is answered with what has just been given back, unless another took its place."""
    stage.engine.token_s = 1.0
    await stage.start()
    await stage.replay.grant(train(1))
    await stage.until(lambda: stage.engine.in_flight == 1 and stage.replay.holding == ["t1.1"])
    call = stage.replay.call

    async def asked_again(request: Any, bulk: bytes = b"") -> Any:
        if isinstance(request, GiveBack):
            await stage.replay.grant(train(1, attempt=2))
            await asyncio.sleep(0.02)
        return await call(request, bulk)

    stage.replay.call = asked_again  # type: ignore[method-assign]
    assert stage.task is not None
    stage.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.task
    assert [order.attempt for order in stage.replay.queue] == [2]


async def test_an_engine_that_dies_is_restarted_with_the_last_good_version_and_its_orders_are_answered(stage: Stage) -> None:

    second = FakeEngine(version=0)
    stage.host.engines.append(second)
    await stage.start()
    await stage.publish(1)
    await stage.until(lambda: stage.replay.applied[-1:] == [1])
    stage.engine.fail |= {"generate": broken(), "pause": broken()}
    stage.engine.hang = True  # its health is bad
    await stage.replay.grant(train(1), train(2))
    await stage.until(lambda: len(stage.replay.heads) == 4)
    assert {span.version for head in stage.replay.heads.values() for span in head.spans} == {1}
    assert second.tokens_made == 16
    assert stage.host.starts == 2
    assert stage.replay.notes == ["engine_suspect", "engine_restarted"]
    await stage.finish()


async def test_a_request_that_fails_on_a_healthy_engine_is_tried_three_times_then_given_back(stage: Stage) -> None:
    await stage.start()
    generate, fails = stage.engine.generate, []

    async def failing(request: Any) -> Any:
        if request.prompts[0] == [4]:
            fails.append(request)
            raise broken()
        return await generate(request)

    stage.engine.generate = failing  # type: ignore[method-assign]
    await stage.replay.grant(train(1, prompt="1"))
    await stage.until(lambda: stage.replay.of(GiveBack))
    await stage.replay.grant(train(2, prompt="2"))
    await stage.until(lambda: "t2.1.1" in stage.replay.heads)
    back, = stage.replay.of(GiveBack)
    assert (back.group_ids, back.reason, len(fails)) == (["t1.1"], "engine_error", 3)
    assert stage.replay.notes == []
    await stage.finish()


async def test_an_engine_that_cannot_be_brought_back_ends_the_actor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.start()

    async def dead(*_: Any, **__: Any) -> Any:
        raise broken()

    for name in ("generate", "pause", "load_weights"):
        monkeypatch.setattr(stage.engine, name, dead)
    stage.engine.hang = True
    await stage.replay.grant(train(1))
    assert stage.task is not None
    with pytest.raises(RunError, match="after 5 restarts"):
        async with asyncio.timeout(10):
            await stage.task
    assert stage.host.starts == 6
    assert stage.replay.of(GiveBack)[0].group_ids == ["t1.1"]


async def test_rows_made_while_the_weights_were_in_doubt_are_made_again(stage: Stage) -> None:
    """Version 1's files are sound, but what the engine computes with them is not what the learner says."""

    stage.engine.token_s = 0.01
    await stage.start()
    await stage.replay.grant(train(1, n=1, sampling=Sampling(1.0, 30)))
    await stage.until(lambda: stage.engine.tokens_made >= 3)
    await stage.replay.commit(publish(stage.run_dir, 1, engine=FakeEngine(seed=1)))
    await stage.until(lambda: "t1.1.0" in stage.replay.heads)
    assert versions_of(stage, "t1.1.0") == [0]
    assert stage.replay.heads["t1.1.0"].response_len == 30
    assert stage.replay.heads["t1.1.0"].finish_reason == "length"
    assert stage.replay.applied == [0]
    assert "weights_refused" in stage.replay.notes
    await stage.finish()


async def test_a_response_that_ends_between_a_swap_and_its_proof_waits_for_the_proof(stage: Stage) -> None:
    stage.engine.token_s = 0.01
    await stage.start()
    score = stage.engine.score

    async def slow(token_ids: list[int]) -> np.ndarray:
        await stage.replay.until(lambda: stage.engine.in_flight == 0)
        await asyncio.sleep(0.1)
        return await score(token_ids)

    stage.engine.score = slow  # type: ignore[method-assign]
    await stage.replay.grant(train(1, n=1, sampling=Sampling(1.0, 30)))
    await stage.until(lambda: stage.engine.tokens_made >= 3)
    await stage.replay.commit(publish(stage.run_dir, 1, engine=FakeEngine(seed=1)))
    await stage.until(lambda: "t1.1.0" in stage.replay.heads)
    assert versions_of(stage, "t1.1.0") == [0]  # what it had made, partly under version 1, was thrown away
    assert stage.engine.tokens_made == 60
    await stage.finish()


async def test_a_run_that_ends_while_the_engine_starts_ends_the_actor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay leaves once every actor was told: one that hears nothing until its engine is ready would wait for ever."""
    starting = asyncio.Event()

    async def never() -> FakeEngine:
        starting.set()
        return await asyncio.Future()

    monkeypatch.setattr(stage.host, "start", never)
    await stage.start(None)
    await starting.wait()
    await stage.finish()
    assert stage.host.stopped


async def test_a_greedy_baseline_is_made_and_judged_with_its_group(stage: Stage) -> None:
    stage.engine.token_s = 0.02
    await stage.start()
    await stage.replay.grant(train(1, n=2, prompt="1", sampling=Sampling(1.0, 40), baseline=Sampling(0.0, 40)), train(2, prompt="2"))
    await stage.until(lambda: stage.engine.tokens_made >= 9)
    await stage.publish(1)
    await stage.until(lambda: len(stage.replay.heads) == 5)
    await stage.until(lambda: stage.replay.holding == [])
    await stage.finish()
    greedy, payload = stage.replay.heads["t1.1.2"], stage.replay.payloads["t1.1.2"]
    assert greedy.sampling == Sampling(0.0, 40)
    assert [span.version for span in greedy.spans] == [0, 1]
    assert isinstance(greedy.verdict, Scored)
    at, expected = 3 + 1, []
    for version in [span.version for span in greedy.spans for _ in range(span.start, span.end)]:
        at = int(stage.engine.distribution(version, at).argmax())
        expected.append(at)
    assert payload.response_ids.tolist() == expected
    assert {stage.replay.heads[f"t1.1.{sample}"].sampling for sample in (0, 1)} == {Sampling(1.0, 40)}
