"""Every message of the protocol, as typed structs. `wire/codec.py` is the one place that encodes and decodes them.

A message is two frames: a small msgpack header (one of these structs and a sequence number) and a bulk frame, empty for most. Every
request gets exactly one reply with the same sequence number; a repeated request is harmless. What the bulk frame holds is said beside
each struct; sizes follow from the header and are checked before use.
"""

from typing import Any

import msgspec

from wire.record import AnchorSource, Fingerprint, RolloutHead, ScoringPlan, VersionNotice, WorkOrder

PROTOCOL = 2
MAX_CHUNK = 4 << 20
"""Bytes of a version's file in one reply."""


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """Base: the tag is the class name in lower case."""


# ---------------------------------------------------------------- anyone
class Hello(Message, frozen=True):
    """First message of a process. `shared` is the part of the config that must agree; a difference is refused, naming the keys."""

    role: str  # actor | learner | rank | tool
    name: str
    protocol: int
    shared: dict[str, Any]


class Welcome(Message, frozen=True):
    """`epoch` fences: a later HELLO of the same role and name makes this one obsolete. `committed` is the newest version, if any. `run_id`
    tells runs of one name apart."""

    epoch: int
    run_dir: str
    committed: VersionNotice | None
    updates: int
    run_id: str = ""


class Refusal(Message, frozen=True):
    """The request was not carried out. kind: refused | again | protocol (RefusedError, TryAgainError, ProtocolError)."""

    kind: str
    reason: str


class Ok(Message, frozen=True):
    pass


class Stats(Message, frozen=True):
    pass


class StatsReply(Message, frozen=True):
    values: dict[str, Any]


# ---------------------------------------------------------------- actor
class Engine(Message, frozen=True):
    """Says what engine stands behind fingerprint `id`, before any rollout that names it."""

    epoch: int
    id: str
    fingerprint: Fingerprint


class Baseline(Message, frozen=True):
    """`probe_mean`: of the first version that an engine of this fingerprint proved in this run; None when none did."""

    probe_mean: float | None


class Pull(Message, frozen=True):
    """Asks for up to `want` orders; also the heartbeat, and renews the lease of the groups in `holding`. Waits up to `wait_s`.
    `confirmed` is the version the engine has loaded and proved (-1: none)."""

    epoch: int
    confirmed: int
    want: int
    wait_s: float
    holding: list[str]


class Work(Message, frozen=True):
    """`notice`: load this version before answering `orders` (None: go on with what you have). `done`: the run needs no more."""

    orders: list[WorkOrder]
    notice: VersionNotice | None
    done: bool


class SampleFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample that came to nothing: no token was made."""

    order_id: str
    attempt: int
    sample: int
    reason: str


class Put(Message, frozen=True):
    """Rollouts and failures of orders that this actor holds. Bulk: the payloads, in the order of `heads`, end to end."""

    epoch: int
    heads: list[RolloutHead]
    digests: list[str]
    failures: list[SampleFailure]


class Stored(Message, frozen=True):
    """Sent only after the commit: what it counts is durable. `refused` and `quarantined` pair a rollout id with the reason."""

    stored: int
    duplicates: int
    quarantined: list[tuple[str, str]]
    refused: list[tuple[str, str]]


class Applied(Message, frozen=True):
    """The engine holds this version: digests checked, probe scored through the engine (absolute differences of log-probs)."""

    epoch: int
    version: int
    weights_digest: str
    probe_mean: float
    probe_max: float


class GiveBack(Message, frozen=True):
    """Groups this actor will not finish (`order_id.attempt`): their prompts go back to the queue."""

    epoch: int
    group_ids: list[str]
    reason: str


class Note(Message, frozen=True):
    """Something that a person should see in the ledger: weights_refused, engine_restarted, engine_suspect, ..."""

    epoch: int
    kind: str
    detail: str


class Fetch(Message, frozen=True):
    """Asks for up to `count` bytes of a version's file (model.safetensors or manifest.json) from `offset` on: for actors that do not see
    the run directory."""

    epoch: int
    version: int
    file: str
    offset: int
    count: int


class Chunk(Message, frozen=True):
    """`size`: bytes of the whole file. Bulk: `count` bytes of it, with their digest."""

    size: int
    count: int
    digest: str


# ---------------------------------------------------------------- learner
class AnchorHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Old log-probs of one span; `count` float32 follow in the bulk frame, in the order of the heads."""

    rollout_id: str
    span: int
    version: int
    source: AnchorSource
    weights_digest: str
    trainer: str
    plan: ScoringPlan
    count: int


