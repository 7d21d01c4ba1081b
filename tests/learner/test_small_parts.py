"""The stopwatch, and the conversation with replay."""

import pytest

from learner.ranks import Ranks
from learner.session import Session
from learner.stopwatch import Stopwatch
from wire.errors import TryAgainError
from wire.messages import Ok, Reply, Request, Stats


def test_seconds_are_exclusive_and_add_up() -> None:
    now = [100.0]
    stopwatch = Stopwatch(lambda: now[0])
    now[0] += 1
    with stopwatch("wait"):
        now[0] += 2
    with stopwatch("update"):
        now[0] += 4
    with stopwatch("wait"):
        now[0] += 8
    assert stopwatch.take() == {"anchor": 0, "update": 4, "publish": 0, "wait": 10, "other": 1, "total": 15}
    now[0] += 0.5
    assert stopwatch.take() == {"anchor": 0, "update": 0, "publish": 0, "wait": 0, "other": 0.5, "total": 0.5}


def test_time_is_counted_when_the_step_fails() -> None:
    now = [0.0]
    stopwatch = Stopwatch(lambda: now[0])

    def fail() -> None:
        with stopwatch("publish"):
            now[0] += 3
            raise TryAgainError("moved on")

    with pytest.raises(TryAgainError):
        fail()
    assert stopwatch.take()["publish"] == 3


class Silent:
    """Answers nothing the first `silences` times."""

    def __init__(self, silences: int) -> None:
        self.silences, self.asked = silences, 0

    def call(self, request: Request, bulk: bytes = b"", *, timeout_s: float | None = None) -> tuple[Reply, bytes]:
        self.asked += 1
        if self.asked <= self.silences:
            raise TimeoutError("no reply")
        return Ok(), b""

    def close(self) -> None:
        pass


def test_a_request_without_a_reply_is_asked_again() -> None:
    client = Silent(2)
    assert Session(Ranks(0, 1, "cpu"), client, lambda: False).call(Stats()) == (Ok(), b"")
    assert client.asked == 3


def test_a_stopping_learner_does_not_wait_for_ever() -> None:
    with pytest.raises(KeyboardInterrupt):
        Session(Ranks(0, 1, "cpu"), Silent(2), lambda: True).call(Stats())


def test_the_last_word_needs_no_reply() -> None:
    Session(Ranks(0, 1, "cpu"), Silent(1), lambda: False).farewell(Stats())
