"""Audit of committed updates: the record, its columns against the stored anchors, the budget, and that nothing was trained twice."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from configs.schema import Config
from replay.audit_rollouts import EXACT, Finding
from replay.reader import RunReader
from replay.rows import ColumnRow, RolloutRow, SpanRow, UpdateRow
from wire.digest import digest
from wire.messages import UpdateRecord
from wire.record import ANCHOR_SOURCES, F32

COLUMN_TYPES: dict[str, np.dtype[Any]] = {"f4": F32, "u1": np.dtype("u1")}


def check_updates(run: RunReader, config: Config, budgets: list[tuple[int, int]]) -> Iterator[Finding]:
    """`budgets`: (first update it was in force for, max_staleness), ascending."""
    trained_by: dict[str, list[int]] = defaultdict(list)
    version: int | None = None
    for row in run.read(UpdateRow):
        ids = [f"update {row.update_id}"]
        try:
            record = msgspec.json.decode(row.record, type=UpdateRecord)
        except msgspec.MsgspecError as error:
            yield Finding("record", ids, f"the record is not an update record: {error}")
            continue
        if (found := digest(row.record.encode())) != row.record_digest:
            yield Finding("record", ids, f"digest of the record: expected {row.record_digest[:16]}, found {found[:16]}")
        yield from _record(run, row, record)
        if row.state != "committed":
            continue
        if version is not None and row.version_in < version:
            yield Finding("record", ids, f"begins from version {row.version_in}, the committed update before it ended at version {version}")
        version = row.version_out
        if row.skipped:
            continue
        for rollout_id in record.rollout_ids:
            trained_by[rollout_id].append(row.update_id)
        budget = max((b for b in budgets if b[0] <= row.update_id), default=budgets[0])[1]
        yield from _trained(run, config, row, record, budget)
    for rollout_id, updates in trained_by.items():
        if len(updates) > 1:
            yield Finding("trained twice", [rollout_id], f"in the records of updates {', '.join(map(str, updates))}: expected one")
    claimed = run.read(RolloutRow, "state = 'trained'")
    for rollout in claimed:
        if rollout.update_id not in trained_by.get(rollout.rollout_id, []):
            yield Finding(
                "trained", [rollout.rollout_id], f"marked as trained by update {rollout.update_id}, whose committed record does not name it"
            )


def _record(run: RunReader, row: UpdateRow, record: UpdateRecord) -> Iterator[Finding]:
    ids = [f"update {row.update_id}"]
    for name, stored, said in (
        ("update", row.update_id, record.update),
        ("version_in", row.version_in, record.version_in),
        ("version_out", row.version_out, record.version_out),
        ("skipped", bool(row.skipped), record.skipped),
    ):
        if stored != said:
            yield Finding("record", ids, f"{name}: the row says {stored}, the record says {said}")
    if record.skipped != (record.version_out == record.version_in):
        yield Finding(
            "record",
            ids,
            f"{'skipped' if record.skipped else 'not skipped'}, and yet version {record.version_in} became {record.version_out}",
        )
    if record.skipped:
        return
    out = run.sql("SELECT update_id, weights_digest FROM versions WHERE version = ?", record.version_out)
    if out != [(row.update_id, record.weights_digest_out)]:
        yield Finding(
            "version",
            [*ids, f"v{record.version_out}"],
            f"the record says that it made weights {record.weights_digest_out[:16]}; the version's row says {out or 'nothing'}",
        )


def _trained(run: RunReader, config: Config, row: UpdateRow, record: UpdateRecord, budget: int) -> Iterator[Finding]:
    """One stepped update: its rollouts, tokens and columns."""
    columns: dict[str, np.ndarray] = {}
    yield from _columns(run, row, record, columns)
    at = 0
    for rollout_id, length in zip(record.rollout_ids, record.response_lens, strict=False):
        rollout = next(run.read(RolloutRow, "rollout_id = ?", rollout_id), None)
        if rollout is None:
            yield Finding("record", [f"update {row.update_id}", rollout_id], "trained a rollout that is not in the store")
        else:
            yield from _rollout(run, config, row, rollout, length, budget, {name: data[at : at + length] for name, data in columns.items()})
        at += length


def _columns(run: RunReader, row: UpdateRow, record: UpdateRecord, into: dict[str, np.ndarray]) -> Iterator[Finding]:
    ids = [f"update {row.update_id}"]
    stored = {column.name: column for column in run.read(ColumnRow, "update_id = ?", row.update_id)}
    if sorted(stored) != sorted(name for name, _ in record.columns):
        yield Finding("column", ids, f"the record has columns {sorted(n for n, _ in record.columns)}, stored are {sorted(stored)}")
    for name, kind in record.columns:
        column = stored.get(name)
        if column is None or column.data is None:
            continue
        if column.dtype != kind:
            yield Finding("column", [*ids, name], f"the row says type {column.dtype}, the record {kind}")
        if len(column.data) != (size := COLUMN_TYPES[kind].itemsize * sum(record.response_lens)):
            yield Finding("column", [*ids, name], f"{len(column.data)} bytes, expected {size}")
        else:
            into[name] = np.frombuffer(column.data, COLUMN_TYPES[kind])


def _rollout(
    run: RunReader, config: Config, row: UpdateRow, rollout: RolloutRow, length: int, budget: int, columns: dict[str, np.ndarray]
) -> Iterator[Finding]:
    ids = [rollout.rollout_id, f"update {row.update_id}"]
    if length != rollout.response_len:
        yield Finding("record", ids, f"the record counts {length} tokens, the rollout has {rollout.response_len}")
        return
    if (rollout.state, rollout.update_id) != ("trained", row.update_id):
        yield Finding(
            "state", ids, f"the record says trained by update {row.update_id}, the row says {rollout.state} by update {rollout.update_id}"
        )
    for span in run.read(SpanRow, "rollout_id = ?", rollout.rollout_id):
        part = {name: data[span.start : span.end] for name, data in columns.items()}
        yield from _span(config, ids, row, span, budget, part)


def _span(config: Config, ids: list[str], row: UpdateRow, span: SpanRow, budget: int, part: dict[str, np.ndarray]) -> Iterator[Finding]:
    where = f"span {span.span} (version {span.version}, tokens {span.start} to {span.end})"
    if not 0 <= (age := row.version_in - span.version) <= budget:
        yield Finding("budget", ids, f"{where} is {age} versions old, the budget is {budget}")
    if span.source is None:
        yield Finding("anchor", ids, f"{where} was trained without an anchor")
        return
    if span.source not in EXACT and (span.source != "missing" or config.anchor.on_missing != "mask"):
        yield Finding(
            "source", ids, f"{where} has source {span.source}, which anchor.on_missing = {config.anchor.on_missing!r} does not allow"
        )
    if "keep" in part and span.source == "missing" and part["keep"].any():
        yield Finding("source", ids, f"{where} has no anchor, and yet {int((part['keep'] != 0).sum())} of its tokens were kept")
    if "old_source" in part and span.source in ANCHOR_SOURCES and (part["old_source"] != ANCHOR_SOURCES.index(span.source)).any():
        yield Finding("source", ids, f"{where} has source {span.source}, and the column old_source of the update says otherwise")
    if "old" in part and span.old is not None and part["old"].tobytes() != span.old:
        at = np.flatnonzero(part["old"] != np.frombuffer(span.old, F32)[: len(part["old"])])
        first = (
            f": token {span.start + int(at[0])} was stored {np.frombuffer(span.old, F32)[at[0]]}, trained {part['old'][at[0]]}"
            if len(at)
            else ""
        )
        yield Finding("old", ids, f"{where}: the old log-probs that were trained on are not the stored anchor{first}")
    if {"keep", "weight"} <= part.keys():
        yield from _weights(ids, where, part["keep"], part["weight"])


def _weights(ids: list[str], where: str, keep: np.ndarray, weight: np.ndarray) -> Iterator[Finding]:
    if bad := int((~np.isfinite(weight) | (weight < 0)).sum()):
        yield Finding("weight", ids, f"{where}: {bad} weights are negative or not finite")
    if bad := int(((keep == 0) & (weight != 0)).sum()):
        yield Finding("weight", ids, f"{where}: {bad} tokens are masked and yet have a weight")
    if (keep > 1).any():
        yield Finding("weight", ids, f"{where}: keep must be 0 or 1, found {int(keep.max())}")
