"""kill -9 of the real learner at its named points. Given the same rollouts, every version it makes has the digest of an undisturbed run.

All rollouts are stored before the first lease, under version 0, so that neither run depends on when something arrives; later updates
train on stale ones, with a scored `prox`.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from configs.schema import Config
from replay.audit import audit
from replay.books import books
from replay.reader import RunReader
from replay.summary import summary
from tests.support.learning import LearningDaemon, RandomActor, make_run_config
from tests.support.nursery import POINTS, Nursery
from tests.support.torture import scaled, tell

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]
UPDATES = 6
LAST = {"lease": UPDATES, "forward": 2 * UPDATES, "step": UPDATES, "weight files": UPDATES, "commit": UPDATES, "checkpoint": 2}
"""How often an undisturbed learner that joins at version 0 passes each point."""


class Filled(NamedTuple):
    """`folder/runs/test` is a run with version 0 and all rollouts. `wanted`: what an undisturbed run makes of it."""

    config: Config
    folder: Path
    nursery: Nursery
    wanted: dict[str, Any]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("filled")
    config = make_run_config(
        folder, replay={"max_staleness": UPDATES - 1}, recipe={"objective": "ppo", "base": "old", "engine": "tis", "estimator": "dr_grpo"},
        learner={"updates": UPDATES, "micro_batch_rows": 2, "steps_per_update": 1, "checkpoint_every": 4, "score_rows": 8, "lr": 1e-2})
    with LearningDaemon(config) as daemon:
        daemon.learner().start()
        actor = RandomActor(daemon.endpoint, config)
        actor.pull(want=0)
        orders = actor.pull().orders
        assert len(orders) == 2 * UPDATES
        actor.put([actor.make(actor, order, sample) for order in orders for sample in range(order.n)])
        actor.close()
    with Nursery(folder) as nursery:
        undisturbed = run_copy(Filled(config, folder, nursery, {}), folder / "undisturbed", [])
        yield Filled(config, folder, nursery, facts(undisturbed))


def run_copy(filled: Filled, folder: Path, kills: list[tuple[str, int]]) -> Path:
    """A copy of the run, one learner for each kill, and a last one that finishes. The run's folder."""
    shutil.copytree(filled.folder / "runs", folder / "runs")
    config = filled.config.model_copy(update={"run": filled.config.run.model_copy(update={"dir": str(folder / "runs")})})
    with LearningDaemon(config) as daemon:
        for point, count in kills:
            assert filled.nursery.learn(daemon.run_dir / "config.json", daemon.endpoint, point, count) == -9
        assert filled.nursery.learn(daemon.run_dir / "config.json", daemon.endpoint) == 0
        return daemon.run_dir


def facts(run_dir: Path) -> dict[str, Any]:
    """Everything that has to be as in the undisturbed run."""
    with RunReader(run_dir) as run:
        found = {
            "versions": run.sql("SELECT version, parent, update_id, weights_digest, state FROM versions ORDER BY version"),
            "updates": run.sql("SELECT update_id, version_in, version_out, skipped, state, record ->> '$.group_ids', record ->> '$.steps' "
                               "FROM updates ORDER BY update_id"),
            "columns": run.sql("SELECT update_id, name, digest FROM update_columns ORDER BY update_id, name"),
            "groups": run.sql("SELECT group_id, state, reason, update_id FROM groups ORDER BY group_id"),
            "books": books(run.db)}
    assert audit(run_dir).findings == []
    assert summary(run_dir, "done")["trained_twice"] == 0
    exported = sorted((path.name, path.read_bytes()) for path in (run_dir / "model").iterdir())
    return found | {"model": exported}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each point once; in `make torture` five times, spread over the run."""
    if "kill" not in metafunc.fixturenames:
        return
    times = scaled(1, 5)
    kills = [(point, max(1, round(LAST[point] * (turn + 1) / (times + 1)))) for point in POINTS for turn in range(times)]
    metafunc.parametrize("kill", kills, ids=[f"{point} {count}" for point, count in kills])


def test_the_undisturbed_run_is_worth_comparing_with(filled: Filled) -> None:
    wanted = filled.wanted
    assert [version for version, *_ in wanted["versions"]] == list(range(UPDATES + 1))
    assert len({digest for _, _, _, digest, _ in wanted["versions"]}) == UPDATES + 1
    assert wanted["books"] == {"produced": 24, "trained": 24, "dropped": {}, "expired": 0, "lost": 0, "buffered": 0, "leased": 0}


def test_killed_once_every_version_is_that_of_the_undisturbed_run(filled: Filled, kill: tuple[str, int], tmp_path: Path) -> None:
    assert facts(run_copy(filled, tmp_path, [kill])) == filled.wanted
    tell(kills=1, runs_equal_to_the_undisturbed=1)


def test_killed_at_every_point_in_turn_and_while_it_catches_up(filled: Filled, tmp_path: Path) -> None:
    kills = [("lease", 1), ("forward", 4), ("step", 3), ("commit", 1), ("forward", 1), ("weight files", 1), ("checkpoint", 1), ("step", 1),
             ("commit", 2)]
    assert facts(run_copy(filled, tmp_path, kills)) == filled.wanted
    tell(kills=len(kills), runs_equal_to_the_undisturbed=1)
