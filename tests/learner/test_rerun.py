"""A learner whose newest commits have no checkpoint runs them again, bit for bit; it forks only where they come out otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config
from learner.checkpoint import complete_versions
from learner.deepspeed_engine import digest_state
from learner.loop import Learner
from replay.audit import audit
from replay.books import books
from replay.reader import RunReader
from tests.learner.test_loop import no_contrast, two_spans
from tests.support.learning import Answer, LearningDaemon, RandomActor, acting, make_run_config, random_answer
from wire.errors import RunError
from wire.messages import UpdateRecord
from wire.record import RolloutHead, WorkOrder

pytestmark = pytest.mark.deepspeed


def killed_at(daemon: LearningDaemon, version: int) -> Learner:
    """A learner that commits up to `version` and is gone, with the checkpoint of its start as the newest."""
    learner = daemon.learner()
    save = learner.save
    learner.save = lambda: save() if learner.update is None else None  # type: ignore[method-assign]
    learner.interrupted = lambda: learner.version >= version  # type: ignore[method-assign]
    assert not learner.run()
    return learner


def versions(run_dir: Path) -> list[tuple[Any, ...]]:
    with RunReader(run_dir) as run:
        return run.sql("SELECT version, parent, state FROM versions ORDER BY version")


def digests(run_dir: Path) -> dict[int, str]:
    with RunReader(run_dir) as run:
        return dict(run.sql("SELECT version, weights_digest FROM versions"))


def lost(run_dir: Path) -> int:
    with RunReader(run_dir) as run:
        return books(run.db)["lost"]


def mixed(actor: RandomActor, order: WorkOrder, sample: int) -> tuple[RolloutHead, bytes]:
    """Spans of two versions, and some groups without contrast, so that some updates are skipped."""
    quiet = int(order.order_id.encode()[-1]) % 4 < 2
    return no_contrast(actor, order, sample) if quiet else two_spans(actor, order, sample)


SETTINGS: dict[str, tuple[Answer, dict[str, Any]]] = {
    "zero 0": (two_spans, {}),
    "zero 2": (two_spans, {"learner": {"zero_stage": 2}}),
    "bf16": (random_answer, {"model": {"dtype": "bfloat16"}}),
    "prox, two steps": (two_spans, {"learner": {"steps_per_update": 2}, "recipe": {"base": "prox", "engine": "tis"}}),
    "skips": (mixed, {"learner": {"groups_per_update": 2}}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_committed_updates_come_again_bit_for_bit(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer, tables = SETTINGS[case]
    config = make_run_config(tmp_path, replay={"max_staleness": 2}, **{**tables, "learner": {"updates": 5, **tables.get("learner", {})}})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config, answer):
        gone = killed_at(daemon, 3)
        assert complete_versions(daemon.run_dir, 9) == [0]
        before = digests(daemon.run_dir)
        again = daemon.learner()
        with caplog.at_level("WARNING"):
            again.start()
        assert "came out otherwise" not in caplog.text
        assert (again.version, again.update, again.engine.steps) == (3, gone.update, gone.engine.steps)
        assert (again.weights_digest, digest_state(again.engine.full_state())) == (before[3], before[3])
        assert complete_versions(daemon.run_dir, 9) == [3, 0]
        assert again.skips_in_a_row == gone.skips_in_a_row
        again.committed = None
        again.start = lambda: None  # type: ignore[method-assign]
        assert again.run()
        run_dir = daemon.run_dir
    assert [version[::2] for version in versions(run_dir)] == [(number, "live") for number in range(6)]
    assert lost(run_dir) == 0
    assert audit(run_dir).findings == []
    with RunReader(run_dir) as run:
        assert run.one("SELECT count(*) FROM updates WHERE skipped") > 0 or case != "skips"
