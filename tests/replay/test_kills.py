"""kill -9 of replay, actors with an outbox and a learner, at every named point and at random instants: nothing acknowledged is lost,
nothing is trained twice, no prompt is skipped, the books balance, the audit is clean. Some stay dead for longer than an order's lease."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.reader import RunReader
from tests.support.chaos import ACTORS, ROLES, Chaos, Plan
from tests.support.crash_main import ACTOR_POINTS, LEARNER_POINTS, REPLAY_POINTS
from tests.support.replay import make_config
from tests.support.torture import scaled, tell
from wire.process import free_port

TIMES = scaled(2, 20)
"""How often each named point (but for those at a HELLO: once)."""
RANDOM = scaled(60, 1000)


LEASE_S = 0.6
"""Of an order, where it is outlasted. Long enough for a living actor on a busy machine; where it is not, nothing is lost either."""


@pytest.fixture
def make_chaos(tmp_path: Path) -> Iterator[Callable[..., Chaos]]:
    made: list[Chaos] = []

    def make(*, heldout: int = 1, roles: tuple[str, ...] = ROLES, **replay: Any) -> Chaos:
        config = make_config(tmp_path, heldout=heldout, prompts=7, learner={"updates": 1_000_000}, eval={"samples": 1, "every": 3},
                             replay={"endpoint": f"tcp://127.0.0.1:{free_port()}", "max_staleness": 2, **replay})
        made.append(Chaos(config, tmp_path, roles=roles))
        return made[-1]

    yield make
    for chaos in made:
        chaos.end()


def plan() -> Plan:
    """Replay's deaths at a HELLO come first, while the others join; later nobody says one."""
    hello = [point for point in REPLAY_POINTS if point.endswith(":hello")]
    return {"replay": [(point, 1) for point in hello] + [(point, 1 + turn % 3) for turn in range(TIMES) for point in REPLAY_POINTS
                                                         if point not in hello],
            "a0": [(point, 1 + turn % 3) for turn in range(TIMES) for point in ACTOR_POINTS],
            "a1": [(point, 1 + turn % 3) for turn in range(TIMES) for point in ACTOR_POINTS],
            "learner": [(point, 1 + turn % 3) for turn in range(TIMES) for point in LEARNER_POINTS]}


@pytest.mark.timeout(3600)
def test_every_named_point(make_chaos: Callable[..., Chaos]) -> None:
    chaos = make_chaos()
    chaos.plan |= plan()
    chaos.until_planned_deaths()
    chaos.settle(2)
    chaos.end()
    tell(named_points=len({point for points in plan().values() for point, _ in points}), **chaos.accounts())


@pytest.mark.timeout(3600)
def test_random_instants(make_chaos: Callable[..., Chaos]) -> None:
    chaos, source = make_chaos(order_lease_s=LEASE_S), random.Random(2)
    chaos.stays_dead = lambda role: source.choice([0.0, 0.0, 0.0, 2 * LEASE_S]) if role in ACTORS else 0.0
    chaos.random_deaths(RANDOM, seed=1)
    chaos.settle(2)
    chaos.end()
    found = chaos.accounts()
    assert found["kills"] >= RANDOM
    assert found["updates"] > RANDOM // 20
    tell(**found)


@pytest.mark.timeout(300)
def test_lives_that_end_with_orders_in_hand_and_outlast_their_lease_skip_no_prompt(make_chaos: Callable[..., Chaos]) -> None:
    """More of them, one after the other, than replay.max_attempts: the prompts of the first orders are asked until they are answered."""
    chaos = make_chaos(heldout=0, roles=("replay", "learner", "a0"), order_lease_s=LEASE_S)
    chaos.plan = {"replay": [], "learner": [], "a0": [("before_write", 1)] * 5}
    chaos.stays_dead = lambda role: 2 * LEASE_S
    chaos.until_planned_deaths()
    chaos.settle(2)
    chaos.end()
    accounts = chaos.accounts()
    with RunReader(chaos.run_dir) as run:
        attempt = run.one("SELECT min(attempt) FROM groups WHERE order_id = 't0000000' AND state = 'trained'")
        assert attempt > chaos.config.replay.max_attempts
        assert run.counters()["order_leases_ended"] > chaos.config.replay.max_attempts
    tell(**accounts)
