"""When nothing moves: one line that names what the run waits for. Pure but for the log line; every wait in replay has its sentence here."""

import logging

from replay.core import Core
from replay.sampler import MANY_LIVES
from replay.sessions import Session

log = logging.getLogger(__name__)


MOVES = ("put", "baseline_put", "eval_put", "eval_done", "commit", "version", "fork")
"""Ledger rows that bring the run on: outcomes of samples, results, updates, versions. A HELLO, a grant or the end of a lease does not:
whoever joins and dies, again and again, writes those."""


class Watchdog:
    """Nothing moves: none of MOVES for `after_s` seconds. Says so then, and again after twice the time."""

    def __init__(self, core: Core, after_s: float) -> None:
        self._core, self._after_s = core, after_s
        self._moved()

    def _moved(self) -> None:
        self._seq, self._since, self._say_at = self._last(), self._core.now, self._after_s

    def _last(self) -> int:
        """Number of the last row that moved something."""
        return max(self._core.store.last.get(kind, 0) for kind in MOVES)

    def stood_still(self, stop_s: float) -> None:
        """Time that replay itself was away is nobody's wait."""
        self._since += stop_s

    def look(self) -> str | None:
        """The line that was logged, if it was time for one."""
        core = self._core
        if self._last() != self._seq:
            self._moved()
        still = core.now - self._since
        if still < self._say_at:
            return None
        self._say_at *= 2
        line = f"nothing has moved for {still:.0f} s: waiting for {awaited(core)}"
        log.warning(line)
        return line


def awaited(core: Core) -> str:
    """What has to happen next, and from whom."""
    if core.committed < 0:
        return f"the learner's initial weights (it starts, and loads the model and DeepSpeed); {_learner(core)}"
    if core.over:
        return "the actors to leave" if core.finished else f"the learner to finish, all updates are committed; {_learner(core)}"
    if core.evals and (core.training_done or not core.may_train or core.evals[0].actor is not None):
        return _evaluation(core)
    if leased := core.book.in_state("leased"):
        return f"the learner's commit of update {core.next_update} ({len(leased)} groups are leased); {_learner(core)}"
    complete, wanted = len(core.book.in_state("complete")), core.book.groups_per_update
    if complete >= wanted:
        return f"the learner to lease update {core.next_update} ({complete} of {wanted} groups are complete{_full(core)}); {_learner(core)}"
    if holders := _holders(core):
        return f"orders outstanding, {complete} of {wanted} groups are complete: {holders}{_outlived(core)}"
    return f"{_actors(core)}; {complete} of {wanted} groups are complete, none is granted{_full(core)}{_outlived(core)}"


def _evaluation(core: Core) -> str:
    first = core.evals[0]
    answers = f"evaluation {first.eval_id} of version {first.version}, {first.answered} of {first.total} answers are there"
    if first.actor is None:
        return f"{answers}; {_actors(core)}"
    return f"{answers}; actor {first.actor} has it, {_seen(core, core.sessions.find('actor', first.actor))}"


def _holders(core: Core) -> str:
    held: dict[str, int] = {}
    for group in core.book.in_state("granted"):
        held[group.actor] = held.get(group.actor, 0) + 1
    return ", ".join(f"{count} with {name} ({_seen(core, core.sessions.find('actor', name))})" for name, count in sorted(held.items()))


def _outlived(core: Core) -> str:
    """Prompts that one actor after the other left without an answer."""
    lives = [(core.orders[group.group_id], group.outlived) for group in core.book.in_state("granted")]
    lives += [(order, order.outlived) for order in core.queue]
    named = [f"{order.order_id} (prompt {order.prompt_id}) {times} times" for order, times in lives if times >= MANY_LIVES]
    return f"; left without an answer by actors that vanished: {', '.join(named[:3])}" if named else ""


def _actors(core: Core) -> str:
    lease_s = core.config.replay.order_lease_s
    there = [session for session in core.sessions.of("actor") if session.last_seen and core.now - session.last_seen < lease_s]
    if not there:
        return "an actor to join"
    behind = [session for session in there if session.confirmed != core.committed]
    if len(behind) == len(there):
        return f"an actor to load version {core.committed}: " + ", ".join(
            f"{s.name} holds {'none yet, its engine starts' if s.confirmed < 0 else s.confirmed} ({_seen(core, s)})" for s in there)
    return "an actor to ask for orders: " + ", ".join(f"{s.name} ({_seen(core, s)})" for s in there)


def _learner(core: Core) -> str:
    return f"learner {_seen(core, next(iter(core.sessions.of('learner')), None))}"


def _seen(core: Core, session: Session | None) -> str:
    return "not joined" if session is None or not session.last_seen else f"heard of {core.now - session.last_seen:.0f} s ago"


def _full(core: Core) -> str:
    """Whether actors are held back because replay holds all that it may."""
    if not core.full:
        return ""
    return (f", actors are held back at replay.max_rollouts = {core.config.replay.max_rollouts} ({core.kept} are stored with their tokens, "
            f"{core.on_order} on order; retention makes room at a checkpoint)")
