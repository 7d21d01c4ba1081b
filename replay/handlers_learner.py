"""What the learner asks for: initial weights, anchors, leases, checkpoints, the fork back to one. Commits are in `replay/commit.py`."""

import logging
from collections.abc import Iterable

import msgspec
import numpy as np

from replay.core import Core
from replay.orders import damaged
from replay.rebuild import evaluated
from replay.recall import check_way, recall, updates_since
from replay.sampler import Group, Transition
from replay.sessions import Session
from replay.sound import anchor_digest, anchors_of, checked_baselines, leased_rollouts, rollouts_of
from replay.weight_files import place
from wire.digest import digest
from wire.errors import RunError
from wire.messages import (
    Checkpointed,
    Done,
    Finished,
    Fork,
    Initial,
    Lease,
    Leased,
    NotYet,
    Ok,
    PutAnchors,
    Recall,
    Refusal,
    Reply,
    Rows,
    Unscored,
)
from wire.record import F32, VersionNotice

log = logging.getLogger(__name__)
EXACT = ("resident", "snapshot")
NEWEST = ("SELECT group_id, max(newest) FROM ("
          "SELECT group_id, newest_version AS newest FROM rollouts WHERE state IN ('buffered', 'leased') "
          "UNION ALL SELECT g.group_id, json_extract(e.head, '$.spans[#-1][0]') FROM groups g JOIN eval_rollouts e "
          "ON e.rollout_id = g.group_id || '.' || g.n WHERE g.state IN ('granted', 'complete', 'leased') AND g.purpose = 'train') "
          "GROUP BY group_id")
"""The newest version of any token of a live group, its greedy baseline's included."""
SET_ANCHOR = ('UPDATE spans SET source = ?, weights_digest = ?, trainer = ?, rows = ?, width = ?, row = ?, old = ?, old_digest = ?, '
              'anchor_digest = ? WHERE rollout_id = ? AND span = ? AND version = ? AND source IS NULL AND (? = 0 OR "end" - start = ?)')


# ---------------------------------------------------------------- versions
def add_version(core: Core, notice: VersionNotice, parent: int | None, update: int | None) -> None:
    core.store.db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, 'live', 1, ?)", (
        notice.version, parent, update, notice.path, notice.manifest_digest, notice.weights_digest, core.clock.wall()))
    core.versions[notice.version] = notice
    core.committed, core.next_version = notice.version, notice.version + 1


def initial(core: Core, session: Session, request: Initial) -> Reply:
    if core.versions.get(0) == request.notice:
        return Ok()
    if core.next_version or request.notice.version != 0:
        return Refusal("again", f"this run already has version {core.committed}")
    if refusal := place(core, session, request.notice):
        return refusal
    store = core.begin()
    add_version(core, request.notice, None, None)
    store.record("version", {"notice": msgspec.to_builtins(request.notice)})
    core.plan_evaluation()
    return Ok()


def checkpointed(core: Core, session: Session, request: Checkpointed) -> Reply:
    if request.version not in core.versions:
        return Refusal("again", f"version {request.version} was never committed, or was given up")
    store = core.begin()
    update = store.one("SELECT max(update_id) FROM updates WHERE state = 'committed' AND version_in < ?", request.version)
    row = (request.version, update, request.path, request.manifest_digest)
    if (*row, "complete") in store.rows("SELECT * FROM checkpoints WHERE version = ?", request.version):
        return Ok()
    store.db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, 'complete')", row)
    store.record("checkpoint", {"version": request.version, "update": update, "path": request.path, "manifest": request.manifest_digest})
    core.retention_due = True
    return Ok()


def recalled(core: Core, session: Session, request: Recall) -> Reply | tuple[Reply, bytes]:
    """The next update that a learner that went back to a checkpoint has to run again. Only what retention removed may be missing; all
    else that is not as it was ends replay: a learner that is refused forks, and a disk's fault must not look like another kernel's."""
    if request.version in core.versions:
        check_way(core.store.db, request.version, core.versions[core.committed])
    update = next((one for one in updates_since(core.store.db, request.version) if one > request.after), None)
    if update is None:
        return Ok()
    try:
        return recall(core.store.db, update)
    except RunError as error:
        reached = core.store.one("SELECT max(json_extract(body, '$.update')) FROM ledger WHERE kind = 'retention'")
        if update > (reached or 0):
            raise damaged(f"update {update}: a payload or old log-probs, which no retention removed,") from error
        return Refusal("refused", str(error))


