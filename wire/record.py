"""The records that travel and are stored: work orders, rollouts, verdicts, fingerprints, scoring plans, versions.

A rollout is a small typed head plus one payload: raw little-endian arrays, never a msgpack list of numbers. The payload's bytes are
the same on the wire, in the store and at the learner, so one digest covers them everywhere.
"""

from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec
import numpy as np

from wire.digest import digest_json
from wire.errors import ProtocolError

Purpose = Literal["train", "eval", "greedy_baseline"]
RolloutSource = Literal["policy", "demonstration", "peer", "hinted"]
AnchorSource = Literal["resident", "snapshot", "old_model", "interrupted", "missing"]
ANCHOR_SOURCES: tuple[AnchorSource, ...] = get_args(AnchorSource)
"""The column `old_source` of an update holds indices into this."""

ABORTED, ABORTED_WITHOUT_TOKEN = "aborted", "aborted_without_token"
"""Ended by a weight swap: the reason of a Failed verdict, and of a sample's failure."""

I32, F32 = np.dtype("<i4"), np.dtype("<f4")


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a response was, or is to be, sampled. `mu` is the log-prob under exactly this distribution."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    top_logprobs: int = 0


class WorkOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`n` responses to one prompt. One attempt of an order is one group. An eval order names the exact version to answer with.
    `excused`: earlier attempts that do not count towards replay.max_attempts. `outlived`: how often earlier attempts were left without an
    answer by an actor that vanished.

    `baseline`: one response more is wanted, sampled in this way (ReMax's greedy one): sample number n of the group, purpose
    `greedy_baseline`, never trained on.
    """

    order_id: str
    attempt: int
    purpose: Purpose
    prompt_id: str
    prompt: str | list[dict[str, str]]
    columns: dict[str, Any]
    n: int
    sampling: Sampling
    version: int | None = None
    excused: int = 0
    outlived: int = 0
    baseline: Sampling | None = None

    @property
    def rows(self) -> int:
        """How many responses it wants, the baseline included."""
        return self.n + (self.baseline is not None)

    def sampling_of(self, sample: int) -> Sampling:
        return self.baseline if self.baseline is not None and sample == self.n else self.sampling


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Response tokens [start, end) were sampled under `version`; kv_clean is False when the KV cache was made under other weights."""

    version: int
    start: int
    end: int
    kv_clean: bool = True


class Scored(msgspec.Struct, tag="scored", frozen=True, forbid_unknown_fields=True):
    reward: float
    detail: str = ""
    verifier: str = ""
    seconds: float = 0.0


class Failed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The verifier failed: a reason, never a reward of 0."""

    reason: str
    detail: str = ""
    verifier: str = ""
    seconds: float = 0.0


Verdict = Scored | Failed


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What produced `mu`: the engine, and how it computes. Token ids of its rollouts are below `vocabulary`."""

    engine: str
    engine_version: str
    dtype: str
    attention: str
    quantisation: str
    tp_size: int
    deterministic: bool
    logprob_mode: str
    tokenizer: str
    vocabulary: int


def fingerprint_id(fingerprint: Fingerprint) -> str:
    """By which heads name it: the first 16 digits of the digest of its fields."""
    return digest_json(msgspec.to_builtins(fingerprint))[:16]


class RolloutHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of one response but its arrays. Times are wall-clock seconds, for people only."""

    rollout_id: str
    order_id: str
    attempt: int
    sample: int
    prompt_len: int
    response_len: int
    spans: tuple[Span, ...]
    finish_reason: str
    sampling: Sampling
    fingerprint: str
    verdict: Verdict
    source: RolloutSource = "policy"
    started: float = 0.0
    finished: float = 0.0
    engine_seconds: float = 0.0


class Payload(NamedTuple):
    """The arrays of one response. `top_*` have shape [response_len, sampling.top_logprobs] (width 0 when not asked for)."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    mu: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Attempt(Protocol):
    """A work order, or anything made for one."""

    @property
    def order_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


def group_id(of: Attempt) -> str:
    """One attempt of an order is one group."""
    return f"{of.order_id}.{of.attempt}"


def rollout_id(order_id: str, attempt: int, sample: int) -> str:
    return f"{order_id}.{attempt}.{sample}"


def pack_payload(prompt_ids: np.ndarray, response_ids: np.ndarray, mu: np.ndarray,
                 top_ids: np.ndarray | None = None, top_logprobs: np.ndarray | None = None) -> bytes:
    """int32 prompt ids, int32 response ids, float32 mu, int32 top ids, float32 top log-probs, little-endian, end to end."""
    parts = [np.asarray(prompt_ids, I32), np.asarray(response_ids, I32), np.asarray(mu, F32)]
    if top_ids is not None and top_logprobs is not None:
        parts += [np.asarray(top_ids, I32), np.asarray(top_logprobs, F32)]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def payload_size(head: RolloutHead) -> int:
    """Bytes of the payload that `head` announces."""
    return 4 * (head.prompt_len + 2 * head.response_len + 2 * head.response_len * head.sampling.top_logprobs)


def unpack_payload(head: RolloutHead, data: bytes | memoryview) -> Payload:
    """Views into `data`. Raises ProtocolError when the length is not what the head announces."""
    prompt, response, top = head.prompt_len, head.response_len, head.sampling.top_logprobs
    if min(prompt, response, top) < 0 or len(data) != payload_size(head):
        raise ProtocolError(f"rollout {head.rollout_id}: {len(data)} payload bytes do not fit its head "
                            f"(prompt {prompt}, response {response}, top {top})")
    ints = np.frombuffer(data, I32)
    floats = np.frombuffer(data, F32)
    a, b = prompt, prompt + response
    c, d = b + response, b + response + response * top
    return Payload(ints[:a], ints[a:b], floats[b:c], ints[c:d].reshape(response, top), floats[d:].reshape(response, top))


class ScoringPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where in which fixed shape a row was scored: a batched forward need not equal its slice bit for bit."""

    rows: int
    width: int
    row: int


class VersionNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed version: where its files are (relative to the run directory) and what they must digest to."""

    version: int
    path: str
    manifest_digest: str
    weights_digest: str
