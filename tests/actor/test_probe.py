import numpy as np
import pytest

from actor.probe import ProbeCheck, difference
from wire.errors import WeightsError
from wire.manifest import Probe

PROBE = Probe([5, 6, 7], [-1.0, -2.0])


def scored(*apart: float) -> np.ndarray:
    return np.array(PROBE.logprobs, np.float32) + np.array(apart, np.float32)


def test_mean_and_largest_absolute_difference() -> None:
    found = difference(scored(0.25, -0.75), PROBE)
    assert (found.mean, found.max) == (0.5, 0.75)


def test_later_versions_may_differ_three_times_as_much_as_the_first() -> None:
    check = ProbeCheck(exact=False)
    check.check(4, scored(0.125, 0.125), PROBE)
    check.check(5, scored(0.375, 0.375), PROBE)
    with pytest.raises(WeightsError, match=r"version 6: .* 0\.5 on average .* 0\.38"):
        check.check(6, scored(0.5, 0.5), PROBE)
    assert check.limit == 0.375


def test_an_exact_engine_may_still_differ_by_1e_4() -> None:
    check = ProbeCheck(exact=True)
    check.check(0, scored(0.0, 0.0), PROBE)
    check.check(1, scored(9e-5, -9e-5), PROBE)
    with pytest.raises(WeightsError):
        check.check(2, scored(2e-4, 2e-4), PROBE)


@pytest.mark.parametrize(("exact", "apart"), [(True, 1.1e-4), (True, 0.02), (False, 0.6)])
def test_the_first_version_has_a_bound_of_its_own(exact: bool, apart: float) -> None:
    with pytest.raises(WeightsError):
        ProbeCheck(exact).check(0, scored(apart, apart), PROBE)


def test_an_actor_that_starts_again_is_held_to_the_runs_baseline() -> None:
    check = ProbeCheck(exact=False)
    check.baseline = 0.125
    check.check(7, scored(0.375, 0.375), PROBE)
    with pytest.raises(WeightsError, match=r"version 8: .* 0\.4 on average .* 0\.38"):
        check.check(8, scored(0.4, 0.4), PROBE)
    assert check.baseline == 0.125


@pytest.mark.parametrize("answer", [[np.nan, -2.0], [-1.0], [-np.inf, -2.0], []])
def test_no_number_is_no_agreement(answer: list[float]) -> None:
    with pytest.raises(WeightsError, match="inf"):
        ProbeCheck(exact=False).check(0, np.array(answer, np.float32), PROBE)
