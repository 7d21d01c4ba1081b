"""The rule, in literal numbers."""

import pytest

from replay.budget import allowance, room, staleness, too_old


@pytest.mark.parametrize(("eta", "version", "confirmed", "live", "granted"), [
    (0, 0, 0, 0, 32), (0, 0, 0, 31, 1), (0, 0, 0, 32, 0), (0, 1, 0, 0, 0),
    (1, 5, 5, 0, 64), (1, 5, 4, 0, 32), (1, 5, 4, 31, 1), (1, 5, 3, 0, 0),
    (2, 7, 7, 95, 1), (2, 7, 5, 32, 0), (2, 7, 5, 31, 1), (2, 7, 4, 0, 0),
    (8, 100, 92, 0, 32), (8, 100, 100, 287, 1),
    (2, 0, -1, 0, 0),
])
def test_allowance(eta: int, version: int, confirmed: int, live: int, granted: int) -> None:
    assert allowance(live=live, version=version, confirmed=confirmed, max_staleness=eta, groups_per_update=32) == granted


@pytest.mark.parametrize(("kept", "on_order", "live", "granted"), [
    (0, 0, 0, 12), (0, 96, 12, 0), (52, 0, 0, 5), (40, 12, 5, 5), (53, 0, 4, 5), (88, 0, 4, 1),
    (96, 0, 4, 0), (90, 5, 5, 0),  # full: nothing beyond the 4 groups of an update
    (96, 0, 3, 1), (500, 0, 0, 4), (500, 16, 2, 2),  # full, and the learner could not go on
])
def test_room(kept: int, on_order: int, live: int, granted: int) -> None:
    found = room(kept=kept, on_order=on_order, n=8, live=live, max_rollouts=96, groups_per_update=4)
    assert max(0, found) == granted


def test_staleness_is_measured_from_the_oldest_token() -> None:
    assert staleness(7, 5) == 2
    assert [too_old(7, oldest, 2) for oldest in (7, 5, 4)] == [False, False, True]
