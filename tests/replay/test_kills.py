"""kill -9 of replay, actors with an outbox and a learner, at every named point and at random instants: nothing acknowledged is lost,
nothing is trained twice, no prompt is skipped, the books balance, the audit is clean."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos import Chaos, Plan
from tests.support.crash_main import ACTOR_POINTS, LEARNER_POINTS, REPLAY_POINTS
from tests.support.replay import make_config
from tests.support.torture import scaled, tell
from wire.process import free_port

TIMES = scaled(2, 20)
"""How often each named point (but for those at a HELLO: once)."""
RANDOM = scaled(60, 1000)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    config = make_config(tmp_path, heldout=1, prompts=7, replay={"endpoint": f"tcp://127.0.0.1:{free_port()}", "max_staleness": 2},
                         learner={"updates": 1_000_000}, eval={"samples": 1, "every": 3})
    chaos = Chaos(config, tmp_path)
    yield chaos
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
def test_every_named_point(chaos: Chaos) -> None:
    chaos.plan |= plan()
    chaos.until_planned_deaths()
    chaos.settle(2)
    chaos.end()
    tell(named_points=len({point for points in plan().values() for point, _ in points}), **chaos.accounts())


@pytest.mark.timeout(3600)
def test_random_instants(chaos: Chaos) -> None:
    chaos.random_deaths(RANDOM, seed=1)
    chaos.settle(2)
    chaos.end()
    found = chaos.accounts()
    assert found["kills"] >= RANDOM
    assert found["updates"] > RANDOM // 20
    tell(**found)
