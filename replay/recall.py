"""A committed update as it was: record, rollouts and stored anchors, so that it can be run again. Read only; the audit uses it, too."""

from typing import Any

import msgspec

from replay.baselines import baselines_of
from replay.books import Readable
from wire.errors import RunError
from wire.messages import AnchorHead, Recalled, UpdateRecord
from wire.record import RolloutHead, ScoringPlan

SELECT_ROWS = "SELECT r.head, r.payload FROM json_each(?) ids JOIN rollouts r ON r.rollout_id = ids.value ORDER BY ids.key"
SELECT_ANCHORS = ("SELECT s.rollout_id, s.span, s.version, s.source, s.weights_digest, s.trainer, s.rows, s.width, s.row, s.old "
                  "FROM json_each(?) ids JOIN spans s ON s.rollout_id = ids.value WHERE s.source IS NOT NULL ORDER BY ids.key, s.span")
_head = msgspec.json.Decoder(RolloutHead)
_record = msgspec.json.Decoder(UpdateRecord)


def updates_since(db: Readable, version: int) -> list[int]:
    """Committed updates that began from `version` or a later one: what a checkpoint of that version lacks. In order."""
    return [update for update, in db.execute("SELECT update_id FROM updates WHERE state = 'committed' AND version_in >= ? "
                                             "ORDER BY update_id", (version,))]


def recall(db: Readable, update: int) -> tuple[Recalled, bytes]:
    """RunError when retention removed tokens or old log-probs of a rollout that the update trained on."""
    text, = db.execute("SELECT record FROM updates WHERE update_id = ?", (update,)).fetchone()
    record = _record.decode(text)
    ids = msgspec.json.encode(record.rollout_ids).decode()
    rows = db.execute(SELECT_ROWS, (ids,)).fetchall()
    spans = db.execute(SELECT_ANCHORS, (ids,)).fetchall()
    gone = sum(payload is None for _, payload in rows) + sum(span[-1] is None and span[3] != "missing" for span in spans)
    if gone or len(rows) != len(record.rollout_ids):
        raise RunError(f"not retained: what update {update} was trained on")
    digests = dict(db.execute("SELECT name, digest FROM update_columns WHERE update_id = ?", (update,)).fetchall())
    reply = Recalled(record, [digests[name] for name, _ in record.columns], [_head.decode(head) for head, _ in rows],
                     [_anchor(*span) for span in spans], baselines_of(db, record.group_ids))
    return reply, b"".join([*(payload for _, payload in rows), *(span[-1] or b"" for span in spans)])


def _anchor(rollout: str, span: int, version: int, source: Any, weights: str, trainer: str, rows: int, width: int, row: int,
            old: bytes | None) -> AnchorHead:
    return AnchorHead(rollout, span, version, source, weights, trainer, ScoringPlan(rows, width, row), len(old or b"") // 4)
