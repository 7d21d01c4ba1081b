"""Rows of the store as typed tuples, for the tools that only read."""

from typing import NamedTuple


class RolloutRow(NamedTuple):
    """A stored training rollout, without its payload; `retained` says whether the payload is still there."""

    rollout_id: str
    group_id: str
    sample: int
    state: str
    reason: str | None
    update_id: int | None
    response_len: int
    oldest_version: int
    newest_version: int
    reward: float | None
    failure: str | None
    head: str
    head_digest: str
    payload_digest: str
    retained: int


class SpanRow(NamedTuple):
    rollout_id: str
    span: int
    version: int
    start: int
    end: int
    kv_clean: int
    source: str | None
    weights_digest: str | None
    trainer: str | None
    rows: int | None
    width: int | None
    row: int | None
    old: bytes | None
    old_digest: str | None
    anchor_digest: str | None


class GroupRow(NamedTuple):
    group_id: str
    purpose: str
    prompt_id: str
    n: int
    state: str
    reason: str | None
    oldest_version: int | None
    update_id: int | None


class VersionRow(NamedTuple):
    version: int
    parent: int | None
    update_id: int | None
    path: str
    manifest_digest: str
    weights_digest: str
    state: str
    retained: int
    committed_at: float


class UpdateRow(NamedTuple):
    update_id: int
    version_in: int
    version_out: int
    skipped: int
    state: str
    record: str
    record_digest: str
    committed_at: float


class ColumnRow(NamedTuple):
    update_id: int
    name: str
    dtype: str
    data: bytes | None
    digest: str


class CheckpointRow(NamedTuple):
    version: int
    update_id: int | None
    path: str
    manifest_digest: str
    state: str


class EvalRow(NamedTuple):
    eval_id: int
    version: int
    updates: int
    state: str
    sampled: float | None
    greedy: float | None


class ActorRow(NamedTuple):
    name: str
    epoch: int
    confirmed: int
    probe_mean: float | None
    probe_max: float | None
    fingerprint: str | None


class LedgerRow(NamedTuple):
    seq: int
    kind: str
    body: str
    prev: str
    hash: str


TABLES: dict[type, str] = {
    RolloutRow: "rollouts",
    SpanRow: "spans",
    GroupRow: "groups",
    VersionRow: "versions",
    UpdateRow: "updates",
    ColumnRow: "update_columns",
    CheckpointRow: "checkpoints",
    EvalRow: "evals",
    ActorRow: "actors",
    LedgerRow: "ledger",
}
COMPUTED = {"retained": {"rollouts": "payload IS NOT NULL AS retained"}}


def key_of(row: type[NamedTuple]) -> str:
    """The columns by which rows of this kind are ordered."""
    return {SpanRow: "rollout_id, span", ColumnRow: "update_id, name"}.get(row, row._fields[0])
