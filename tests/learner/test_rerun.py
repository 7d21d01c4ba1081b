"""A learner whose newest commits have no checkpoint runs them again, bit for bit; it forks only where they come out otherwise."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.checkpoint import complete_versions
from learner.deepspeed_engine import digest_state
from learner.loop import Learner
from learner.rerun import Again, Past, differences, next_past, rerun
from learner.start import load_newest
from replay.audit import audit
from replay.books import books
from replay.client import BlockingClient
from replay.reader import RunReader
from tests.learner.test_loop import no_contrast, two_spans
from tests.support.learning import Answer, LearningDaemon, RandomActor, acting, make_run_config, random_answer
from wire.errors import StoreError
from wire.record import RolloutHead, WorkOrder

pytestmark = pytest.mark.deepspeed


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of the learner's loop. (A learner takes the root logger's handlers, so caplog hears nothing.)"""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("learner.loop").addHandler(handler)
    yield lines
    logging.getLogger("learner.loop").removeHandler(handler)


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
    "zero 3": (two_spans, {"learner": {"zero_stage": 3}}),
    "bf16": (random_answer, {"model": {"dtype": "bfloat16"}}),
    "prox, two steps": (two_spans, {"learner": {"steps_per_update": 2}, "recipe": {"base": "prox", "engine": "tis"}}),
    "remax": (two_spans, {"recipe": {"estimator": "remax"}}),
    "skips": (mixed, {"learner": {"groups_per_update": 2}}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_committed_updates_come_again_bit_for_bit(case: str, tmp_path: Path, said: list[str]) -> None:
    answer, tables = SETTINGS[case]
    config = make_run_config(tmp_path, replay={"max_staleness": 2}, **{**tables, "learner": {"updates": 5, **tables.get("learner", {})}})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config, answer):
        gone = killed_at(daemon, 3)
        assert complete_versions(daemon.run_dir, 9) == [0]
        before = digests(daemon.run_dir)
        again = daemon.learner()
        again.start()
        assert said == []
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


def drifting(learner: Learner, after: int = 0) -> None:
    """As if this machine computed otherwise, from its step number `after + 1` on."""
    step, made = learner.engine.step, []

    def drift() -> tuple[float, float]:
        found = step()
        made.append(1)
        if len(made) > after:
            next(iter(learner.engine.parameters.values())).data.mul_(1 + 1e-6)
        return found

    learner.engine.step = drift  # type: ignore[method-assign]


@pytest.mark.parametrize(("stage", "after"), [(0, 0), (2, 1), (3, 0)])
def test_where_digests_differ_it_forks_from_the_checkpoint_itself(tmp_path: Path, stage: int, after: int,
                                                                  said: list[str]) -> None:
    config = make_run_config(tmp_path, learner={"zero_stage": stage})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 2)
        again = daemon.learner()
        drifting(again, after)
        again.start()
        assert f"update {after + 1} was run again and came out otherwise: " in said[0]
        assert "weights digest was" in said[0]
        assert (again.version, again.engine.steps, again.engine.scheduler.last_epoch, again.update) == (3, 0, 0, None)
        assert versions(daemon.run_dir) == [(0, None, "live"), (1, 0, "orphaned"), (2, 1, "orphaned"), (3, 0, "live")]
        found = digests(daemon.run_dir)
        assert found[0] == found[3] == digest_state(again.engine.full_state())
        assert complete_versions(daemon.run_dir, 9) == [3, 0]
        assert lost(daemon.run_dir) == 8

        # Killed again, before anything was committed on the fork; and then after two updates on it
        assert (killed_at(daemon, 5).version, lost(daemon.run_dir)) == (5, 8)
        last = daemon.learner()
        last.start()
        assert (last.version, last.weights_digest, lost(daemon.run_dir)) == (5, digests(daemon.run_dir)[5], 8)
        run_dir = daemon.run_dir
    assert audit(run_dir).findings == []


