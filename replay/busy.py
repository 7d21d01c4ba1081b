"""When updates ran (a lease handed out until its commit), on the wall clock, and what share of a request's time fell into them. Pure."""

import numpy as np

KEPT = 512


class UpdateTimes:
    """The last intervals only: a request does not outlast hundreds of updates."""

    def __init__(self) -> None:
        self._edges: list[float] = []
        self.opened: float | None = None

    def open(self, wall: float) -> None:
        if self.opened is None:
            self.opened = max(wall, self._edges[-1]) if self._edges else wall

    def close(self, wall: float) -> None:
        if self.opened is not None:
            self._edges = [*self._edges, self.opened, max(wall, self.opened)][-2 * KEPT:]
            self.opened = None

    def share(self, started: np.ndarray, finished: np.ndarray, now: float) -> np.ndarray:
        """Share in [0, 1] of each [started, finished] that lies within updates; the open one reaches to `now`. A request of no length
        has share 0."""
        edges = self._edges if self.opened is None else [*self._edges, self.opened, max(now, self.opened)]
        if not edges:
            return np.zeros(len(started))
        at = np.asarray(edges)
        busy = np.concatenate([[0.0], np.cumsum(np.diff(at) * (np.arange(len(at) - 1) % 2 == 0))])
        inside = np.interp(finished, at, busy) - np.interp(started, at, busy)
        length = finished - started
        return np.divide(inside, length, out=np.zeros(len(started)), where=length > 0)
