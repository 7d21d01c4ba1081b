"""Does the engine compute with the weights that were published? A version label proves only a label; its log-probs prove the weights."""

from dataclasses import dataclass

import numpy as np

from wire.errors import WeightsError
from wire.manifest import Probe

NOISE = 1e-4
SLACK = 3.0
FIRST_COARSE = 0.5
"""Nats. The first version of a run has none before it to compare with. Engine and trainer in unrounded float32 differ by 1e-5 and get no
more than the noise; a bfloat16 trainer and a rounded engine differ by up to .2, weights that are not the trainer's by more."""


@dataclass(frozen=True)
class Difference:
    """|engine - learner| over the probe's log-probs, nats."""

    mean: float
    max: float


class ProbeCheck:
    """A version agrees when its mean difference is at most max(1e-4, 3 x `baseline`): that of the first version which an engine like this
    one proved in the run. Replay keeps it, since an actor may start again at any version.

    `exact`: engine and trainer both compute in float32 with unrounded weights.
    """

    def __init__(self, exact: bool) -> None:
        self._first_limit = NOISE if exact else FIRST_COARSE
        self.baseline: float | None = None

    @property
    def limit(self) -> float:
        return self._first_limit if self.baseline is None else max(NOISE, SLACK * self.baseline)

    def check(self, version: int, scored: np.ndarray, probe: Probe) -> Difference:
        """Raises WeightsError when the engine's log-probs `scored` [len(probe) - 1] are not the learner's."""
        found = difference(scored, probe)
        if not found.mean <= self.limit:
            raise WeightsError(f"version {version}: the engine's log-probs of the probe differ from the learner's by {found.mean:.2g} on "
                               f"average (at most {self.limit:.2g} is allowed)")
        if self.baseline is None:
            self.baseline = found.mean
        return found


def difference(scored: np.ndarray, probe: Probe) -> Difference:
    """Infinite when the engine gave too few numbers or one that is none."""
    learner = np.asarray(probe.logprobs, np.float64)
    if scored.shape != learner.shape or not np.isfinite(scored).all() or not learner.size:
        return Difference(float("inf"), float("inf"))
    apart = np.abs(scored.astype(np.float64) - learner)
    return Difference(float(apart.mean()), float(apart.max()))
