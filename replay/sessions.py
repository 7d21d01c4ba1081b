"""Who talks to replay. An epoch names one life of one process; a later HELLO of the same role and name makes it obsolete."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wire.keys import Known
from wire.messages import Work

ROLES = ("actor", "learner", "rank", "tool")
ROLES_OF_KEY = {"actor": ("actor", "tool"), "learner": ("learner", "rank", "tool")}
"""What the owner of a key may join as."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass
class Session:
    """`last_seen` is monotonic. `applied`: versions that its engine proved; `confirmed`: the one it holds now (-1: none).
    `delivered`: orders that this life of the process was sent; others granted to its name are sent again. `last_work`: number and answer
    of its last Pull, for a repeated request. `noticed`: the version it was last told of. `key`: whose key it joined with, "" when
    there are no keys."""

    role: str
    name: str
    epoch: int
    hello_seq: int = -1
    last_seen: float = 0.0
    confirmed: int = -1
    applied: set[int] = field(default_factory=set)
    noticed: int = -1
    delivered: set[str] = field(default_factory=set)
    last_work: tuple[int, Work] | None = None
    poisoned_in_a_row: int = 0
    stopped: str | None = None
    told_done: bool = False
    idle_s: float = 0.0
    probe: tuple[float, float] | None = None
    key: str = ""


class Sessions:
    def __init__(self, saved: Sequence[Sequence[Any]] = (), next_epoch: int = 1) -> None:
        """`saved`: what `saved()` gave."""
        self.next_epoch = next_epoch
        self._by_epoch: dict[int, Session] = {}
        for role, name, epoch, *key in saved:
            self._by_epoch[epoch] = Session(role, name, epoch, key=key[0] if key else "")

    def open(self, role: str, name: str, seq: int, now: float, key: str = "") -> Session:
        """A new epoch, or the one just given when the same HELLO comes again."""
        old = self.find(role, name)
        if old is not None and (old.hello_seq, old.key) == (seq, key):
            return old
        if old is not None:
            del self._by_epoch[old.epoch]
        session = Session(role, name, self.next_epoch, seq, now, key=key)
        self._by_epoch[session.epoch] = session
        self.next_epoch += 1
        return session

    def get(self, epoch: int) -> Session | None:
        return self._by_epoch.get(epoch)

    def find(self, role: str, name: str) -> Session | None:
        """There is one learner, whatever its name; everyone else goes by role and name."""
        return next((s for s in self._by_epoch.values() if s.role == role and (role == "learner" or s.name == name)), None)

    def of(self, role: str) -> list[Session]:
        return [session for session in self._by_epoch.values() if session.role == role]

    def saved(self) -> list[tuple[str, str, int, str]]:
        return [(s.role, s.name, s.epoch, s.key) for s in self._by_epoch.values() if s.role != "tool"]


def proved_name(said: str, who: Known | None) -> str:
    """The name a process goes by. With keys it begins with the name of its key, which has no dot; what it says itself only tells the
    processes of one key apart."""
    return said if who is None or said == who.name else f"{who.name}.{said}"


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first keys in which two shared configs differ, as text for people; None when they agree."""
    keys = [f"{table}.{key} is {show(ours, table, key)} here and {show(theirs, table, key)} there"
            for table in sorted({*ours, *theirs}) for key in sorted({*_table(ours, table), *_table(theirs, table)})
            if show(ours, table, key) != show(theirs, table, key)]
    return "; ".join(keys[:5]) or None


def show(tree: dict[str, Any], table: str, key: str) -> str:
    found = _table(tree, table)
    return repr(found[key]) if key in found else "absent"


def _table(tree: dict[str, Any], table: str) -> dict[str, Any]:
    found = tree.get(table, {})
    return found if isinstance(found, dict) else {"": found}
