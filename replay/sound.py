"""What is handed out to be trained on is what was acknowledged, or the run ends here with StoreError.

The learner reads heads, payloads and old log-probs; replay decides by columns. So each of the three is checked against its digest, and
the columns are held against the head: a reward, a group or a span's version that rotted would else be trained on, or would keep a
rollout out of its group or a token within the budget. Read only; the learner's lease, its rerun and the audit's come through here.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from replay.baselines import BASELINES, baseline_id
from replay.books import Readable
from replay.orders import damaged
from replay.sampler import Group
from wire.digest import digest
from wire.messages import AnchorHead
from wire.record import ABORTED, RolloutHead, Scored, ScoringPlan, group_id, payload_size, rollout_id

SELECT_ROLLOUTS = ("SELECT r.rollout_id, r.group_id, r.sample, r.response_len, r.oldest_version, r.newest_version, r.reward, r.failure, "
                   "r.state, r.reason, r.head, r.head_digest, r.payload, r.payload_digest "
                   "FROM json_each(?) ids JOIN rollouts r ON r.rollout_id = ids.value ORDER BY ids.key")
SELECT_SPANS = ('SELECT s.rollout_id, s.span, s.version, s.start, s."end", s.kv_clean, s.source, s.weights_digest, s.trainer, s.rows, '
                "s.width, s.row, s.old, s.old_digest, s.anchor_digest "
                "FROM json_each(?) ids JOIN spans s ON s.rollout_id = ids.value ORDER BY ids.key, s.span")
SELECT_BASELINES = ("SELECT e.rollout_id, e.group_id, e.reward, e.head, e.head_digest FROM json_each(?) ids "
                    "JOIN eval_rollouts e ON e.rollout_id = ids.value AND e.eval_id = " f"{BASELINES} ORDER BY ids.key")
_head = msgspec.json.Decoder(RolloutHead)
_json = msgspec.json.Encoder().encode


class Kept(NamedTuple):
    """A rollout as stored; `payload` is None when retention removed it."""

    head: RolloutHead
    payload: bytes | None
    state: str
    reason: str | None


class Anchor(NamedTuple):
    """Old log-probs of a span; `old` is None when retention removed them, b"" where there never were any."""

    head: AnchorHead
    old: bytes | None


# ---------------------------------------------------------------- rollouts
def rollouts_of(db: Readable, ids: Sequence[str]) -> list[Kept]:
    """Those of `ids` that have a row, in this order."""
    found = []
    for *columns, state, reason, text, head_told, payload, told in _rows(db, SELECT_ROLLOUTS, ids):
        rollout = columns[0]
        head = checked_head(rollout, text, head_told)
        if columns != _columns(head):
            raise damaged(f"the row of rollout {rollout} (its group, reward, length or versions)")
        if payload is not None and (not _is(payload, told) or len(payload) != payload_size(head)):
            raise damaged(f"the payload of rollout {rollout}")
        found.append(Kept(head, payload, state, reason))
    return found


def checked_head(rollout: str, text: Any, told: str) -> RolloutHead:
    if not _is(text, told):
        raise damaged(f"the head of rollout {rollout}")
    return _head.decode(text)


def _columns(head: RolloutHead) -> list[Any]:
    """What the row of this head says: id, group, sample, length, oldest and newest version, reward, failure."""
    verdict, spans = head.verdict, head.spans
    judged = (verdict.reward, None) if isinstance(verdict, Scored) else (None, verdict.reason)
    return [head.rollout_id, group_id(head), head.sample, head.response_len, spans[0].version, spans[-1].version, *judged]


def leased_rollouts(db: Readable, groups: Iterable[Group]) -> list[Kept]:
    """The scored rollouts of leased groups, by group and sample, with their payloads. They are looked up by their ids, not by group, state
    or reward: one of these that rotted must not make a group smaller than it was."""
    groups = list(groups)
    found = rollouts_of(db, [rollout_id(group.order_id, group.attempt, sample) for group in groups for sample in range(group.n)])
    for kept in found:
        aborted = getattr(kept.head.verdict, "reason", None) == ABORTED
        if (kept.state, kept.reason) != (("dropped", ABORTED) if aborted else ("leased", None)):
            raise damaged(f"the state of rollout {kept.head.rollout_id}")
    scored = [kept for kept in found if isinstance(kept.head.verdict, Scored)]
    expected = {rollout_id(group.order_id, group.attempt, sample) for group in groups for sample, outcome in group.outcomes.items()
                if outcome == "scored" and sample < group.n}
    if missing := sorted(expected - {kept.head.rollout_id for kept in scored}):
        raise damaged(f"the row of rollout {missing[0]}")
    if gone := [kept for kept in scored if kept.payload is None]:
        raise damaged(f"the payload of rollout {gone[0].head.rollout_id}")
    return scored


# ---------------------------------------------------------------- anchors
def anchors_of(db: Readable, heads: Sequence[RolloutHead]) -> list[Anchor]:
    """What is stored of the spans of these rollouts, in order; spans not scored yet are left out. `heads` have been checked."""
    rows: dict[str, list[tuple[Any, ...]]] = {head.rollout_id: [] for head in heads}
    for rollout, *row in _rows(db, SELECT_SPANS, list(rows)):
        rows[rollout].append(tuple(row))
    found = []
    for head in heads:
        spans = [(index, one.version, one.start, one.end, one.kv_clean) for index, one in enumerate(head.spans)]
        if [row[:5] for row in rows[head.rollout_id]] != spans:
            raise damaged(f"the spans of rollout {head.rollout_id}")
        found += [anchor for row in rows[head.rollout_id] if (anchor := _anchor(head.rollout_id, row)) is not None]
    return found


def _anchor(rollout: str, row: tuple[Any, ...]) -> Anchor | None:
    span, version, start, end, _, source, weights, trainer, count, width, at, old, old_digest, told = row
    if (source, old, old_digest, told) == (None,) * 4:  # not scored yet
        return None
    values = 0 if source == "missing" else end - start
    head = AnchorHead(rollout, span, version, source, weights, trainer, ScoringPlan(count, width, at), values)
    if anchor_digest(head, old_digest) != told:
        raise damaged(f"the anchor of rollout {rollout}, span {span} (its source, weights, trainer, plan or digest)")
    if old is not None and (not _is(old, old_digest) or len(old) != 4 * values):
        raise damaged(f"the old log-probs of rollout {rollout}, span {span},")
    return Anchor(head, b"" if source == "missing" else old)


def anchor_digest(head: AnchorHead, old_digest: str | None) -> str:
    """Of everything said of an anchor, its log-probs through their own digest, which stays when retention removes them."""
    return digest(_json(head), (old_digest or "").encode())


# ---------------------------------------------------------------- greedy baselines
def checked_baselines(db: Readable, groups: Sequence[tuple[str, int]]) -> list[RolloutHead]:
    """Heads of the scored greedy responses (ReMax) of these groups, given as (id, n), in their order; none where there is none."""
    found = []
    for rollout, group, reward, text, told in _rows(db, SELECT_BASELINES, [baseline_id(*one) for one in groups]):
        head = checked_head(rollout, text, told)
        if (head.rollout_id, group_id(head), getattr(head.verdict, "reward", None)) != (rollout, group, reward):
            raise damaged(f"the row of rollout {rollout} (its group or reward)")
        if isinstance(head.verdict, Scored):
            found.append(head)
    return found


def _is(value: Any, told: Any) -> bool:
    """Whether text or bytes have this digest; damage can make SQLite give back another type."""
    data = value.encode() if isinstance(value, str) else value
    return isinstance(data, bytes) and digest(data) == told


def _rows(db: Readable, query: str, ids: Sequence[str]) -> list[tuple[Any, ...]]:
    try:
        return db.execute(query, (_json(ids).decode(),)).fetchall()
    except sqlite3.Error as error:  # a page that is none, a text that is no UTF-8
        raise damaged(f"a row ({error})") from error
