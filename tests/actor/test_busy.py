from actor.busy import BusyClock


def test_overlapping_requests_share_the_seconds() -> None:
    clock = BusyClock()
    first = clock.begin(10.0)
    second = clock.begin(14.0)  # alone for 4 s
    assert clock.end(first, 20.0) == 7.0  # 4 + 6 / 2
    assert clock.end(second, 25.0) == 8.0  # 6 / 2 + 5
    third = clock.begin(100.0)  # nothing was in flight for 75 s
    assert clock.end(third, 101.5) == 1.5
