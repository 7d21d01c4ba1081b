"""When nothing moves, one line says what is awaited, and from whom."""

from collections.abc import Callable

from replay.watchdog import Watchdog, awaited
from tests.replay.conftest import Stage
from tests.support.replay import LightActor


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
