"""Requests for large answers wait while what was sent to their process before has not left: who does not read costs little memory.

The bound is on what is under way to one *account*: a key, or without keys a process's name. So it holds over all the connections of a
key. It is looked at before the answer is made; one answer may go beyond it, as the largest lease has to go in one.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from replay.core import Core
from replay.handlers import Call
from wire.messages import Fetch, Lease, Recall, Refusal, Unscored

LARGE = (Fetch, Unscored, Lease, Recall)
MOST_BYTES = 32 << 20
"""Under way to one account: eight chunks of weights; an actor asks for four at once."""
MOST_WAITING = 64
"""Requests of one process that wait: many may have the same key. More is not how Leeway's own ask: the rest is refused."""
LOOK_EVERY_S = 0.02


class Backlog:
    """`under_way(account)`: bytes sent to it, or about to be, that have not left this process."""

    def __init__(self, core: Core, under_way: Callable[[str], int]) -> None:
        self._core, self._under_way = core, under_way
        self._waiting: dict[str, deque[Call]] = defaultdict(deque)

    def account(self, call: Call) -> str:
        """Whose answer this is; "" when it is not large, or its sender is nobody: then it is small."""
        session = self._core.sessions.get(_epoch(call)) if isinstance(call.request, LARGE) else None
        return "" if session is None else call.who.name if call.who else session.name

    def take(self, call: Call) -> bool | Refusal:
        """True when it waits now; False when it may be answered."""
        account = self.account(call)
        if not account or account not in self._waiting and self._under_way(account) < MOST_BYTES:
            return False
        waiting = self._waiting[account]
        if any((before.peer, before.seq) == (call.peer, call.seq) for before in waiting):
            return True  # it was sent again
        if sum(_epoch(before) == _epoch(call) for before in waiting) >= MOST_WAITING:
            return Refusal("protocol", f"{MOST_WAITING} requests of {account!r} wait for it to read what it was sent before: this one is "
                                       "not answered")
        waiting.append(call)
        return True

    def next(self) -> Call | None:
        """One that waits no more. Its answer counts before the next one is looked for."""
        for account, waiting in self._waiting.items():
            if self._under_way(account) < MOST_BYTES:
                call = waiting.popleft()
                if not waiting:
                    del self._waiting[account]
                return call
        return None

    def look_in_s(self) -> float | None:
        return LOOK_EVERY_S if self._waiting else None

    def give_up(self) -> list[Call]:
        """All that wait: the run ends."""
        calls = [call for waiting in self._waiting.values() for call in waiting]
        self._waiting.clear()
        return calls


def _epoch(call: Call) -> int:
    return getattr(call.request, "epoch", -1)
