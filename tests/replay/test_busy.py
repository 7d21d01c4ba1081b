"""What share of a request fell into updates."""

import numpy as np
import pytest

from replay.busy import KEPT, UpdateTimes


def share(times: UpdateTimes, started: float, finished: float, now: float = 100.0) -> float:
    return float(times.share(np.array([started]), np.array([finished]), now)[0])


@pytest.fixture
def times() -> UpdateTimes:
    """Updates in [10, 12] and [20, 24]; one open since 30."""
    made = UpdateTimes()
    for opened, closed in ((10, 12), (20, 24)):
        made.open(opened)
        made.close(closed)
    made.open(30)
    return made


@pytest.mark.parametrize(
    ("started", "finished", "expected"),
    [
        (0, 5, 0.0),
        (10, 12, 1.0),
        (8, 12, 0.5),
        (11, 13, 0.5),
        (12, 20, 0.0),
        (0, 40, 16 / 40),
        (11, 22, 3 / 11),
        (35, 45, 1.0),
        (25, 35, 0.5),
        (21, 21, 0.0),
        (95, 105, 0.5),
    ],
)
def test_share(times: UpdateTimes, started: float, finished: float, expected: float) -> None:
    assert share(times, started, finished) == pytest.approx(expected)


def test_nothing_before_the_first_update() -> None:
    assert share(UpdateTimes(), 0, 1) == 0.0


def test_a_clock_that_goes_backwards_makes_no_negative_time(times: UpdateTimes) -> None:
    times.close(5)
    times.open(4)
    times.close(3)
    assert share(times, 0, 100) == pytest.approx(6 / 100)


def test_only_the_last_intervals_are_kept(times: UpdateTimes) -> None:
    for number in range(2 * KEPT):
        times.close(40.0 + number)
        times.open(40.5 + number)
    assert share(times, 900.0, 901.0, now=5000.0) == pytest.approx(0.5)


def test_opening_an_open_one_changes_nothing(times: UpdateTimes) -> None:
    times.open(33)
    assert times.opened == 30
