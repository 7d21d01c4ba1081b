"""The stopwatch, signals, and the conversation with replay."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import learner.__main__ as program
from learner import assemble
from learner.ranks import Ranks
from learner.session import Session
from learner.stop import Stop
from learner.stopwatch import Stopwatch
from tests.support.replay import make_config
from wire.errors import RunError, TryAgainError
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
    """A replay that does not answer; `meanwhile` happens while one waits for it."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def call(self, request: Request, bulk: bytes = b"", *, timeout_s: float | None = None) -> tuple[Reply, bytes]:
        if timeout_s is not None:
            raise TimeoutError("no reply")
        self.meanwhile()
        time.sleep(60)
        return Ok(), b""

    def close(self) -> None:
        pass


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stop]:
    monkeypatch.setattr("learner.stop.PATIENCE_S", 0.05)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    made = Stop()
    made.install()
    yield made
    for number, handler in zip((signal.SIGINT, signal.SIGALRM), before, strict=True):
        signal.signal(number, handler)


def test_a_first_signal_only_asks_and_a_second_one_stops_at_once(stop: Stop) -> None:
    signal.raise_signal(signal.SIGINT)
    assert stop.asked
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_stopping_learner_does_not_wait_for_a_silent_replay(stop: Stop) -> None:
    session = Session(Ranks(0, 1, "cpu"), Silent(lambda: signal.raise_signal(signal.SIGINT)), stop)
    with pytest.raises(KeyboardInterrupt):
        session.call(Stats())  # asked while it waits
    with pytest.raises(KeyboardInterrupt):
        Session(Ranks(0, 1, "cpu"), Silent(), stop).call(Stats())  # asked before
    time.sleep(0.1)  # the timer is off outside a wait


def test_the_last_word_needs_no_reply() -> None:
    Session(Ranks(0, 1, "cpu"), Silent(), Stop()).farewell(Stats())


@pytest.mark.parametrize(("ends", "code"), [(True, 0), (False, 130), (RunError("no"), None)])
def test_the_connection_is_closed_however_it_ends(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool | RunError, code: int | None) -> None:
    """Nothing closes it afterwards: the process ends without being torn down."""
    steps: list[str] = []

    def run() -> bool:
        if isinstance(ends, RunError):
            raise ends
        return ends

    session = SimpleNamespace(close=lambda: steps.append("closed"))
    monkeypatch.setattr(assemble, "assemble", lambda *_: SimpleNamespace(run=run, session=session))
    monkeypatch.setattr(program.Stop, "install", lambda self: None)
    if code is None:
        with pytest.raises(RunError):
            program.learn(make_config(tmp_path))
    else:
        assert program.learn(make_config(tmp_path)) == code
    assert steps == ["closed"]
