"""The replay daemon's loop: take what arrived, let time act, answer who waits, commit, and only then send the replies."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from replay import retention
from replay.backlog import Backlog
from replay.core import Core
from replay.handlers import Call, arrive, handle
from replay.memory import MemoryWatch
from replay.metrics import MetricsFile
from replay.watchdog import Watchdog
from wire.codec import REQUEST, decode, encode
from wire.errors import ProtocolError, RunError
from wire.messages import Lease, Pull, Refusal, Reply
from wire.sockets import Router

log = logging.getLogger(__name__)
TICK_S = 0.25
STALL = 0.25
"""Share of an order's lease: a stop of replay of at most this long ends nobody's, as an actor is heard of at each third of it."""
BURST = 64
"""Messages taken before the others get their turn."""
GONE_S = 15.0
"""An actor that has been silent this long at the end of the run is not waited for."""
FAREWELL_S = 2.0
"""A process that was told that the run is over may still have a call under way, and waits for its answer: what it has not read goes with
the connection."""
LATE_LEARNER_S = 120.0
"""How long the replay of a run that had already finished waits for a learner that may have been started with it."""


class Answered(NamedTuple):
    """A reply that waits for the commit. `account`: whom its bulk is put on."""

    peer: bytes
    seq: int
    reply: Reply
    bulk: bytes = b""
    account: str = ""


class Daemon:
    def __init__(self, core: Core, router: Router, crash_point: Callable[[str], None] = lambda name: None) -> None:
        self.core, self.router, self.crash_point = core, router, crash_point
        self.metrics = MetricsFile(core.run_dir)
        self.watchdog = Watchdog(core, core.config.logging.watchdog_s)
        self.memory = MemoryWatch()
        self.parked: list[Call] = []
        self.replies: deque[Answered] = deque()
        self.backlog = Backlog(core, self.under_way)
        self._ticked = self._expired = 0.0
        self._started = self._looked = core.now

    async def run(self) -> None:
        """Returns when the run is over and everyone knows. Raises StoreError on the first failed write, RunError when the run cannot
        go on."""
        self.metrics.recover(self.core.store)
        retention.sweep(self.core.store.db, self.core.run_dir)
        try:
            while not self.may_end():
                await self.router.wait(self.wait_s())
                self.step()
        except RunError as error:
            await self.say_goodbye(str(error))
            raise
        finally:
            self.router.close()

    def step(self) -> None:
        """One turn of the loop."""
        self.look_at_clock()
        drained = self.take_messages()
        self.let_time_act(drained)
        self.answer_parked()
        self.answer_backlog()
        self.commit_if_due(drained)

    # ------------------------------------------------------------ steps
    def wait_s(self) -> float:
        deadlines = [call.deadline - self.core.now for call in self.parked]
        if (due := self.core.store.due_in(self.core.now)) is not None:
            deadlines.append(due)
        if (look := self.backlog.look_in_s()) is not None:
            deadlines.append(look)
        return max(0.0, min([TICK_S, *deadlines]))

    def look_at_clock(self) -> float:
        """The time. When replay itself stood still (it was stopped, or a write took long), the time that others had is without the stop:
        they may have waited for replay all the while."""
        before, self._looked = self._looked, self.core.now
        if (stop := self._looked - before) > TICK_S + STALL * self.core.config.replay.order_lease_s:
            self.core.stood_still(stop)
            self.watchdog.stood_still(stop)
        return self._looked

    def take_messages(self) -> bool:
        """Whether all that had arrived was taken. What comes while a commit is due waits for it, and is on its way meanwhile."""
        for _ in range(BURST):
            if self.core.store.due_in(self.core.now) == 0.0:
                return False
            if (received := self.router.receive()) is None:
                return True
            try:
                seq, request, bulk = decode(received.frames, REQUEST)
            except ProtocolError as error:
                self.refuse_unread(received.peer, error)
                continue
            call = arrive(self.core, received.peer, seq, request, bulk, received.who)
            self.parked = [before for before in self.parked if not _replaced(before, call)]
            if isinstance(waits := self.backlog.take(call), Refusal):
                self.replies.append(Answered(call.peer, call.seq, waits))
            elif not waits:
                self.answer(call, parked=False)
        return False

    def refuse_unread(self, peer: bytes, error: ProtocolError) -> None:
        self.core.begin().count("messages_refused")
        log.warning("a message was refused: %s", error)
        if error.seq is not None and error.seq >= 0:
            self.replies.append(Answered(peer, error.seq, Refusal("protocol", str(error))))

    def answer(self, call: Call, *, parked: bool) -> bool:
        try:
            answer = handle(self.core, call, parked=parked)
        except RunError as error:
            self.replies.append(Answered(call.peer, call.seq, Refusal("refused", str(error))))
            raise
        if answer is None:
            if not parked:
                self.parked.append(call)
            return False
        reply, bulk = answer if isinstance(answer, tuple) else (answer, b"")
        self.replies.append(Answered(call.peer, call.seq, reply, bulk, self.backlog.account(call)))
        return True

    def under_way(self, account: str) -> int:
        """Bytes for this account that are still in this process."""
        return self.router.under_way(account) + sum(len(one.bulk) for one in self.replies if one.account == account)

    def let_time_act(self, drained: bool) -> None:
        """A lease ends only when all that had arrived was taken: a sign of life may be among it."""
        if drained and (now := self.look_at_clock()) - self._expired >= TICK_S:
            self._expired = now
            self.core.expire_orders(now)
        if (now := self.core.now) - self._ticked >= TICK_S:
            self._ticked = now
            if strangers := self.router.strangers():
                self.core.begin().count("strangers_refused", strangers)
                log.warning("%d handshakes or messages refused: somebody without a key on the list, or without ours", strangers)
            if grown := self.memory.look():
                self.core.begin().count("memory_warnings")
                log.warning(grown)
            self.watchdog.look()

    def answer_parked(self) -> None:
        self.parked = [call for call in self.parked if not self.answer(call, parked=True)]

    def answer_backlog(self) -> None:
        while (call := self.backlog.next()) is not None:
            self.answer(call, parked=False)

    def commit_if_due(self, drained: bool) -> None:
        """Replies never leave while something is uncommitted: what they say must be on disk first. While messages keep coming they share a
        commit, for a few milliseconds at most; when none is left, waiting longer would only make the senders wait."""
        store = self.core.store
        due = store.due_in(self.core.now)
        if due is not None and due > 0 and not drained:
            return
        if due is not None:
            self.core.keep_house_before_commit()
            self.crash_point("before_commit")
            store.commit()
            self.crash_point("after_commit")
            self.after_commit()
        self.send_replies()

    def after_commit(self) -> None:
        if self.core.metrics_due:
            self.metrics.append(self.core.metrics_due)
            self.core.metrics_due.clear()
        if self.core.sweep_due:
            self.core.sweep_due = False
            retention.sweep(self.core.store.db, self.core.run_dir)

    def send_replies(self) -> None:
        while self.replies:  # each is let go as it is sent: it may be large
            one = self.replies.popleft()
            if not self.router.send(one.peer, encode(one.seq, one.reply, one.bulk), one.account):
                log.debug("a reply found nobody: the peer reconnected or is gone, and will ask again")
        self.crash_point("after_replies")

    # ------------------------------------------------------------ the end
    def may_end(self) -> bool:
        """The learner has finished and had time to hear so, no evaluation is open, and every actor that is still there was told."""
        core = self.core
        if not (core.finished and core.over) or core.store.pending or self.replies:
            return False
        if core.now - self._started < LATE_LEARNER_S and not any(session.last_seen for session in core.sessions.of("learner")):
            return False
        if any(core.now - session.last_seen <= FAREWELL_S for session in core.sessions.of("learner")):
            return False
        return all(core.now - session.last_seen > (FAREWELL_S if session.told_done else GONE_S) for session in core.sessions.of("actor"))

    def close(self) -> None:
        """Commit what is open: it is sound, even if nobody will hear of it."""
        self.core.store.commit()
        self.after_commit()
        self.core.store.close()

    async def say_goodbye(self, reason: str) -> None:
        """The run cannot go on: whoever waits, or asks within a few seconds, is told why. The socket stays open as long, as what was sent
        to a peer and not read by it goes with the connection."""
        self.core.store.commit()
        self.replies += [Answered(call.peer, call.seq, Refusal("refused", reason)) for call in self.parked + self.backlog.give_up()]
        self.parked.clear()
        self.send_replies()
        loop = asyncio.get_running_loop()
        end = loop.time() + FAREWELL_S
        while loop.time() < end:
            await self.router.wait(TICK_S)
            while received := self.router.receive():
                try:
                    seq, _, _ = decode(received.frames, REQUEST)
                except ProtocolError as error:
                    self.refuse_unread(received.peer, error)
                else:
                    self.replies.append(Answered(received.peer, seq, Refusal("refused", reason)))
            self.send_replies()
        await asyncio.sleep(TICK_S)


def _replaced(before: Call, call: Call) -> bool:
    """A process waits in one Pull or Lease at a time: a new or repeated one takes the place of the old."""
    one, other = before.request, call.request
    return isinstance(one, Pull | Lease) and isinstance(other, Pull | Lease) and (one.epoch, before.who) == (other.epoch, call.who)