def fork(core: Core, session: Session, request: Fork) -> Reply:
    """Updates after the checkpoint are lost; so are their versions, and what was sampled from them. No prompt is skipped: each one
    concerned is asked again, as a new attempt."""
    forked = core.store.one("SELECT 1 FROM versions WHERE version = ? AND parent = ? AND update_id IS NULL AND state = 'live'",
                            request.notice.version, request.checkpoint)
    if forked and core.versions[request.notice.version] == request.notice:
        return Ok()
    complete = core.store.one("SELECT 1 FROM checkpoints WHERE version = ? AND state = 'complete'", request.checkpoint)
    if request.checkpoint not in core.versions or request.checkpoint and not complete or request.notice.version != core.next_version:
        return Refusal("again", f"a fork from version {request.checkpoint} to {request.notice.version}: there must be a complete "
                                f"checkpoint of it, and the new version is number {core.next_version}")
    if refusal := place(core, session, request.notice):
        return refusal
    store = core.begin()
    after = store.one("SELECT update_id FROM checkpoints WHERE version = ? AND state = 'complete'", request.checkpoint) or 0
    newest = dict(store.rows(NEWEST))
    transitions = _lost(core, after) + core.book.fork(request.checkpoint, newest)
    lost = [update for update, in store.rows("SELECT update_id FROM updates WHERE update_id > ? AND state = 'committed'", after)]
    orphaned = [version for version in core.versions if version > request.checkpoint]
    store.db.execute("UPDATE updates SET state = 'lost' WHERE update_id > ?", (after,))
    store.db.execute("UPDATE versions SET state = 'orphaned' WHERE version > ?", (request.checkpoint,))
    store.db.execute("UPDATE checkpoints SET state = 'orphaned' WHERE version > ? AND state = 'complete'", (request.checkpoint,))
    for version in orphaned:
        del core.versions[version]
    _forget_evaluations(core, request.checkpoint)
    add_version(core, request.notice, request.checkpoint, None)
    core.apply("fork", transitions, checkpoint=request.checkpoint, notice=msgspec.to_builtins(request.notice),
               updates=lost, versions=orphaned)
    counts = dict(store.rows("SELECT skipped, count(*) FROM updates WHERE state = 'committed' GROUP BY skipped"))
    core.stepped, core.skipped = counts.get(0, 0), counts.get(1, 0)
    core.read_last_metrics()
    core.plan_evaluation()
    log.warning("the learner went back to version %d: %d updates are lost, version %d goes on from there", request.checkpoint, len(lost),
                request.notice.version)
    return Ok()


def _lost(core: Core, after: int) -> list[Transition]:
    rows = core.store.rows("SELECT group_id, order_id, attempt, n, oldest_version FROM groups WHERE state = 'trained' AND update_id > ? "
                           "ORDER BY grant_seq", after)
    return [Transition(Group(group_id, order_id, attempt, n, oldest_version=oldest, excused=attempt), "lost", "fork", requeue=True)
            for group_id, order_id, attempt, n, oldest in rows]


def _forget_evaluations(core: Core, checkpoint: int) -> None:
    store = core.store
    store.db.execute("UPDATE groups SET state = 'dropped', reason = 'orphaned' WHERE state IN ('queued', 'granted') AND eval_id IN "
                     "(SELECT eval_id FROM evals WHERE version > ? AND state = 'pending')", (checkpoint,))
    store.db.execute("UPDATE evals SET state = 'lost' WHERE version > ? AND state = 'pending'", (checkpoint,))
    core.evals = [current for current in core.evals if current.version <= checkpoint]
    core.evaluated = evaluated(core)


# ---------------------------------------------------------------- anchors
def unscored(core: Core, session: Session, request: Unscored) -> tuple[Reply, bytes]:
    ids = [rollout for rollout, in core.store.rows(
        "SELECT rollout_id FROM rollouts WHERE rollout_id IN (SELECT rollout_id FROM spans WHERE version = ? AND source IS NULL) "
        "AND state IN ('buffered', 'leased') AND reward IS NOT NULL ORDER BY rowid LIMIT ?", request.version, max(0, request.limit))]
    rows = rollouts_of(core.store.db, ids)
    heads = [kept.head for kept in rows]
    anchors_of(core.store.db, heads)  # their spans are those of the heads
    return Rows(heads), b"".join(kept.payload or b"" for kept in rows)


