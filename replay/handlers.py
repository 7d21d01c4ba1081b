"""Which message goes to which handler, and who may send it. Also what everyone may ask: HELLO and Stats."""

import logging
from typing import Any, NamedTuple

from replay import handlers_actor, handlers_learner, weight_files
from replay.commit import commit
from replay.core import Core
from replay.live import live_values
from replay.put import put
from replay.sessions import NAME, ROLES, ROLES_OF_KEY, Session, difference, proved_name
from wire.keys import Known
from wire.messages import (
    PROTOCOL,
    AnyMessage,
    Applied,
    Checkpointed,
    Commit,
    Engine,
    Fetch,
    Finished,
    Fork,
    GiveBack,
    Hello,
    Initial,
    Lease,
    Note,
    Pull,
    Put,
    PutAnchors,
    Recall,
    Refusal,
    Reply,
    Stats,
    StatsReply,
    Unscored,
    Welcome,
    Work,
)

log = logging.getLogger(__name__)
LONGEST_WAIT_S = 30.0

BY_ACTORS: dict[type, Any] = {Engine: handlers_actor.engine, Applied: handlers_actor.applied, GiveBack: handlers_actor.give_back,
                              Fetch: weight_files.fetch}
BY_LEARNER: dict[type, Any] = {Initial: handlers_learner.initial, Checkpointed: handlers_learner.checkpointed, Fork: handlers_learner.fork,
                               Unscored: handlers_learner.unscored, Recall: handlers_learner.recalled,
                               Finished: handlers_learner.finished}
WITH_BULK: dict[type, Any] = {Put: put, PutAnchors: handlers_learner.put_anchors, Commit: commit}
WAITING: dict[type, Any] = {Pull: handlers_actor.pull, Lease: handlers_learner.lease}
ROLE_OF: dict[type, str] = {**dict.fromkeys((*BY_ACTORS, Put, Pull), "actor"),
                            **dict.fromkeys((*BY_LEARNER, PutAnchors, Commit, Lease), "learner")}


class Call(NamedTuple):
    """One request. `arrived` and `deadline` are monotonic; `deadline` is for requests that may wait. `who` is whose key it came with, None
    when replay has no keys."""

    peer: bytes
    seq: int
    request: AnyMessage
    bulk: bytes
    arrived: float
    deadline: float
    who: Known | None = None


Answer = Reply | tuple[Reply, bytes] | None


def arrive(core: Core, peer: bytes, seq: int, request: AnyMessage, bulk: bytes, who: Known | None = None) -> Call:
    wait_s = min(max(0.0, getattr(request, "wait_s", 0.0)), LONGEST_WAIT_S, core.config.replay.order_lease_s / 3)
    return Call(peer, seq, request, bulk, core.now, core.now + wait_s, who)


def handle(core: Core, call: Call, *, parked: bool = False) -> Answer:
    """The reply, with its bulk if it has one; None when the call waits for something to change."""
    request = call.request
    match request:
        case Hello():
            return hello(core, call.seq, request, call.who)
        case Stats():
            return StatsReply(live_values(core))
    session = core.sessions.get(getattr(request, "epoch", -1))
    if session is None or session.key != (call.who.name if call.who else ""):  # an epoch is no secret: it counts with its key alone
        return Refusal("again", f"{type(request).__name__}: this process was replaced by a later one of its name, or never said HELLO")
    session.last_seen = core.now
    if session.stopped is not None:
        return Refusal("refused", session.stopped)
    kind = type(request)
    if isinstance(request, Note):
        return handlers_actor.note(core, session, request)
    if ROLE_OF.get(kind) != session.role:
        return Refusal("protocol", f"{kind.__name__} is not for a process of role {session.role}")
    if kind in WITH_BULK:
        return WITH_BULK[kind](core, session, request, call.bulk)
    if kind in WAITING:
        return _waiting(core, session, call, parked=parked)
    return (BY_ACTORS.get(kind) or BY_LEARNER[kind])(core, session, request)


def _waiting(core: Core, session: Session, call: Call, *, parked: bool) -> Answer:
    """Pull and Lease answer when they can, at the latest at their deadline."""
    last_chance = core.now >= call.deadline
    if isinstance(call.request, Lease):
        return handlers_learner.lease(core, session, call.request, last_chance=last_chance)
    assert isinstance(call.request, Pull)
    if session.last_work is not None and session.last_work[0] == call.seq:
        return session.last_work[1]
    if not parked:
        handlers_actor.pull_arrived(core, session, call.request)
    work = handlers_actor.pull(core, session, call.request, last_chance=last_chance)
    if isinstance(work, Work):
        session.last_work = (call.seq, work)
        if call.request.want and not call.request.holding:
            session.idle_s += core.now - call.arrived
    return work


def hello(core: Core, seq: int, request: Hello, who: Known | None) -> Reply:
    if request.protocol != PROTOCOL:
        return Refusal("refused", f"protocol {request.protocol} there, {PROTOCOL} here: use one version of Leeway")
    if request.role not in ROLES or not NAME.fullmatch(request.name):
        return Refusal("refused", f"role {request.role!r} with name {request.name[:80]!r}: a role is one of {', '.join(ROLES)}, "
                                  "a name 1 to 64 of letters, digits, . _ -")
    if who and request.role not in ROLES_OF_KEY[who.role]:
        return Refusal("refused", f"the key {who.name!r} is for role {who.role}, not {request.role}")
    if request.role != "tool" and (keys := difference(core.config.shared(), request.shared)):
        return Refusal("refused", f"another config than this run's: {keys}")
    name, key = proved_name(request.name, who), who.name if who else ""
    before, fresh = core.sessions.find(request.role, name), core.sessions.next_epoch
    session = core.sessions.open(request.role, name, seq, core.now, key)
    if session.epoch == fresh and request.role != "tool":
        if request.role == "learner":
            _new_learner(core, before)
        _write_session(core, session)
    return Welcome(session.epoch, str(core.run_dir.resolve()), core.versions.get(core.committed), core.stepped, core.run_id)


def _new_learner(core: Core, before: Session | None) -> None:
    """An update that its predecessor had begun ended with its last sign of life; it says itself when it has finished."""
    core.update_times.close(core.clock.wall() - max(0.0, core.now - before.last_seen) if before else core.clock.wall())
    core.finished = False


def _write_session(core: Core, session: Session) -> None:
    store = core.begin()
    core.save_sessions()
    if session.role == "actor":
        store.db.execute("INSERT INTO actors VALUES (?, ?, -1, NULL, NULL, NULL) ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch, "
                         "confirmed = -1, probe_mean = NULL, probe_max = NULL", (session.name, session.epoch))
    store.record("hello", {"role": session.role, "name": session.name, "epoch": session.epoch}
                 | ({"key": session.key} if session.key else {}))
    log.info("%s %s joined (epoch %d)", session.role, session.name, session.epoch)
