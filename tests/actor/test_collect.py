import numpy as np
import pytest

from actor.collect import Outcome, RequestTimes, collect, failed_group, fingerprint_of, request_for, to_verify
from actor.engine import EngineInfo, Generated
from tests.actor.orders import GREEDY, train
from wire.digest import digest
from wire.record import Failed, Sampling, Scored, Span, unpack_payload

TIMES = RequestTimes(100.0, 101.0, 0.25)


def row(ids: list[int], finish: str, spans: tuple[Span, ...] | None = None) -> Generated:
    logprobs = np.linspace(-0.5, -1.5, len(ids), dtype=np.float32)
    return Generated(np.array(ids, np.int32), logprobs, spans if spans is not None else (Span(7, 0, len(ids)),) if ids else (), finish)


def test_each_prompt_is_repeated_n_times_in_one_request() -> None:
    sampling = Sampling(0.7, 9, stop_token_ids=(2,), top_logprobs=5)
    request = request_for([train(1, 2, sampling=sampling), train(2, 3, sampling=sampling)], [[5], [6, 7]])
    assert request.prompts == [[5], [5], [6, 7], [6, 7], [6, 7]]
    assert request.sampling == {"temperature": 0.7, "max_new_tokens": 9, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [2]}
    assert request.top_logprobs == 5


def test_the_verifier_sees_no_end_token_and_no_aborted_row() -> None:
    rows = [row([4, 5, 2], "stop"), row([4, 5, 6], "length"), row([4], "abort")]
    items = to_verify(train(1, 3), rows, lambda responses: [str(ids) for ids in responses], 16)
    assert [(item.completion, item.completion_ids) for item in items] == [("[4, 5]", [4, 5]), ("[4, 5, 6]", [4, 5, 6])]
    assert (items[0].prompt, items[0].columns) == ("12", {"answer": "3"})


@pytest.mark.parametrize("token", [-1, 16])
def test_no_verifier_sees_a_token_outside_the_vocabulary_but_replay_does(token: int) -> None:
    rows = [row([4, token], "length"), row([4, 15], "length")]
    assert [item.completion_ids for item in to_verify(train(1), rows, lambda responses: ["" for _ in responses], 16)] == [[4, 15]]
    outcome = collect(train(1), [1], rows, [Scored(1.0)], "f1", TIMES, 16)
    assert [head.verdict for head in outcome.heads] == [Failed("token_out_of_vocabulary"), Scored(1.0)]
    assert unpack_payload(outcome.heads[0], outcome.payloads[0]).response_ids.tolist() == [4, token]


def test_rows_and_verdicts_become_rollouts_in_sample_order() -> None:
    rows = [row([4, 2], "stop"), row([4, 5, 6, 7], "length", (Span(6, 0, 3), Span(7, 3, 4, False))), row([], "abort"), row([9], "abort")]
    outcome = collect(train(8, 4), [1, 1, 3], rows, [Scored(1.0), Failed("timeout")], "f1", TIMES, 16)
    assert [head.rollout_id for head in outcome.heads] == ["t8.1.0", "t8.1.1", "t8.1.3"]
    assert [head.verdict for head in outcome.heads] == [Scored(1.0), Failed("timeout"), Failed("aborted")]
    assert [head.response_len for head in outcome.heads] == [2, 4, 1]
    assert outcome.heads[1].spans == (Span(6, 0, 3), Span(7, 3, 4, False))
    assert [(failure.order_id, failure.sample, failure.reason) for failure in outcome.failures] == [("t8", 2, "aborted_without_token")]
    assert [(head.started, head.finished, head.engine_seconds) for head in outcome.heads] == [(100.0, 101.0, 0.25)] * 3
    stored = unpack_payload(outcome.heads[1], outcome.payloads[1])
    assert stored.prompt_ids.tolist() == [1, 1, 3]
    assert stored.response_ids.tolist() == [4, 5, 6, 7]
    np.testing.assert_array_equal(stored.mu, rows[1].logprobs)
    assert outcome.digests == [digest(payload) for payload in outcome.payloads]