def put_anchors(core: Core, session: Session, request: PutAnchors, bulk: bytes) -> Reply:
    """Every span once; what comes a second time, or fits no span, is refused and counted."""
    values = np.frombuffer(bulk, F32)
    if not np.isfinite(values).all():
        return Refusal("protocol", "an old log-prob is not finite")
    for head in request.heads:
        notice = core.versions.get(head.version)
        if notice is None or head.source in EXACT and head.weights_digest != notice.weights_digest:
            return Refusal("protocol", f"{head.rollout_id} span {head.span}: scored with weights that are not version {head.version}")
        if (head.count == 0) != (head.source == "missing"):
            return Refusal("protocol", f"{head.rollout_id} span {head.span}: {head.count} log-probs with source {head.source}")
    store, start = core.begin(), 0
    stored: dict[str, str] = {}
    for head in request.heads:
        old, start = bulk[4 * start:4 * (start + head.count)], start + head.count
        old_digest = digest(old) if old else None
        told = anchor_digest(head, old_digest)
        cursor = store.db.execute(SET_ANCHOR, (
            head.source, head.weights_digest, head.trainer, head.plan.rows, head.plan.width, head.plan.row, old or None, old_digest,
            told, head.rollout_id, head.span, head.version, head.count, head.count))
        if cursor.rowcount:
            stored[f"{head.rollout_id}/{head.span}"] = told
    store.count("anchors_refused", len(request.heads) - len(stored))
    store.wrote(len(bulk))
    if stored:
        store.record("anchors", {"spans": stored})
    return Ok()


# ---------------------------------------------------------------- leases
def lease(core: Core, session: Session, request: Lease, *, last_chance: bool) -> Reply | tuple[Reply, bytes] | None:
    if core.training_done:
        return Done()
    if request.version != core.committed:
        return Refusal("again", f"an update from version {request.version}, but version {core.committed} is committed")
    groups = core.book.in_state("leased")
    if not groups:
        groups, transitions = core.book.lease(core.committed)
        core.apply("groups", [t for t in transitions if t.to != "leased"])
        core.apply("lease", [t for t in transitions if t.to == "leased"], update=core.next_update)
    if not groups:
        return NotYet(awaited(core)) if last_chance else None
    core.update_times.open(core.clock.wall())
    return leased(core, groups)


def leased(core: Core, groups: Iterable[Group]) -> tuple[Reply, bytes]:
    db, groups = core.store.db, list(groups)
    rows = leased_rollouts(db, groups)
    heads = [kept.head for kept in rows]
    anchors = anchors_of(db, heads)
    if gone := [anchor.head for anchor in anchors if anchor.old is None]:
        raise damaged(f"the old log-probs of rollout {gone[0].rollout_id}, span {gone[0].span},")
    wanted = [(group.group_id, group.n) for group in groups if group.baseline]
    if len(baselines := checked_baselines(db, wanted)) != len(wanted):
        raise damaged(f"a greedy response of the groups {', '.join(group for group, _ in wanted[:20])}")
    reply = Leased(core.next_update, [group.group_id for group in groups], heads, [anchor.head for anchor in anchors], baselines)
    return reply, b"".join([*(kept.payload or b"" for kept in rows), *(anchor.old or b"" for anchor in anchors)])


def awaited(core: Core) -> str:
    """What the learner waits for, for people."""
    actors = [session for session in core.sessions.of("actor") if core.now - session.last_seen < core.config.replay.order_lease_s]
    if core.committed < 0:
        return "the initial weights"
    if not core.may_train:
        first = core.evals[0]
        return f"first evaluation: {first.answered} of {first.total} answers" + ("" if actors else "; no actor connected")
    complete, granted = len(core.book.in_state("complete")), core.book.in_state("granted")
    generating = len({group.actor for group in granted})
    who = f"{generating} actor{'' if generating == 1 else 's'} generating" if actors else "no actor connected"
    return f"{complete} of {core.book.groups_per_update} groups complete; {who}"


def finished(core: Core, session: Session, request: Finished) -> Reply:
    store = core.begin()
    core.finished = True
    store.set_meta("finished", "1")
    store.record("finished", {"learner": session.name, "seconds": request.seconds})
    return Ok()
