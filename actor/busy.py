"""How long the engine was busy, shared fairly: with k requests in flight, each second charges 1/k to each of them."""


class BusyClock:
    """The charges of all requests add up to the seconds in which at least one was in flight. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._changed = self._share = 0.0

    def begin(self, now: float) -> float:
        """A request begins: keep what this returns for `end`."""
        self._advance(now)
        self.in_flight += 1
        return self._share

    def end(self, began: float, now: float) -> float:
        """Seconds charged to the request that began at `began`."""
        self._advance(now)
        self.in_flight -= 1
        return self._share - began

    def _advance(self, now: float) -> None:
        if self.in_flight:
            self._share += (now - self._changed) / self.in_flight
        self._changed = now
