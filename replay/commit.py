"""Commit: one transaction for the groups trained, the update record with its columns, and the new version. Repeating it changes nothing."""

import json
import math

import msgspec

from replay.baselines import baselines_of
from replay.budget import too_old
from replay.core import Core, encode
from replay.handlers_learner import add_version
from replay.metrics import metrics_line
from replay.sessions import Session
from replay.weight_files import place
from wire.codec import ITEM_SIZES
from wire.digest import digest
from wire.messages import Commit, Committed, Refusal, Reply, UpdateRecord


def commit(core: Core, session: Session, request: Commit, bulk: bytes) -> Reply:
    record = request.record
    body = encode(record)
    record_digest = digest(body.encode())
    if core.store.one("SELECT record_digest FROM updates WHERE update_id = ? AND state = 'committed'", record.update) == record_digest:
        return Committed(core.committed, core.store.ledger.head, core.training_done)
    if refusal := _refuse(core, request) or (request.notice and place(core, session, request.notice)):
        return refusal
    store, wall = core.begin(), core.clock.wall()
    core.update_times.close(wall)
    transitions = core.book.skipped() if record.skipped else core.book.trained()
    core.stepped, core.skipped = core.stepped + (not record.skipped), core.skipped + record.skipped
    core.next_update = record.update + 1
    metrics = encode(metrics_line(core, record))
    core.last_metrics = json.loads(metrics)  # as a restarted replay reads it: null for what is no number
    store.db.execute("INSERT INTO updates VALUES (?, ?, ?, ?, 'committed', ?, ?, ?, ?)", (
        record.update, record.version_in, record.version_out, record.skipped, body, record_digest, metrics, wall))
    columns = _columns(record, bulk)
    store.db.executemany("INSERT INTO update_columns VALUES (?, ?, ?, ?, ?)",
                         [(record.update, name, dtype, data, digest(data)) for name, dtype, data in columns])
    store.wrote(len(bulk))
    if request.notice is not None:
        add_version(core, request.notice, record.version_in, record.update)
    core.apply("commit", transitions, update=record.update, skipped=record.skipped, record=record_digest,
               columns={name: digest(data) for name, _, data in columns}, metrics=digest(metrics.encode()),
               notice=msgspec.to_builtins(request.notice))
    core.metrics_due.append(metrics)
    core.plan_evaluation()
    return Committed(core.committed, store.ledger.head, core.training_done)


def _refuse(core: Core, request: Commit) -> Refusal | None:
    record, notice = request.record, request.notice
    leased = core.book.in_state("leased")
    if record.update != core.next_update or not leased:
        return Refusal("again", f"update {record.update} is not the one that is leased: the next is {core.next_update}, "
                                f"{len(leased)} groups are leased")
    if record.version_in != core.committed:
        return Refusal("again", f"update {record.update} began from version {record.version_in}, but version {core.committed} is committed")
    out = core.committed if record.skipped else core.next_version
    if record.version_out != out or (None if notice is None else notice.version) != (None if record.skipped else out):
        return Refusal("again", f"update {record.update} makes version {record.version_out}, the next is {out}")
    if notice is not None and notice.weights_digest != record.weights_digest_out:
        return Refusal("protocol", f"update {record.update}: the record and the notice name different weights for version {out}")
    if record.group_ids != [group.group_id for group in leased]:
        return Refusal("again", f"update {record.update}: its groups are not those of the lease")
    for group in leased:
        if group.oldest_version is not None and too_old(record.version_in, group.oldest_version, core.book.max_staleness):
            return Refusal("protocol", f"group {group.group_id} is older than the staleness budget: version {group.oldest_version} "
                                       f"in an update from {record.version_in}")
    return _refuse_rows(core, record)


def _refuse_rows(core: Core, record: UpdateRecord) -> Refusal | None:
    stored = dict(core.store.rows("SELECT rollout_id, response_len FROM rollouts r JOIN groups g USING (group_id) WHERE g.state = 'leased' "
                                  "AND g.purpose = 'train' AND r.state = 'leased' AND r.reward IS NOT NULL"))
    if len(record.rollout_ids) != len(record.response_lens) or dict(zip(record.rollout_ids, record.response_lens)) != stored \
            or len(record.rollout_ids) != len(stored):
        return Refusal("protocol", f"update {record.update}: rollout_ids and response_lens are not the scored rollouts of the lease")
    if record.greedy_rewards != [getattr(head.verdict, "reward", None) for head in baselines_of(core.store.db, record.group_ids)]:
        return Refusal("protocol", f"update {record.update}: greedy_rewards are not those of the lease")
    if odd := [name for name, seconds in record.seconds.items() if not math.isfinite(seconds)]:  # JSON has no such number: see `recall`
        return Refusal("protocol", f"update {record.update}: seconds.{odd[0]} is {record.seconds[odd[0]]}")
    if unknown := [dtype for _, dtype in record.columns if dtype not in ITEM_SIZES]:
        return Refusal("protocol", f"update {record.update}: unknown column type {unknown[0]!r}")
    return None


def _columns(record: UpdateRecord, bulk: bytes) -> list[tuple[str, str, bytes]]:
    tokens, start, found = sum(record.response_lens), 0, []
    for name, dtype in record.columns:
        size = tokens * ITEM_SIZES[dtype]
        found.append((name, dtype, bulk[start:start + size]))
        start += size
    return found
