"""How a signal stops the learner: at the next commit, not in the middle of an update."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 5.0
"""A learner that was asked to stop waits no longer than this for a reply."""


class Stop:
    """The first SIGINT (SIGTERM becomes one) sets `asked`, a second one stops at once. Without `install`, no signal is looked at."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def install(self) -> None:
        """In the main thread."""
        signal.signal(signal.SIGINT, self._ask)
        signal.signal(signal.SIGALRM, self._give_up)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that may last for ever: ends by KeyboardInterrupt some seconds after we were asked to stop."""
        self._waiting = True
        try:
            if self.asked:
                signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
            yield
        finally:
            self._waiting = False
            if self.asked:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._waiting:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt
