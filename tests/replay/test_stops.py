"""Replay itself stands still for longer than an order's lease: whoever waited for it keeps what it holds."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replay.daemon import Daemon
from replay.reader import RunReader
from tests.replay.conftest import Stage
from tests.support.chaos import Chaos
from tests.support.replay import LightActor, LightLearner, make_config, stats
from wire.process import free_port
from wire.sockets import Router

LEASE_S, STOP_S = 3.0, 4.0


@pytest.fixture
def make_daemon() -> Iterator[Callable[[Stage], Daemon]]:
    routers: list[Router] = []

    def make(stage: Stage) -> Daemon:
        routers.append(Router("tcp://127.0.0.1:*"))
        return Daemon(stage.core, routers[-1])

    yield make
    for router in routers:
        router.close()


def granted(stage: Stage) -> int:
    return len(stage.core.book.in_state("granted"))


def holding_two(stage: Stage) -> LightActor:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    assert len(actor.pull(want=2).orders) == 2
    return actor


def lease_ends_after(seconds: int, stage: Stage, daemon: Daemon) -> None:
    for _ in range(seconds):
        stage.clock.at += 1.0
        daemon.step()
    assert granted(stage) == 2
    stage.clock.at += 1.0
    daemon.step()
    assert granted(stage) == 0


def test_time_that_replay_was_away_is_on_nobodys_lease(stage: Stage, make_daemon: Callable[[Stage], Daemon],
                                                       caplog: pytest.LogCaptureFixture) -> None:
    holding_two(stage)  # order_lease_s = 30
    daemon = make_daemon(stage)
    stage.clock.at += 5.0
    daemon.step()
    stage.clock.at += 100.0
    caplog.clear()
    daemon.step()
    assert caplog.messages == ["replay itself stood still for 100.0 s: orders' leases are longer by as much"]
    lease_ends_after(25, stage, daemon)  # 5 + 25 = 30 s of its own
    assert stage.core.store.counters["replay_stops"] == 1


def test_a_lease_renewed_meanwhile_does_not_reach_beyond_its_length(stage: Stage, make_daemon: Callable[[Stage], Daemon]) -> None:
    actor = holding_two(stage)
    daemon = make_daemon(stage)
    stage.clock.at += 20.0
    actor.pull(want=0)  # heard of while replay was away
    daemon.step()
    assert {group.touched for group in stage.core.book.groups.values()} == {stage.clock.at}
    lease_ends_after(30, stage, daemon)


def test_a_stop_in_mid_turn_counts_too(stage: Stage, make_daemon: Callable[[Stage], Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    holding_two(stage)
    daemon = make_daemon(stage)
    take = daemon.take_messages

    def stopped() -> bool:
        stage.clock.at += 100.0
        return take()

    monkeypatch.setattr(daemon, "take_messages", stopped)
    daemon.step()
    assert granted(stage) == 2


def test_short_pauses_lengthen_nothing(stage: Stage, make_daemon: Callable[[Stage], Daemon]) -> None:
    holding_two(stage)
    daemon = make_daemon(stage)
    for _ in range(5):
        stage.clock.at += 7.0
        daemon.step()
    assert granted(stage) == 0


def test_a_quiet_turn_is_no_stop_however_short_the_lease(make_stage: Callable[..., Stage], make_daemon: Callable[[Stage], Daemon]) -> None:
    stage = make_stage(replay={"order_lease_s": 0.6})
    holding_two(stage)
    daemon = make_daemon(stage)
    for _ in range(3):
        stage.clock.at += 0.25
        daemon.step()
    assert granted(stage) == 0


def test_turns_that_are_full_of_messages_are_no_stop(stage: Stage, make_daemon: Callable[[Stage], Daemon],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    holding_two(stage)
    daemon = make_daemon(stage)
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "take_messages", lambda: False)
        for _ in range(40):
            stage.clock.at += 1.0
            daemon.step()
        assert granted(stage) == 2  # what has arrived is read first
    daemon.step()
    assert granted(stage) == 0
    assert "replay_stops" not in stage.core.store.counters


def test_an_evaluation_stays_with_its_actor(make_stage: Callable[..., Stage], make_daemon: Callable[[Stage], Daemon]) -> None:
    stage = make_stage(heldout=3, eval={"samples": 1})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    orders = actor.pull().orders
    daemon = make_daemon(stage)
    stage.clock.at += 100.0
    daemon.step()
    assert stage.core.evals[0].actor == "a0"
    assert actor.answer(orders).refused == []


def test_the_watchdog_does_not_blame_others_for_it(stage: Stage, make_daemon: Callable[[Stage], Daemon],
                                                   caplog: pytest.LogCaptureFixture) -> None:
    daemon = make_daemon(stage)
    stage.clock.at += 100.0
    daemon.step()
    assert not [line for line in caplog.messages if "nothing has moved" in line]
    for _ in range(31):
        stage.clock.at += 1.0
        daemon.step()
    assert [line[:29] for line in caplog.messages if "nothing has moved" in line] == ["nothing has moved for 30 s: w"]


def test_a_daemon_that_is_stopped_for_longer_than_a_lease_takes_what_living_actors_made(tmp_path: Path) -> None:
    config = make_config(tmp_path, replay={"endpoint": f"tcp://127.0.0.1:{free_port()}", "order_lease_s": LEASE_S})
    chaos = Chaos(config, tmp_path, roles=("replay",))
    try:
        chaos.open()
        learner, actor = LightLearner(config.replay.endpoint, config), LightActor(config.replay.endpoint, config)
        actor.pull()
        orders = actor.pull().orders
        assert len(orders) == 4
        waiting = threading.Thread(target=actor.pull, kwargs={"wait_s": 30.0})  # nothing more is granted: it is parked
        waiting.start()
        pid = chaos.children["replay"].pid
        assert pid is not None
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)
        waiting.join(20)
        stored = actor.answer(orders)
        assert (stored.stored, stored.refused) == (8, [])
        assert stats(config.replay.endpoint)["counters"]["replay_stops"] >= 1
        for client in (learner, actor):
            client.close()
    finally:
        chaos.end()
    with RunReader(chaos.run_dir) as run:
        assert run.sql("SELECT state, attempt, count(*) FROM groups GROUP BY 1, 2") == [("complete", 1, 4)]


def test_messages_without_end_keep_replay_from_nothing_else(stage: Stage, make_daemon: Callable[[Stage], Daemon],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    holding_two(stage)  # order_lease_s = 30
    daemon = make_daemon(stage)
    monkeypatch.setattr(daemon, "take_messages", lambda: False)
    looks: list[float] = []
    monkeypatch.setattr(daemon.watchdog, "look", lambda: looks.append(stage.clock.at))
    asked: list[float] = []
    monkeypatch.setattr(daemon.router, "strangers", lambda: asked.append(stage.clock.at))  # looks at the list of keys, too
    for _ in range(39):
        stage.clock.at += 1.0
        daemon.step()
    assert len(looks) == len(asked) == 39


def test_what_comes_while_a_commit_is_due_waits_for_it(stage: Stage, make_daemon: Callable[[Stage], Daemon],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction ends at 1 MiB, however much has arrived."""
    daemon, asked = make_daemon(stage), list[int]()
    monkeypatch.setattr(daemon.router, "receive", lambda: asked.append(1))
    stage.core.begin().wrote((1 << 20) - 1)
    assert daemon.take_messages() is True and len(asked) == 1
    stage.core.store.wrote(1)
    assert daemon.take_messages() is False and len(asked) == 1
    daemon.step()
    assert stage.core.store.due_in(stage.clock.at) is None
    assert daemon.take_messages() is True and len(asked) == 2