def test_killed_between_a_fork_and_its_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is of the version before the fork; what was committed on the fork is run again from there."""
    config = make_run_config(tmp_path)
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 2)
        forking = daemon.learner()
        drifting(forking)
        forking.save = lambda: None  # type: ignore[method-assign]
        forking.start()
        again = daemon.learner()
        again.save = lambda: None  # type: ignore[method-assign]
        again.start()
        assert (again.version, complete_versions(daemon.run_dir, 9)) == (3, [0])
        again.start = lambda: None  # type: ignore[method-assign]
        again.interrupted = lambda: again.version >= 5  # type: ignore[method-assign]
        assert not again.run()
        last = daemon.learner()
        last.start()
        assert (last.version, last.weights_digest) == (5, digests(daemon.run_dir)[5])
        assert [number for number, _, _ in versions(daemon.run_dir)] == [0, 1, 2, 3, 4, 5]
        assert lost(daemon.run_dir) == 8


def test_asked_to_stop_while_it_catches_up_it_saves_where_it_is(tmp_path: Path) -> None:
    config = make_run_config(tmp_path)
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 3)
        stopped = daemon.learner()
        stopped.interrupted = lambda: stopped.version >= 1  # type: ignore[method-assign]
        assert not stopped.run()
        assert (stopped.version, complete_versions(daemon.run_dir, 9)) == (1, [1, 0])
        last = daemon.learner()
        last.start()
        assert (last.version, last.engine.steps, lost(daemon.run_dir)) == (3, 3, 0)


def test_an_update_keeps_its_learning_rate_when_the_config_has_another_now(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"learner": {"lr_final_ratio": 0.5, "steps_per_update": 2}}
    config = make_run_config(tmp_path, **tables)
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 2)
        daemon.config = make_run_config(tmp_path, learner={**tables["learner"], "lr": 3e-2})
        again = daemon.learner()
        again.start()
        assert (again.version, lost(daemon.run_dir)) == (2, 0)
        assert again.engine.optimizer.param_groups[0]["lr"] == pytest.approx(3e-2 * (1 - 0.5 * 4 / 7))


def test_what_is_no_longer_retained_cannot_be_run_again(tmp_path: Path, said: list[str]) -> None:
    config = make_run_config(tmp_path)
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 2)
        with closing(sqlite3.connect(daemon.run_dir / "replay.sqlite", timeout=10, isolation_level=None)) as db:
            db.execute("INSERT INTO ledger VALUES (1000000, 'retention', '{\"update\": 2}', '', '')")  # as if it had gone as far
            db.execute("UPDATE rollouts SET payload = NULL WHERE rollout_id = (SELECT min(rollout_id) FROM rollouts WHERE update_id = 2)")
        again = daemon.learner()
        again.start()
        assert said == ["cannot catch up: not retained: what update 2 was trained on"]
        assert (again.version, lost(daemon.run_dir)) == (3, 8)


@pytest.mark.parametrize(("statement", "what"), [
    ("UPDATE spans SET old = CAST(substr(old, 1, 1) || x'40' || substr(old, 3) AS BLOB) WHERE rollout_id = "
     "(SELECT min(rollout_id) FROM rollouts WHERE update_id = 2)", "update 2: the old log-probs of rollout t0000002.1.0, span 0,"),
    ("UPDATE rollouts SET payload = NULL WHERE rollout_id = (SELECT min(rollout_id) FROM rollouts WHERE update_id = 2)",
     "update 2: a payload or old log-probs, which no retention removed,"),
])
def test_a_damaged_store_ends_replay_and_forks_nothing(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, statement: str,
                                                       what: str) -> None:
    """One byte of one old log-prob made this a fork once: two versions given up and eight rollouts lost, for other kernels."""
    config = make_run_config(tmp_path)
    call = BlockingClient.call
    with LearningDaemon(config) as daemon:
        with acting(daemon.endpoint, config):
            killed_at(daemon, 2)
        with closing(sqlite3.connect(daemon.run_dir / "replay.sqlite", timeout=10, isolation_level=None)) as db:
            assert db.execute(statement).rowcount > 0
        again = daemon.learner()
        monkeypatch.setattr(BlockingClient, "call", lambda self, request, bulk=b"": call(self, request, bulk, timeout_s=2.0))
        with pytest.raises(TimeoutError):  # a process would wait for a replay that comes back
            again.start()
        daemon.thread.join(10)
        assert isinstance(daemon.error, StoreError)
        assert str(daemon.error).startswith(f"{what} in the store is not what was acknowledged")
        run_dir = daemon.run_dir
    assert said == []
    assert versions(run_dir) == [(0, None, "live"), (1, 0, "live"), (2, 1, "live")]
    assert lost(run_dir) == 0


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> tuple[Past, Again]:
    """A committed update, and the same run again."""
    config = make_run_config(tmp_path_factory.mktemp("past"))
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        killed_at(daemon, 1)
        again = daemon.learner()
        loaded = load_newest(again.engine, again.session, again.run_dir, again.committed)  # type: ignore[arg-type]
        again.hold(loaded.notice, again.engine.full_state())
        found = next_past(again.session, 0, None)
        assert found is not None
        return found, rerun(again.engine, config, found, again.anchors.score_live)


def test_every_difference_is_named(past: tuple[Past, Again]) -> None:
    one, again = past
    assert differences(one, again) == []
    outcome = again.outcome
    step = {**outcome.steps[0], "loss": 0.125, "grad_norm": 2.0}
    columns = [(name, dtype, b"\0" + data[1:] if name == "cur" else data) for name, dtype, data in outcome.columns]
    other = again._replace(outcome=replace(outcome, steps=[step], columns=columns), weights_digest="f" * 64,
                           state={**again.state, "rng": "0", "optimizer_steps": 7})
    record = one.record
    assert differences(one, other) == [
        f"step 0: grad_norm was {record.steps[0]['grad_norm']!r}, is 2.0", f"step 0: loss was {record.steps[0]['loss']!r}, is 0.125",
        "column cur differs", "state: optimizer_steps was 1, is 7", f"state: rng was {record.state['rng']}, is 0",
        f"weights digest was {record.weights_digest_out[:16]}, is ffffffffffffffff"]
    skipped = again._replace(outcome=replace(outcome, skipped=True))
    assert differences(one, skipped) == ["it was stepped and is skipped now"]
