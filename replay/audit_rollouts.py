"""Audit of what is stored of each rollout: head, payload, spans, anchors. One rollout at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from replay.reader import RunReader
from replay.rows import RolloutRow, SpanRow
from wire.digest import digest
from wire.errors import ProtocolError
from wire.record import F32, RolloutHead, Scored, group_id, unpack_payload

EXACT = ("resident", "snapshot", "old_model", "interrupted")
POSITIVE_SLACK = 1e-4
"""The trainer's log-softmax may round a probability of 1 to a log-prob this far above 0; the engine's mu may not be above 0 at all."""
NO_VOCABULARY = 1 << 31
"""Where the engine's fingerprint holds none: ids are int32."""


class Finding(NamedTuple):
    """Something that does not hold: what kind, the ids concerned, and one sentence with what was expected and what was found."""

    kind: str
    ids: list[str]
    text: str


def check_rollout(run: RunReader, row: RolloutRow, spans: list[SpanRow], weights: dict[int, str]) -> Iterator[Finding]:
    """`weights`: version -> weights digest, of every committed version."""
    try:
        head = msgspec.json.decode(row.head, type=RolloutHead)
    except msgspec.MsgspecError as error:
        yield Finding("head", [row.rollout_id], f"the stored head is not a rollout head: {error}")
        return
    yield from _head(row, head)
    yield from _spans(row, head, spans)
    yield from _payload(run, row, head)
    for span in spans:
        yield from _anchor(row, span, weights)


def _head(row: RolloutRow, head: RolloutHead) -> Iterator[Finding]:
    ids = [row.rollout_id]
    names = {
        "rollout id": (row.rollout_id, head.rollout_id),
        "group": (row.group_id, group_id(head)),
        "sample": (row.sample, head.sample),
        "response length": (row.response_len, head.response_len),
    }
    for name, (stored, said) in names.items():
        if stored != said:
            yield Finding("head", ids, f"{name}: the row says {stored}, the head says {said}")
    reward = head.verdict.reward if isinstance(head.verdict, Scored) else None
    failure = None if isinstance(head.verdict, Scored) else head.verdict.reason
    if (reward, failure) != (row.reward, row.failure):
        yield Finding(
            "reward", ids, f"the verdict gave reward {reward} failure {failure}, the row holds reward {row.reward} failure {row.failure}"
        )
    if row.reward is not None and not np.isfinite(row.reward):
        yield Finding("reward", ids, f"reward {row.reward} is not finite")
    if row.state == "trained" and row.reward is None:
        yield Finding("reward", ids, f"trained although the verifier failed: {row.failure}")


def _spans(row: RolloutRow, head: RolloutHead, spans: list[SpanRow]) -> Iterator[Finding]:
    ids = [row.rollout_id]
    stored = [(s.version, s.start, s.end, bool(s.kv_clean)) for s in spans]
    said = [(s.version, s.start, s.end, s.kv_clean) for s in head.spans]
    if stored != said:
        yield Finding("spans", ids, f"the head says {said}, the span rows say {stored}")
    at, version = 0, -1
    for found, start, end, _ in stored:
        if start != at or end <= start:
            yield Finding(
                "spans",
                ids,
                f"a span should begin at token {at} and be not empty, found [{start}, {end}): "
                f"each response token must be covered exactly once",
            )
        if found < version:
            yield Finding("spans", ids, f"version {found} at token {start} comes after version {version}: versions may not decrease")
        at, version = end, max(version, found)
    if at != row.response_len:
        yield Finding("spans", ids, f"spans end at token {at}, the response has {row.response_len}")
    if stored and (row.oldest_version, row.newest_version) != (stored[0][0], stored[-1][0]):
        yield Finding(
            "spans",
            ids,
            f"the row says versions {row.oldest_version} to {row.newest_version}, its spans say {stored[0][0]} to {stored[-1][0]}",
        )


def _payload(run: RunReader, row: RolloutRow, head: RolloutHead) -> Iterator[Finding]:
    data = run.payload(row.rollout_id)
    if data is None:
        return
    ids = [row.rollout_id]
    if (found := digest(data)) != row.payload_digest:
        yield Finding("payload", ids, f"payload digest: expected {row.payload_digest[:16]}, found {found[:16]}")
    try:
        payload = unpack_payload(head, data)
    except ProtocolError as error:
        yield Finding("payload", ids, str(error))
        return
    if bad := np.flatnonzero(~np.isfinite(payload.mu) | (payload.mu > 0)).tolist():
        yield Finding("mu", ids, f"mu must be finite and <= 0; {len(bad)} tokens are not, the first at {bad[0]}: {payload.mu[bad[0]]}")
    vocabulary = run.one("SELECT json_extract(body, '$.vocabulary') FROM fingerprints WHERE id = ?", head.fingerprint) or NO_VOCABULARY
    for part in (payload.prompt_ids, payload.response_ids, payload.top_ids):
        if part.size and (part.min() < 0 or part.max() >= vocabulary):
            odd = part.min() if part.min() < 0 else part.max()
            yield Finding("payload", ids, f"token id {odd} is outside the vocabulary of {vocabulary}")
            break


def _anchor(row: RolloutRow, span: SpanRow, weights: dict[int, str]) -> Iterator[Finding]:
    ids = [row.rollout_id]
    where = f"span {span.span} (version {span.version}, tokens {span.start} to {span.end})"
    if span.source is None or span.source == "missing":
        if span.old is not None:
            yield Finding("anchor", ids, f"{where}: source {span.source}, and yet old log-probs are stored")
        return
    if span.source not in EXACT:
        yield Finding("source", ids, f"{where}: source {span.source!r} is none of {', '.join(EXACT)}, missing")
    if not span.kv_clean:
        yield Finding(
            "source", ids, f"{where}: sampled with a KV cache of other weights, so it cannot have an exact anchor, found {span.source}"
        )
    if span.weights_digest != weights.get(span.version, span.weights_digest):
        yield Finding(
            "anchor",
            ids,
            f"{where}: scored under weights {str(span.weights_digest)[:16]}, version {span.version} has {weights[span.version][:16]}",
        )
    if span.old is None:
        return
    if (found := digest(span.old)) != span.old_digest:
        yield Finding("anchor", ids, f"{where}: digest of old: expected {str(span.old_digest)[:16]}, found {found[:16]}")
    if len(span.old) != 4 * (span.end - span.start):
        yield Finding("anchor", ids, f"{where}: {len(span.old)} bytes of old, expected {4 * (span.end - span.start)}")
    elif not (np.frombuffer(span.old, F32) <= POSITIVE_SLACK).all():
        yield Finding("anchor", ids, f"{where}: old must be a log-prob (finite, <= 0)")
