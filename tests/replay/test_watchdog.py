"""When nothing moves, one line says what is awaited, and from whom."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.watchdog import Watchdog, awaited
from tests.replay.conftest import Stage
from tests.support.replay import DaemonThread, LightActor, make_config, notice, rollout
from wire.messages import Fork, SampleFailure


def test_each_wait_has_its_sentence(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(heldout=1, learner={"updates": 1}, eval={"samples": 1, "greedy": False}, replay={"max_rollouts": 8})
    core = stage.core
    assert awaited(core) == "the learner's initial weights (it starts, and loads the model and DeepSpeed); learner not joined"
    learner = stage.learner()
    assert awaited(core) == "evaluation 1 of version 0, 0 of 1 answers are there; an actor to join"
    actor = stage.actor()
    stage.clock.at += 4
    assert awaited(core).endswith("an actor to load version 0: a0 holds none yet, its engine starts (heard of 4 s ago)")
    actor.pull()
    actor.pull()
    stage.clock.at += 7
    assert awaited(core) == "evaluation 1 of version 0, 0 of 1 answers are there; actor a0 has it, heard of 7 s ago"
    actor.answer()
    assert awaited(core) == "an actor to ask for orders: a0 (heard of 0 s ago); 0 of 2 groups are complete, none is granted"
    orders = actor.pull(want=2).orders
    other = LightActor(core, stage.config, "a1")
    stage.clock.at += 3
    assert awaited(core) == "orders outstanding, 0 of 2 groups are complete: 2 with a0 (heard of 3 s ago)"
    actor.answer(orders)
    other.pull(want=0)
    assert awaited(core) == "the learner to lease update 1 (2 of 2 groups are complete); learner heard of 14 s ago"
    learner.score()
    leased = learner.lease()
    assert awaited(core) == "the learner's commit of update 1 (2 groups are leased); learner heard of 0 s ago"
    learner.commit(leased)
    assert awaited(core).startswith("evaluation 2 of version 1, 0 of 1 answers are there; an actor to load version 1: a0 holds 0")
    while not actor.done:
        actor.work()
    assert awaited(core) == "the learner to finish, all updates are committed; learner heard of 0 s ago"
    learner.finish()
    assert awaited(core) == "the actors to leave"


def test_a_full_store_is_named(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(replay={"max_rollouts": 8})
    stage.learner()
    actor = stage.actor()
    actor.pull()
    while actor.work():
        pass
    assert "4 of 2 groups are complete, actors are held back at replay.max_rollouts = 8" in awaited(stage.core)


def test_it_speaks_after_the_time_and_then_half_as_often(stage: Stage) -> None:
    dog = Watchdog(stage.core, 30.0)
    said = []
    for second in range(1, 130):
        stage.clock.at += 1
        if (line := dog.look()) is not None:
            said.append((second, line))
    assert [second for second, _ in said] == [30, 60, 120]
    assert said[0][1] == ("nothing has moved for 30 s: waiting for the learner's initial weights (it starts, and loads the model and "
                          "DeepSpeed); learner not joined")
    stage.learner()
    assert [dog.look() for stage.clock.at in (2000.0, 2029.0)] == [None, None]
    stage.clock.at = 2031.0
    assert dog.look() is not None


@pytest.mark.parametrize("takes_orders", [False, True])
def test_an_actor_that_joins_and_dies_again_and_again_is_no_movement(stage: Stage, takes_orders: bool) -> None:
    stage.learner()
    dog, said = Watchdog(stage.core, 30.0), []
    for second in range(1, 601):
        stage.clock.at += 1
        if second % 20 == 1:
            actor = stage.actor(f"a{second}")
            if takes_orders:
                actor.pull(want=0)
                actor.pull(want=1)
        if (line := dog.look()) is not None:
            said.append((second, line))
    assert [second for second, _ in said] == [30, 60, 120, 240, 480]
    if takes_orders:
        assert "left without an answer by actors that vanished: t0000000 (prompt 30)" in said[-1][1]


@pytest.mark.parametrize("move", ["put", "failure", "commit", "fork"])
def test_outcomes_and_updates_are_movement(stage: Stage, move: str) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull().orders
    actor.answer(orders[:2])
    leased = learner.lease()
    dog = Watchdog(stage.core, 30.0)
    stage.clock.at += 20
    match move:
        case "put":
            actor.put([rollout(orders[2], 0, 0)])
        case "failure":
            actor.put([], [SampleFailure(orders[2].order_id, 1, 0, "no_token")])
        case "commit":
            learner.commit(leased)
        case "fork":
            learner.client.call(Fork(learner.epoch, 0, notice(1)))
    assert dog.look() is None
    stage.clock.at += 29
    assert dog.look() is None
    stage.clock.at += 1
    assert dog.look() is not None


def test_the_daemon_lets_it_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DaemonThread(make_config(tmp_path, logging={"watchdog_s": 0.3})):
        began = time.monotonic()
        while not any(line.startswith("nothing has moved for ") for line in caplog.messages):
            assert time.monotonic() - began < 20
            time.sleep(0.05)
