"""Where the learner's seconds go. What is not inside a `with` is `other`, so the parts always add up to the total."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("anchor", "update", "publish", "wait", "other")


class Stopwatch:
    """`take()` gives the seconds since the last `take()`, by part and in total."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._spent[part] += self._now() - started

    def take(self) -> dict[str, float]:
        now = self._now()
        total = now - self._since
        seconds = self._spent | {"total": total}
        seconds["other"] = total - sum(self._spent.values())
        self._since, self._spent = now, dict.fromkeys(PARTS, 0.0)
        return seconds
