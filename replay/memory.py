"""Replay's memory, as a person should hear of it when it grows beyond all that it does itself.

A peer may send a message of any number of frames, and ZeroMQ keeps what has come of it until it is complete, unseen by us, or its
connection ends. There is no limit that would stop that (docs/wire-format.md, Security).
"""

import os
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30
FIRST = 2 * GIB
"""Above what replay had when it started."""


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    def __init__(self, measure: Callable[[], int] = resident) -> None:
        self._measure = measure
        self._next = measure() + FIRST

    def look(self) -> str | None:
        """A line when it has grown past the next mark; each mark is twice what was found at the last."""
        found = self._measure()
        if found < self._next:
            return None
        self._next = 2 * found
        return (f"replay has {found / GIB:.1f} GiB of memory: a very large update, or a peer that sends a message without end. Replay may "
                "be stopped and started again with --resume: nothing that was acknowledged is lost, the unfinished message is")
