"""From orders to one engine request, and from the engine's rows and the verdicts to what is put; also who the engine is. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actor.engine import EngineInfo, Generated, GenerateRequest
from verifier.protocol import VerifyItem
from wire.digest import digest
from wire.messages import SampleFailure
from wire.record import (
    ABORTED,
    ABORTED_WITHOUT_TOKEN,
    I32,
    Failed,
    Fingerprint,
    RolloutHead,
    Sampling,
    Verdict,
    WorkOrder,
    pack_payload,
    rollout_id,
)

ABORT = "abort"
"""The engine's finish reason; the records say ABORTED."""
LOGPROB_MODE = "log-softmax of logits / temperature, full vocabulary"


@dataclass
class Outcome:
    """What became of some groups: rollouts (heads, payloads and their digests, side by side) and samples that came to nothing."""

    orders: list[WorkOrder] = field(default_factory=list)
    heads: list[RolloutHead] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    failures: list[SampleFailure] = field(default_factory=list)

    def extend(self, other: "Outcome") -> None:
        for mine, more in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.extend(more)


@dataclass(frozen=True)
class RequestTimes:
    """Wall clock at both ends of an engine request, and the engine seconds that each of its rows is charged with."""

    started: float
    finished: float
    engine_seconds: float


def engine_sampling(sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling_params."""
    return {"temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens, "top_p": sampling.top_p,
            "top_k": sampling.top_k, "min_p": sampling.min_p, "stop_token_ids": list(sampling.stop_token_ids)}


def request_for(orders: list[WorkOrder], prompts: list[list[int]]) -> GenerateRequest:
    """One row per sample, the samples of an order side by side, its baseline last. All orders must have the sampling of the first."""
    rows, own = list[list[int]](), {}
    for order, prompt in zip(orders, prompts, strict=True):
        rows += [prompt] * order.rows
        if order.baseline is not None:
            own[len(rows) - 1] = engine_sampling(order.baseline)
    sampling = orders[0].sampling
    return GenerateRequest(rows, engine_sampling(sampling), sampling.top_logprobs, own)


def failed_group(order: WorkOrder, reason: str) -> Outcome:
    """Every sample of the order came to nothing, for one reason."""
    return Outcome([order], failures=[SampleFailure(order.order_id, order.attempt, sample, reason) for sample in range(order.rows)])


def answer_ids(row: Generated) -> list[int]:
    """The response without its end token, for people and verifiers."""
    ids: list[int] = row.output_ids.tolist()
    return ids[:-1] if row.finish_reason == "stop" else ids


def not_judged(row: Generated, vocabulary: int) -> str | None:
    """Why no verifier sees this row, or None: it was aborted, or a token of it is none (replay quarantines it)."""
    if row.finish_reason == ABORT:
        return ABORTED
    ids = row.output_ids
    return "token_out_of_vocabulary" if ids.size and (ids.min() < 0 or ids.max() >= vocabulary) else None


def to_verify(order: WorkOrder, rows: list[Generated], decode: Callable[[list[list[int]]], list[str]], vocabulary: int) -> list[VerifyItem]:
    """The rows to judge."""
    responses = [answer_ids(row) for row in rows if not_judged(row, vocabulary) is None]
    return [VerifyItem(order.prompt, text, ids, order.columns) for ids, text in zip(responses, decode(responses), strict=True)]


def fingerprint_of(info: EngineInfo, rounding: str, tokenizer: str) -> Fingerprint:
    """`rounding`: what the actor does to weights before loading; `tokenizer`: its digest."""
    quantisation = info.quantisation if rounding == "none" else f"{info.quantisation}, weights rounded to {rounding}"
    return Fingerprint("sglang", info.engine_version, info.dtype, info.attention, quantisation, info.tp_size, info.deterministic,
                       LOGPROB_MODE, tokenizer, info.vocab_size)


def collect(order: WorkOrder, prompt_ids: list[int], rows: list[Generated], verdicts: list[Verdict], fingerprint: str,
            times: RequestTimes, vocabulary: int) -> Outcome:
    """One group. `verdicts` are those of the rows that were judged, in order. Another row with tokens is a rollout that failed; one
    without is a failure of its sample."""
    outcome, judged, prompt = Outcome([order]), iter(verdicts), np.array(prompt_ids, I32)
    for sample, row in enumerate(rows):
        why = not_judged(row, vocabulary)
        verdict: Verdict = next(judged) if why is None else Failed(why)
        if not len(row.output_ids):
            reason = ABORTED_WITHOUT_TOKEN if why == ABORTED else "no_token"
            outcome.failures.append(SampleFailure(order.order_id, order.attempt, sample, reason))
            continue
        sampling = order.sampling_of(sample)
        top = (row.top_ids, row.top_logprobs) if sampling.top_logprobs else (None, None)  # one request asks for as many of every row
        payload = pack_payload(prompt, row.output_ids, row.logprobs, *top)
        outcome.payloads.append(payload)
        outcome.digests.append(digest(payload))
        outcome.heads.append(RolloutHead(
            rollout_id(order.order_id, order.attempt, sample), order.order_id, order.attempt, sample, len(prompt_ids), len(row.output_ids),
            row.spans, row.finish_reason, sampling, fingerprint, verdict, started=times.started, finished=times.finished,
            engine_seconds=times.engine_seconds))
    return outcome
