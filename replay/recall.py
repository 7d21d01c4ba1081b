"""A committed update as it was: record, rollouts and stored anchors, so that it can be run again. Read only; the audit uses it, too.

Each part is checked against its digest: what rotted must be called that, and not come out of the rerun as other kernels.
"""

import msgspec

from replay.books import Readable
from replay.orders import damaged
from replay.sound import anchors_of, checked_baselines, rollouts_of
from wire.digest import digest
from wire.errors import RunError, StoreError
from wire.messages import Recalled, UpdateRecord
from wire.record import VersionNotice, group_id

_record = msgspec.json.Decoder(UpdateRecord)


def updates_since(db: Readable, version: int) -> list[int]:
    """Committed updates that began from `version` or a later one: what a checkpoint of that version lacks. In order."""
    return [update for update, in db.execute("SELECT update_id FROM updates WHERE state = 'committed' AND version_in >= ? "
                                             "ORDER BY update_id", (version,))]


def check_way(db: Readable, version: int, committed: VersionNotice) -> None:
    """The committed updates since `version` lead to `committed`, each from where the one before it ended, or from the fork of that; and
    its weights are those that were committed. StoreError where they do not: a rerun would come out otherwise."""
    forks = dict(db.execute("SELECT version, parent FROM versions WHERE update_id IS NULL AND parent IS NOT NULL AND state = 'live'"))

    def leads(at: int, to: int) -> bool:
        while to != at and forks.get(to, to) < to:  # a parent is older; what rotted may say otherwise
            to = forks[to]
        return to == at

    at = version
    for update, begin, end in db.execute("SELECT update_id, version_in, version_out FROM updates WHERE state = 'committed' "
                                         "AND version_in >= ? ORDER BY update_id", (version,)).fetchall():
        if not leads(at, begin):
            raise damaged(f"an update between versions {at} and {begin}, before update {update},")
        at = end
    if not leads(at, committed.version):
        raise damaged(f"an update between versions {at} and {committed.version}")
    (made_by,) = db.execute("SELECT update_id FROM versions WHERE version = ?", (committed.version,)).fetchone()
    if made_by is not None:
        _read_record(db, made_by)
        return
    (body,) = db.execute("SELECT body FROM ledger WHERE kind IN ('version', 'fork') ORDER BY seq DESC LIMIT 1").fetchone()
    if msgspec.json.decode(body)["notice"]["weights_digest"] != committed.weights_digest:
        raise damaged(f"the row of version {committed.version}")


def recall(db: Readable, update: int) -> tuple[Recalled, bytes]:
    """RunError when retention removed tokens or old log-probs of a rollout that the update trained on; StoreError when something of it
    is not what was acknowledged."""
    try:
        return _recall(db, update)
    except StoreError as error:
        raise StoreError(f"update {update}: {error}") from error


def _recall(db: Readable, update: int) -> tuple[Recalled, bytes]:
    record = _read_record(db, update)
    rows = rollouts_of(db, record.rollout_ids)
    heads = [kept.head for kept in rows]
    if [(head.rollout_id, head.response_len) for head in heads] != list(zip(record.rollout_ids, record.response_lens, strict=True)) \
            or not {group_id(head) for head in heads} <= {*record.group_ids}:
        raise damaged("a rollout of its record")
    anchors = anchors_of(db, heads)
    if any(kept.payload is None for kept in rows) or any(anchor.old is None for anchor in anchors):
        raise RunError(f"not retained: what update {update} was trained on")
    digests = _column_digests(db, record)
    sizes = dict(db.execute("SELECT group_id, n FROM groups WHERE group_id IN (SELECT value FROM json_each(?))",
                            (msgspec.json.encode(record.group_ids).decode(),)).fetchall())
    baselines = checked_baselines(db, [(group, sizes[group]) for group in record.group_ids if group in sizes])
    if [getattr(head.verdict, "reward", None) for head in baselines] != record.greedy_rewards:
        raise damaged("a greedy response of its groups")
    reply = Recalled(record, digests, heads, [anchor.head for anchor in anchors], baselines)
    return reply, b"".join([*(kept.payload or b"" for kept in rows), *(anchor.old or b"" for anchor in anchors)])


def _read_record(db: Readable, update: int) -> UpdateRecord:
    """Its bytes, its row's columns, and the version that it made."""
    found = db.execute("SELECT record, record_digest, update_id, version_in, version_out, skipped FROM updates "
                       "WHERE update_id = ?", (update,)).fetchone()
    if found is None:
        raise damaged("its row")
    text, told, *columns = found
    if not isinstance(text, str) or digest(text.encode()) != told:
        raise damaged("its record")
    record = _record.decode(text)
    if columns != [record.update, record.version_in, record.version_out, record.skipped]:
        raise damaged("its row (its number or versions)")
    made = db.execute("SELECT version, weights_digest FROM versions WHERE update_id = ?", (update,)).fetchall()
    if made != ([] if record.skipped else [(record.version_out, record.weights_digest_out)]):
        raise damaged(f"the row of version {record.version_out}")
    return record


def _column_digests(db: Readable, record: UpdateRecord) -> list[str]:
    """In the order of the record's columns; what is still there has them."""
    stored = {name: (dtype, data, told) for name, dtype, data, told in db.execute(
        "SELECT name, dtype, data, digest FROM update_columns WHERE update_id = ?", (record.update,)).fetchall()}
    if {name: dtype for name, (dtype, _, _) in stored.items()} != dict(record.columns):
        raise damaged("the list of its columns")
    for name, (_, data, told) in stored.items():
        if data is not None and digest(data) != told:
            raise damaged(f"its column {name}")
    return [stored[name][2] for name, _ in record.columns]