class Initial(Message, frozen=True):
    """Commits the initial weights as version 0."""

    epoch: int
    notice: VersionNotice


class Unscored(Message, frozen=True):
    """Asks for rollouts with spans of `version` that have no anchor yet, leased or not."""

    epoch: int
    version: int
    limit: int


class Rows(Message, frozen=True):
    """Bulk: the payloads of `heads`, end to end."""

    heads: list[RolloutHead]


class PutAnchors(Message, frozen=True):
    """Each span is stored once: a second anchor for it is refused and counted. Bulk: float32 log-probs, in the order of the heads."""

    epoch: int
    heads: list[AnchorHead]


class Lease(Message, frozen=True):
    """Asks for the groups of the next update. A lease that was handed out and not committed is handed out again, the same."""

    epoch: int
    version: int
    wait_s: float


class Leased(Message, frozen=True):
    """Whole groups in grant order. `heads` holds every scored rollout of them, in group order. `baselines`: the head of each group's greedy
    response, in the order of the groups, where the recipe asks for one; its tokens and log-probs stay at replay. Bulk: payloads of `heads`,
    then the float32 log-probs of `anchors`."""

    update: int
    group_ids: list[str]
    heads: list[RolloutHead]
    anchors: list[AnchorHead]
    baselines: list[RolloutHead] = []


class NotYet(Message, frozen=True):
    """Nothing to lease within `wait_s`; `awaited` names what is missing."""

    awaited: str


class Done(Message, frozen=True):
    """All updates are committed."""


class UpdateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one update was: enough to run it again. `rollout_ids` fix the order of the per-token columns."""

    update: int
    version_in: int
    version_out: int
    skipped: bool
    group_ids: list[str]
    rollout_ids: list[str]
    response_lens: list[int]
    columns: list[tuple[str, str]]
    """(name, dtype) of each per-token column in the bulk frame: old, prox, cur, weight: f4; keep, old_source: u1; where the
    recipe has them also ref, start_kl: f4 and accepted: u1."""
    steps: list[dict[str, Any]]
    """Per optimizer step: rows by rank and micro-batch, widths, denominator, loss, gradient norm, learning rate."""
    state: dict[str, Any]
    """Seed, RNG and scheduler state, world size, ZeRO stage, threads, trainer fingerprint, config and source digests."""
    prox_source: str
    weights_digest_out: str
    metrics: dict[str, Any]
    seconds: dict[str, float]
    greedy_rewards: list[float] = []
    """Of each group's greedy response, in the order of `group_ids`; empty where the recipe has none."""


class Commit(Message, frozen=True):
    """One transaction: groups trained, update record, new version. A skipped update has no notice. Bulk: the columns, end to end, each
    over all trained tokens in the order of `rollout_ids`."""

    epoch: int
    record: UpdateRecord
    notice: VersionNotice | None


class Committed(Message, frozen=True):
    version: int
    ledger_head: str
    done: bool


class Checkpointed(Message, frozen=True):
    """A complete checkpoint of version `version` lies at `path` (relative to the run directory)."""

    epoch: int
    version: int
    path: str
    manifest_digest: str


class Recall(Message, frozen=True):
    """Asks for the first committed update after update `after` that began from `version` or a later one, to run it again. Ok: there is
    none. Refused when something it needs is no longer retained."""

    epoch: int
    version: int
    after: int


class Recalled(Message, frozen=True):
    """A committed update: its record, the digests of its columns in the record's order, its rollouts in the order of `rollout_ids`, their
    stored anchors, and the `baselines` of its groups. Bulk: as for Leased."""

    record: UpdateRecord
    column_digests: list[str]
    heads: list[RolloutHead]
    anchors: list[AnchorHead]
    baselines: list[RolloutHead] = []


class Fork(Message, frozen=True):
    """The learner goes on from the checkpoint of version `checkpoint`: later updates are lost(fork), and the checkpoint's weights become
    the new version in `notice`, numbered max(version) + 1."""

    epoch: int
    checkpoint: int
    notice: VersionNotice


class Finished(Message, frozen=True):
    """The learner has exported the model; nothing more will come from it."""

    epoch: int
    seconds: dict[str, float]


Request = (Hello | Stats | Engine | Pull | Put | Applied | GiveBack | Note | Fetch | Initial | Unscored | PutAnchors | Lease | Commit
           | Checkpointed | Recall | Fork | Finished)
Reply = Welcome | Refusal | Ok | StatsReply | Baseline | Work | Stored | Chunk | Rows | Leased | NotYet | Done | Committed | Recalled
AnyMessage = Request | Reply
