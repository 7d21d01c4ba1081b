"""What actors ask for, but for Put. Each handler changes the core and returns the reply; None parks the call until something changes."""

import logging
import math
from collections.abc import Iterable

from replay.books import PROBE_MEAN
from replay.budget import room
from replay.core import Core, encode
from replay.sessions import Session
from wire.messages import Applied, Baseline, Engine, GiveBack, Note, Ok, Pull, Refusal, Reply, Work
from wire.record import VersionNotice, WorkOrder, fingerprint_id, group_id

log = logging.getLogger(__name__)
LARGEST_VOCABULARY = 1 << 31
"""Token ids are int32."""


def engine(core: Core, session: Session, request: Engine) -> Reply:
    vocabulary = request.fingerprint.vocabulary
    if not 1 <= vocabulary <= LARGEST_VOCABULARY:
        return Refusal("protocol", f"engine {request.id}: a vocabulary of {vocabulary} tokens")
    if request.id != (computed := fingerprint_id(request.fingerprint)):
        return Refusal("protocol", f"engine {request.id}: what it says of itself has the id {computed}")
    store, body = core.begin(), encode(request.fingerprint)
    if (known := store.one("SELECT body FROM fingerprints WHERE id = ?", request.id)) not in (None, body):
        return Refusal("refused", f"engine {request.id}: this id is stored for another engine: {known}")
    core.vocabularies[request.id] = vocabulary
    store.db.execute("INSERT OR IGNORE INTO fingerprints VALUES (?, ?)", (request.id, body))
    store.db.execute("UPDATE actors SET fingerprint = ? WHERE name = ?", (request.id, session.name))
    store.record("engine", {"actor": session.name, "fingerprint": request.id})
    mean = store.meta(PROBE_MEAN.format(request.id))
    return Baseline(None if mean is None else float(mean))


def applied(core: Core, session: Session, request: Applied) -> Reply:
    notice = core.versions.get(request.version)
    if notice is None:
        return Refusal("again", f"version {request.version} was never committed, or was given up")
    if notice.weights_digest != request.weights_digest:
        return Refusal("protocol", f"version {request.version}: the digest that was loaded is not the committed one")
    if not 0 <= request.probe_mean < math.inf:
        return Refusal("protocol", f"version {request.version}: the probe differs by {request.probe_mean}")
    store = core.begin()
    session.applied.add(request.version)
    session.confirmed, session.probe = request.version, (request.probe_mean, request.probe_max)
    store.db.execute("UPDATE actors SET confirmed = ?, probe_mean = ?, probe_max = ? WHERE name = ?",
                     (request.version, request.probe_mean, request.probe_max, session.name))
    of = store.one("SELECT fingerprint FROM actors WHERE name = ?", session.name)
    if of is not None and store.meta(PROBE_MEAN.format(of)) is None:
        store.set_meta(PROBE_MEAN.format(of), repr(request.probe_mean))
    store.record("applied", {"actor": session.name, "version": request.version,
                             "probe_mean": request.probe_mean, "probe_max": request.probe_max})
    return Ok()


def give_back(core: Core, session: Session, request: GiveBack) -> Reply:
    if transitions := core.book.give_back(request.group_ids, session.name):
        core.apply("give_back", transitions, actor=session.name, why=request.reason)
    for current in core.evals:
        if current.actor == session.name:
            core.eval_orders_back(current, current.put_back(request.group_ids), request.reason)
    return Ok()


def note(core: Core, session: Session, request: Note) -> Reply:
    log.warning("%s %s: %s: %s", session.role, session.name, request.kind, request.detail)
    core.begin().record("note", {"process": session.name, "kind": request.kind, "detail": request.detail})
    return Ok()


# ---------------------------------------------------------------- pull
def pull_arrived(core: Core, session: Session, request: Pull) -> None:
    """The heartbeat in a Pull: what it holds is alive; what it was sent and dropped without a word will outlive its lease."""
    core.book.touch(request.holding, session.name, core.now)
    for current in core.evals:
        current.touch(request.holding, session.name, core.now)
    session.delivered.update(request.holding)
    session.confirmed = request.confirmed if request.confirmed in session.applied else -1


def pull(core: Core, session: Session, request: Pull, *, last_chance: bool) -> Reply | None:
    if core.over:
        session.told_done = True
        return Work([], None, True)
    orders = evals = _eval_orders(core, session, request.want)
    if not evals and not _holds_eval(core, session):
        orders = _again(core, session, request.want) or _train_orders(core, session, request)
    notice = _notice(core, session, request, evals)
    if not orders and not last_chance and (notice is None or notice.version == session.noticed):
        return None
    if notice is not None:
        session.noticed = notice.version
    session.delivered.update(map(group_id, orders))
    return Work(orders, notice, False)


def _train_orders(core: Core, session: Session, request: Pull) -> list[WorkOrder]:
    """New grants, within the staleness budget, what may be stored, and what the rest of the run can use."""
    if not core.may_train or session.confirmed not in core.versions:
        return []
    settings = core.config
    useful = (settings.learner.updates - core.stepped) * settings.learner.groups_per_update - core.book.live
    count = min(core.book.allowance(core.committed, session.confirmed), useful, request.want)
    if count <= 0:
        return []
    fits = room(kept=core.kept, on_order=core.on_order, n=settings.sampling.n, live=core.book.live,
                max_rollouts=settings.replay.max_rollouts, groups_per_update=settings.learner.groups_per_update)
    if fits < count:
        core.tell_full()
    return core.grant(min(count, fits), session.name) if fits > 0 else []


def _again(core: Core, session: Session, want: int) -> list[WorkOrder]:
    """Orders that are this actor's, of which this life of it does not know: a reply got lost, it restarted, or replay did."""
    mine = [group.group_id for group in core.book.in_state("granted") if group.actor == session.name]
    lost = [group_id for group_id in mine if group_id not in session.delivered][:want]
    core.book.touch(lost, session.name, core.now)
    groups = [core.book.groups[of] for of in lost]
    for group in groups:
        group.outlived += 1
    core.tell_outlived(groups)
    return [core.orders[group_id] for group_id in lost]


def _eval_orders(core: Core, session: Session, want: int) -> list[WorkOrder]:
    """Orders of the first evaluation that is not done, if it is this actor's or nobody's."""
    if not core.evals or want < 1:
        return []
    current = core.evals[0]
    if current.actor == session.name and (lost := [g for g in current.held() if g not in session.delivered][:want]):
        current.touch(lost, session.name, core.now)
        return [current.groups[group_id].order for group_id in lost]
    if taken := current.take(session.name, want, core.now):
        store = core.begin()
        store.db.executemany("UPDATE groups SET state = 'granted', actor = ? WHERE group_id = ?", [(session.name, g) for g in taken])
        store.record("grant", {"actor": session.name, "eval": current.eval_id, "groups": taken})
    return [current.groups[group_id].order for group_id in taken]


def _holds_eval(core: Core, session: Session) -> bool:
    return bool(core.evals) and core.evals[0].actor == session.name


def _notice(core: Core, session: Session, request: Pull, evals: Iterable[WorkOrder]) -> VersionNotice | None:
    """The version that the orders want; without orders the newest, unless an evaluation keeps this actor at its own: then that of the
    evaluation, if it has none."""
    if _holds_eval(core, session):
        wanted = request.confirmed if request.confirmed in core.versions and not evals else core.evals[0].version
    else:
        wanted = core.committed
    return core.versions.get(wanted) if wanted != request.confirmed else None