def test_behaviour_top_k_travels_with_the_payload() -> None:
    top = Generated(np.array([3, 2], np.int32), np.array([-1, -2], np.float32), (Span(0, 0, 2),), "stop",
                    np.array([[3, 4], [2, 5]], np.int32), np.array([[-1, -3], [-2, -4]], np.float32))
    outcome = collect(train(1, 1, sampling=Sampling(1.0, 4, top_logprobs=2)), [1], [top], [Scored(0.0)], "f1", TIMES, 16)
    stored = unpack_payload(outcome.heads[0], outcome.payloads[0])
    assert stored.top_ids.tolist() == [[3, 4], [2, 5]]
    assert stored.top_logprobs.tolist() == [[-1, -3], [-2, -4]]


def test_an_order_that_cannot_be_sent_fails_sample_by_sample() -> None:
    outcome = failed_group(train(5, 2, attempt=3), "prompt_too_long")
    assert [(f.order_id, f.attempt, f.sample, f.reason) for f in outcome.failures] == [
        ("t5", 3, 0, "prompt_too_long"), ("t5", 3, 1, "prompt_too_long")]
    assert not outcome.heads


def test_outcomes_join_side_by_side() -> None:
    first = collect(train(1, 1), [1], [row([4], "length")], [Scored(1.0)], "f1", TIMES, 16)
    joined = Outcome()
    joined.extend(first)
    joined.extend(failed_group(train(2, 1), "empty_prompt"))
    assert [order.order_id for order in joined.orders] == ["t1", "t2"]
    assert (len(joined.heads), len(joined.payloads), len(joined.digests), len(joined.failures)) == (1, 1, 1, 1)


def test_rounding_is_part_of_the_engines_fingerprint() -> None:
    info = EngineInfo("sglang 0.5.23", "float32", "torch_native", "none", 1, 16, 1000)
    assert fingerprint_of(info, "none", "d").quantisation == "none"
    assert fingerprint_of(info, "none", "d").vocabulary == 16
    assert fingerprint_of(info, "fp8", "d").quantisation == "none, weights rounded to fp8"


def test_a_greedy_baseline_is_one_row_more_of_the_same_request() -> None:
    sampling = Sampling(0.7, 9, stop_token_ids=(2,), top_logprobs=2)
    orders = [train(1, 2, sampling=sampling, baseline=GREEDY), train(2, 1, sampling=sampling, baseline=GREEDY)]
    request = request_for(orders, [[5], [6, 7]])
    assert request.prompts == [[5], [5], [5], [6, 7], [6, 7]]
    assert [request.sampling_of(row)["temperature"] for row in range(5)] == [0.7, 0.7, 0.0, 0.7, 0.0]
    assert request.top_logprobs == 2


def test_the_greedy_row_says_how_it_was_sampled_and_keeps_no_top_log_probs() -> None:
    made = Generated(np.array([3, 2], np.int32), np.array([-1, -2], np.float32), (Span(6, 0, 1), Span(7, 1, 2)), "stop",
                     np.array([[3, 4], [2, 5]], np.int32), np.array([[-1, -3], [-2, -4]], np.float32))
    order = train(1, 1, sampling=Sampling(1.0, 4, top_logprobs=2), baseline=GREEDY)
    outcome = collect(order, [1], [made, made], [Scored(0.0), Scored(1.0)], "f1", TIMES, 16)
    assert [(head.rollout_id, head.sampling, head.verdict) for head in outcome.heads] == [
        ("t1.1.0", order.sampling, Scored(0.0)), ("t1.1.1", GREEDY, Scored(1.0))]
    assert outcome.heads[1].spans == made.spans
    assert unpack_payload(outcome.heads[1], outcome.payloads[1]).top_ids.shape == (2, 0)


def test_an_order_with_a_baseline_that_cannot_be_sent_fails_with_it() -> None:
    assert [failure.sample for failure in failed_group(train(5, 2, baseline=GREEDY), "prompt_too_long").failures] == [0, 1, 2]
