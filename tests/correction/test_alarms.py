"""Each alarm at the value where it begins, and silent beside it."""

import pytest

from correction.alarms import WINDOW, Seen, Trend, Watch, look

HEALTHY = Seen(stale_tokens=10, stale_drift=0.02, ess=0.9, ess_raw=0.9, weight_mean=1.0, masked=0.02, mismatch=0.1, engines={"a": 0.1})


def alarms(*seen: Seen) -> dict[str, str]:
    """Of the last one."""
    watch, found = Watch(), dict[str, str]()
    for one in seen:
        watch, found = look(watch, one)
    return found


def test_a_healthy_run_raises_nothing() -> None:
    assert alarms(*[HEALTHY] * 40) == {}


@pytest.mark.parametrize(("change", "name", "text"), [
    ({"stale_drift": 0.0}, "ratio_is_one", "prox/old is 1 within 1e-05 on all 10 tokens of older versions"),
    ({"stale_drift": 4.8e-7}, "ratio_is_one", "on all 10 tokens"),  # other shapes in scoring and in training
    ({"ess": 0.299}, "ess", "corrected weights leave an effective sample size of 0.30, below 0.3"),
    ({"ess_raw": 0.1}, "ess", "prox/mu before correction is 0.10, below 0.3"),
    ({"weight_mean": 0.49}, "weight_mean", "0.49, outside 0.5 to 2.0"),
    ({"weight_mean": 2.01}, "weight_mean", "2.01, outside"),
    ({"weight_mean": float("nan")}, "weight_mean", "nan, outside"),
    ({"clamped": 1}, "clamped", "1 tokens have a log-ratio beyond +-20"),
])
def test_one_update_is_enough(change: dict[str, float], name: str, text: str) -> None:
    found = alarms(HEALTHY._replace(**change))
    assert list(found) == [name]
    assert text in found[name]


@pytest.mark.parametrize("change", [
    {"stale_tokens": 0, "stale_drift": 0.0}, {"stale_drift": 1.1e-5}, {"ess": 0.3}, {"ess_raw": 0.3}, {"weight_mean": 0.5},
    {"weight_mean": 2.0}])
def test_the_bounds_themselves_are_healthy(change: dict[str, float]) -> None:
    assert alarms(HEALTHY._replace(**change)) == {}


def grown(by: float, *, start: float = 0.1, masked: float = 0.02) -> list[Seen]:
    now = HEALTHY._replace(mismatch=start * by, engines={"a": start * by, "b": start}, masked=masked)
    return [HEALTHY._replace(mismatch=start, engines={"a": start, "b": start})] * WINDOW + [now] * WINDOW


def test_the_mismatch_of_one_engine_has_a_trend() -> None:
    found = alarms(*grown(1.6))
    assert list(found) == ["mismatch_trend"]
    assert "engine a grew from 0.1 to 0.16" in found["mismatch_trend"]
    assert alarms(*grown(1.6)[:-1]) == {}  # one update too few
    assert alarms(*grown(1.4)) == {}
    assert alarms(*grown(50.0, start=1e-5)) == {}  # floating-point noise, however much it grows


def test_the_trend_is_each_engines_own_and_not_that_of_all_tokens() -> None:
    """Another mixture of two steady engines moves the mean; one engine of many that drifts hardly does."""
    before = HEALTHY._replace(engines={"a": 0.05, "b": 0.4})
    assert alarms(*[before] * WINDOW, *[before._replace(mismatch=0.35)] * WINDOW) == {}
    found = alarms(*[before] * WINDOW, *[before._replace(engines={"a": 0.05, "b": 0.8})] * WINDOW)
    assert list(found) == ["mismatch_trend"]
    assert "engine b grew from 0.4 to 0.8" in found["mismatch_trend"]


def test_an_engine_that_left_raises_nothing_and_one_that_recovers_is_silent_again() -> None:
    drifted = grown(1.6)
    gone, well = drifted[-1]._replace(engines={"b": 0.1}), drifted[0]
    assert list(alarms(*drifted)) == ["mismatch_trend"]
    assert alarms(*drifted, gone) == {}
    assert alarms(*drifted, *[well] * WINDOW) == {}


def test_an_engine_that_joins_later_has_its_own_beginning() -> None:
    late = [HEALTHY._replace(engines={"a": 0.1, "late": 0.3})] * (2 * WINDOW)
    assert alarms(*[HEALTHY] * 30, *late) == {}


@pytest.mark.parametrize(("by", "masked", "raised"), [(1.3, 0.01, True), (1.3, 0.015, False), (1.1, 0.01, False)])
def test_a_mask_that_shrinks_while_the_mismatch_grows(by: float, masked: float, raised: bool) -> None:
    found = alarms(*grown(by, masked=masked))
    assert list(found) == (["mask_shrinks"] if raised else [])
    if raised:
        assert "fell from 2.00% to 1.00% while the mismatch grew from 0.1 to 0.13" in found["mask_shrinks"]


@pytest.mark.parametrize(("start", "raised"), [(0.0009, False), (0.001, True), (0.0011, True)])
def test_a_mask_that_never_took_more_than_one_token_in_a_thousand_has_no_trend(start: float, raised: bool) -> None:
    before = HEALTHY._replace(masked=start)
    now = HEALTHY._replace(masked=start / 2, mismatch=0.13, engines={"a": 0.13})
    assert list(alarms(*[before] * WINDOW, *[now] * WINDOW)) == (["mask_shrinks"] if raised else [])


def test_a_trend_compares_the_first_values_with_the_newest() -> None:
    trend = Trend()
    for value in range(2 * WINDOW + 3):
        assert (trend.ends is None) == (value < 2 * WINDOW)
        trend = trend.after(float(value))
    assert trend.ends == (3.5, 14.5)
    assert len(trend.newest) == WINDOW
