"""Signs that off-policy training is going wrong, found in the numbers of each update. Pure: state in, state and alarms
out.

Thresholds on one update: verl warns at the same ESS and mean weight. Trends compare the newest updates with the first
ones of the run.
"""

from collections.abc import Mapping
from typing import NamedTuple

from correction.ratios import LOG_RATIO_LIMIT

ESS_LEAST = 0.3
WEIGHT_LOW, WEIGHT_HIGH = 0.5, 2.0
SAME = 1e-5
"""Of |log prox/old|: prox may come from a forward of another shape than old, which moves an fp32 log-prob by up to this.
In bf16 other shapes move it further than any such bound: there the alarm knows only equal bits."""
WINDOW = 8
"""Updates in each of the two ends that a trend compares."""
MISMATCH_GROWTH, MISMATCH_FLOOR = 1.5, 1e-3
"""The mismatch of an engine has a trend when it grew to this many times its beginning, and matters at all."""
MASK_SHRINK, MASK_FLOOR = 0.7, 1e-3
GROWTH_UNDER_A_MASK = 1.2


class Seen(NamedTuple):
    """One update's numbers, over its trainable tokens.

    stale_tokens: those older than the version the update began from; stale_drift: the largest |log prox/old| among
    them. ess: of the corrected weights; ess_raw: of prox/mu. weight_mean: of the kept tokens. masked: share of tokens.
    mismatch: mean |log old/mu|, and by engine. clamped: tokens with a log-ratio beyond `correction.ratios.LOG_RATIO_LIMIT`.
    """

    stale_tokens: int
    stale_drift: float
    ess: float
    ess_raw: float
    weight_mean: float
    masked: float
    mismatch: float
    engines: Mapping[str, float]
    clamped: int = 0


class Trend(NamedTuple):
    """The first and the newest `WINDOW` values of a series; `newest` fills up only after `first`."""

    first: tuple[float, ...] = ()
    newest: tuple[float, ...] = ()

    def after(self, value: float) -> "Trend":
        if len(self.first) < WINDOW:
            return Trend((*self.first, value), ())
        return Trend(self.first, (*self.newest, value)[-WINDOW:])

    @property
    def ends(self) -> tuple[float, float] | None:
        """Means at the beginning and now; None while there are too few values."""
        return (sum(self.first) / WINDOW, sum(self.newest) / WINDOW) if len(self.newest) == WINDOW else None


class Watch(NamedTuple):
    """What is remembered from update to update."""

    engines: Mapping[str, Trend] = {}
    mismatch: Trend = Trend()
    masked: Trend = Trend()


def look(watch: Watch, seen: Seen) -> tuple[Watch, dict[str, str]]:
    """(what to remember, alarms by name: one line each)."""
    engines = {**watch.engines, **{e: watch.engines.get(e, Trend()).after(v) for e, v in seen.engines.items()}}
    watch = Watch(engines, watch.mismatch.after(seen.mismatch), watch.masked.after(seen.masked))
    found = {
        "ratio_is_one": _ratio_is_one(seen),
        "ess": _ess(seen),
        "weight_mean": _weight_mean(seen),
        "mismatch_trend": _mismatch_trend(watch, seen),
        "mask_shrinks": _mask_shrinks(watch),
        "clamped": _clamped(seen),
    }
    return watch, {name: text for name, text in found.items() if text is not None}


def _ratio_is_one(seen: Seen) -> str | None:
    if seen.stale_tokens == 0 or seen.stale_drift > SAME:
        return None
    return (
        f"prox/old is 1 within {SAME:g} on all {seen.stale_tokens} tokens of older versions: the weights did not change, or "
        "old is not what it says"
    )


def _ess(seen: Seen) -> str | None:
    if seen.ess < ESS_LEAST:
        return f"the corrected weights leave an effective sample size of {seen.ess:.2f}, below {ESS_LEAST}"
    if seen.ess_raw < ESS_LEAST:
        return f"the effective sample size of prox/mu before correction is {seen.ess_raw:.2f}, below {ESS_LEAST}"
    return None


def _weight_mean(seen: Seen) -> str | None:
    if WEIGHT_LOW <= seen.weight_mean <= WEIGHT_HIGH:
        return None
    return f"the mean weight of the kept tokens is {seen.weight_mean:.2f}, outside {WEIGHT_LOW} to {WEIGHT_HIGH}"


def _mismatch_trend(watch: Watch, seen: Seen) -> str | None:
    """The engine that grew most, among those of this update."""
    grown = {}
    for engine in seen.engines:
        ends = watch.engines[engine].ends
        if ends is not None and ends[1] > max(MISMATCH_FLOOR, MISMATCH_GROWTH * ends[0]):
            grown[engine] = ends
    if not grown:
        return None
    engine, (before, now) = max(grown.items(), key=lambda item: item[1][1] / max(item[1][0], 1e-12))
    return f"the mismatch of engine {engine} grew from {before:.2g} to {now:.2g} (mean |log old/mu|)"


def _mask_shrinks(watch: Watch) -> str | None:
    masked, mismatch = watch.masked.ends, watch.mismatch.ends
    if masked is None or mismatch is None or masked[0] < MASK_FLOOR:
        return None
    if masked[1] >= MASK_SHRINK * masked[0] or mismatch[1] <= GROWTH_UNDER_A_MASK * mismatch[0]:
        return None
    return (
        f"the masked share fell from {masked[0]:.2%} to {masked[1]:.2%} while the mismatch grew from {mismatch[0]:.2g} "
        f"to {mismatch[1]:.2g}: fewer masked tokens are no sign of health here"
    )


def _clamped(seen: Seen) -> str | None:
    if seen.clamped == 0:
        return None
    return (
        f"{seen.clamped} tokens have a log-ratio beyond +-{LOG_RATIO_LIMIT:g}, where the clamp of exp acts and a ratio "
        "has no gradient: the policies are too far apart, or a log-prob is wrong"
    )
