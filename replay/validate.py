"""What a rollout must be to be trained on. Anything else is poison: kept as evidence, never repaired.

The heads are checked one by one, the numbers of a whole Put at once.
"""

import math
from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wire.digest import digest
from wire.errors import ProtocolError
from wire.record import F32, I32, RolloutHead, Scored, WorkOrder, payload_size, rollout_id, unpack_payload

LARGEST_REWARD = float(np.finfo(np.float32).max)


class Item(NamedTuple):
    """One rollout of a Put with the order that it answers."""

    head: RolloutHead
    payload: memoryview
    digest: str
    order: WorkOrder


def cut(heads: Sequence[RolloutHead], bulk: bytes) -> list[memoryview] | None:
    """The payload of each head; None when the heads do not describe these bytes."""
    sizes = [payload_size(head) if min(head.prompt_len, head.response_len, head.sampling.top_logprobs) >= 0 else -1 for head in heads]
    if min(sizes, default=0) < 0 or sum(sizes) != len(bulk):
        return None
    view, start, cuts = memoryview(bulk), 0, []
    for size in sizes:
        cuts.append(view[start:start + size])
        start += size
    return cuts


def faults(items: Sequence[Item], versions: Collection[int], vocabularies: Mapping[str, int]) -> dict[int, str]:
    """What is wrong, by index into `items`; the sound ones are absent. `versions` are the committed ones that still count, `vocabularies`
    the sizes by engine fingerprint."""
    found = {index: fault for index, item in enumerate(items) if (fault := _head_fault(item, versions, vocabularies)) is not None}
    sound = [index for index in range(len(items)) if index not in found]
    if sound and not _numbers_sound([items[index] for index in sound], vocabularies):
        for index in sound:
            if (fault := _number_fault(items[index], vocabularies[items[index].head.fingerprint])) is not None:
                found[index] = fault
    return found


def _head_fault(item: Item, versions: Collection[int], fingerprints: Container[str]) -> str | None:
    head, order = item.head, item.order
    if head.rollout_id != rollout_id(head.order_id, head.attempt, head.sample):
        return f"rollout id is not order, attempt and sample: {head.order_id}.{head.attempt}.{head.sample}"
    if head.prompt_len < 1:
        return "no prompt tokens"
    if not 1 <= head.response_len <= order.sampling.max_new_tokens:
        return f"{head.response_len} response tokens, the order allows 1 to {order.sampling.max_new_tokens}"
    if head.sampling != order.sampling:
        return "sampled in another way than the order says"
    if head.fingerprint not in fingerprints:
        return f"unknown engine fingerprint {head.fingerprint!r}"
    if isinstance(head.verdict, Scored) and not abs(head.verdict.reward) <= LARGEST_REWARD:
        return f"reward is {head.verdict.reward}"
    if not math.isfinite(head.started + head.finished + head.engine_seconds + head.verdict.seconds) or head.finished < head.started:
        return "its times are not a span of time"
    if digest(item.payload) != item.digest:
        return "payload does not match its digest"
    return _span_fault(head, order, versions)


def _span_fault(head: RolloutHead, order: WorkOrder, versions: Collection[int]) -> str | None:
    end, version = 0, -1
    for span in head.spans:
        if span.start != end or span.end <= span.start:
            return f"spans do not cover the response once: [{span.start}, {span.end}) after {end}"
        if span.version < version:
            return f"version decreases within the response: {span.version} after {version}"
        if span.version not in versions:
            return f"version {span.version} was never committed, or was given up"
        if order.version is not None and span.version != order.version:
            return f"answered with version {span.version}, the order names {order.version}"
        end, version = span.end, span.version
    return None if end == head.response_len else f"spans cover {end} of {head.response_len} response tokens"


def _numbers_sound(items: Sequence[Item], vocabularies: Mapping[str, int]) -> bool:
    """The same tests as `_number_fault`, on all payloads at once; the smallest vocabulary stands for all."""
    tokens, floats = [], []
    for head, payload, _, order in items:
        b = head.prompt_len + head.response_len
        tokens.append(np.frombuffer(payload, I32, b))
        if order.purpose == "train":
            floats.append(np.frombuffer(payload, F32, head.response_len, 4 * b))
        if head.sampling.top_logprobs:
            return False
    smallest = min(vocabularies[item.head.fingerprint] for item in items)
    return _tokens_sound(np.concatenate(tokens), smallest) and (not floats or _logprobs_sound(np.concatenate(floats)))


def _number_fault(item: Item, vocabulary: int) -> str | None:
    try:
        payload = unpack_payload(item.head, item.payload)
    except ProtocolError as error:
        return str(error)
    for name, ids in (("prompt", payload.prompt_ids), ("response", payload.response_ids), ("top", payload.top_ids)):
        if not _tokens_sound(ids, vocabulary):
            return f"{name} token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of {vocabulary}"
    if item.order.purpose != "train":
        return None  # outside the sampling contract: nothing is trained on these log-probs
    if not _logprobs_sound(payload.mu):
        worst = int(np.argmin(np.isfinite(payload.mu) & (payload.mu <= 0)))
        return f"engine log-prob of response token {worst} is {payload.mu[worst]}"
    if not _logprobs_sound(payload.top_logprobs):
        return "a log-prob among the engine's top ones is not finite and at most 0"
    return None


def _tokens_sound(ids: np.ndarray, vocabulary: int) -> bool:
    return not ids.size or bool(ids.min() >= 0 and ids.max() < vocabulary)


def _logprobs_sound(values: np.ndarray) -> bool:
    """Finite and at most 0. NaN fails both comparisons."""
    return not values.size or bool(values.max() <= 0 and values.min() > -np.inf)
