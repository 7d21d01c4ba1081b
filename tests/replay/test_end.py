"""How a run ends, and what a live table is told on the way."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replay import daemon as daemon_module
from tests.replay.conftest import Stage
from tests.support.replay import ENGINE, DaemonThread, LightActor, LightLearner, make_config, rollout, stats
from wire.errors import ProtocolError, RefusedError, RunError
from wire.messages import Applied, Checkpointed, Done, Leased, Note
from wire.record import Failed


def test_it_ends_when_the_learner_has_finished_and_every_actor_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "GONE_S", 1.0)
    config = make_config(tmp_path, learner={"updates": 1})
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        gone = LightActor(daemon.endpoint, config, "gone")  # never asks again: it is not waited for
        actor.pull()
        actor.work()
        assert learner.commit(learner.lease(wait_s=2.0)).done
        assert actor.pull().done
        learner.finish()
        daemon.thread.join(10)
        assert not daemon.thread.is_alive()
        assert daemon.error is None
        for client in (learner, actor, gone):
            client.close()


def test_a_finished_run_that_is_resumed_ends_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "GONE_S", 0.0)  # the learner alone is waited for
    config = make_config(tmp_path, learner={"updates": 1})

    def finish(daemon: DaemonThread) -> None:
        learner = LightLearner(daemon.endpoint, config)
        learner.committed = 1
        assert learner.lease() == Done()
        learner.finish()
        learner.close()

    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        actor.work()
        learner.commit(learner.lease(wait_s=2.0))
        finish(daemon)
        daemon.thread.join(10)
        assert not daemon.thread.is_alive()
        learner.close()
        actor.close()
    with DaemonThread(config) as daemon:  # a learner that comes late finds it
        daemon.thread.join(0.6)
        assert daemon.thread.is_alive()
        finish(daemon)
        daemon.thread.join(10)
        assert not daemon.thread.is_alive()
    monkeypatch.setattr(daemon_module, "LATE_LEARNER_S", 0.0)
    with DaemonThread(config) as daemon:  # killed after the learner had gone
        daemon.thread.join(10)
        assert not daemon.thread.is_alive()


def test_a_run_that_cannot_go_on_tells_whoever_waits(tmp_path: Path) -> None:
    config = make_config(tmp_path, sampling={"n": 100}, replay={"min_scored": 1})
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        order = actor.pull(want=1).orders[0]
        with pytest.raises(RefusedError, match="100 of the last 100 verdicts failed"):
            actor.put([rollout(order, sample, 0, verdict=Failed("crash")) for sample in range(100)])
        with pytest.raises(RefusedError, match="100 of the last 100 verdicts failed"):
            learner.lease()  # also who asks a little later
        daemon.thread.join(10)
        assert isinstance(daemon.error, RunError)
        for client in (learner, actor):
            client.close()
    with DaemonThread(config) as daemon:
        assert daemon.core.store.one("SELECT count(*) FROM rollouts") == 100  # what it had is not lost


def test_a_run_that_cannot_go_on_tells_all_who_wait(tmp_path: Path) -> None:
    """Twenty that wait, on connections of their own: their answers are under way when the daemon decides to end."""
    config = make_config(tmp_path, sampling={"n": 100}, replay={"min_scored": 1})
    heard: list[str] = []

    def wait(actor: LightActor) -> None:
        try:
            actor.pull(want=0, wait_s=10.0)
        except RefusedError as error:
            heard.append(str(error))

    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        waiting = [LightActor(daemon.endpoint, config, f"w{number}") for number in range(20)]
        for other in waiting:
            other.pull(want=0)
        threads = [threading.Thread(target=wait, args=(other,)) for other in waiting]
        for thread in threads:
            thread.start()
        actor.pull()
        order = actor.pull(want=1).orders[0]
        while len(daemon.daemon.parked) < 20:
            time.sleep(0.01)
        with pytest.raises(RefusedError):
            actor.put([rollout(order, sample, 0, verdict=Failed("crash")) for sample in range(100)])
        for thread in threads:
            thread.join(10)
        assert len(heard) == 20
        assert all("100 of the last 100 verdicts failed" in reason for reason in heard)
        for client in (learner, actor, *waiting):
            client.close()


def test_a_live_table(tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=1)
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull(want=1)
        found = stats(daemon.endpoint)
        assert found["evals"] == [{"eval": 1, "version": 0, "updates": 0, "answered": 0, "total": 3, "actor": "a0"}]
        assert found["awaited"] == "evaluation 1 of version 0, 0 of 3 answers are there; actor a0 has it, heard of 0 s ago"
        actor.answer()
        actor.work()
        actor.work()
        learner.commit(learner.lease(wait_s=2.0))
        found = stats(daemon.endpoint)
        assert (found["updates"], found["updates_wanted"], found["version"], found["versions"], found["max_staleness"]) == (1, 4, 1, 2, 1)
        assert found["groups"] == {"granted": 0, "complete": 2, "leased": 0, "queued": 0, "groups_per_update": 2}
        assert (found["rollouts"]["trained"], found["rollouts"]["buffered"], found["imbalance"]) == (4, 4, 0)
        assert [(a["name"], a["confirmed"], a["groups"], a["probe_max"]) for a in found["actors"]] == [("a0", 0, 0, 1e-5)]
        assert found["heldout"] == [{"version": 0, "updates": 0, "sampled": 0.5, "greedy": 0.0, "failed": 0}]
        assert (found["metrics"]["update"], found["metrics"]["waits"]) == (1, "nobody")
        assert json.dumps(found)
        for client in (learner, actor):
            client.close()


def test_notes_and_receipts_are_in_the_ledger(stage: Stage) -> None:
    stage.learner()
    actor = stage.actor()
    actor.client.call(Note(actor.epoch, "engine_restarted", "it was killed"))
    actor.pull()
    bodies = {kind: json.loads(body) for kind, body in stage.rows("SELECT kind, body FROM ledger")}
    assert bodies["note"] == {"process": "a0", "kind": "engine_restarted", "detail": "it was killed"}
    assert bodies["applied"] == {"actor": "a0", "version": 0, "probe_mean": 1e-6, "probe_max": 1e-5}
    assert stage.rows("SELECT name, confirmed, probe_max, fingerprint FROM actors") == [("a0", 0, 1e-5, ENGINE)]
    with pytest.raises(ProtocolError, match="not the committed one"):
        actor.client.call(Applied(actor.epoch, 0, "0" * 64, 0.0, 0.0))


def test_a_checkpoint_brings_retention(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(learner={"updates": 20, "keep_checkpoints": 1}, replay={"max_staleness": 0})
    learner, actor = stage.learner(), stage.actor()
    for _ in range(5):
        actor.pull(want=0)
        actor.work()
        learner.score()
        committed = learner.commit(learner.lease())
        learner.client.call(Checkpointed(learner.epoch, committed.version, f"checkpoints/v{committed.version:06d}", "d" * 64))
        stage.core.keep_house_before_commit()
        stage.core.store.commit()
    assert stage.core.sweep_due
    assert stage.rows("SELECT version, state FROM checkpoints") == [
        (1, "removed"),
        (2, "removed"),
        (3, "removed"),
        (4, "removed"),
        (5, "complete"),
    ]
    assert stage.rows("SELECT count(*) FROM rollouts WHERE payload IS NULL") == [(20,)]
    assert "retention" in stage.kinds()


def test_files_go_only_after_the_commit_that_gave_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash before that commit brings back must find its files. Seen from another connection, as a restart would see it."""
    config = make_config(tmp_path, learner={"updates": 20, "keep_checkpoints": 1}, replay={"max_staleness": 0})
    seen: list[tuple[bool, int, int]] = []

    def sweep(db: Any, run_dir: Path) -> None:
        with closing(sqlite3.connect(run_dir / "replay.sqlite")) as other:
            removed, = other.execute("SELECT count(*) FROM versions WHERE NOT retained").fetchone()
        pending, = db.execute("SELECT count(*) FROM versions WHERE NOT retained").fetchone()
        seen.append((daemon.core.store.pending, removed, pending))

    monkeypatch.setattr(daemon_module.retention, "sweep", sweep)
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        for _ in range(3):
            leased: Any = None
            while not isinstance(leased, Leased):  # on a busy machine an actor may hear of the version later
                actor.pull(want=0)
                actor.work()
                learner.score()
                leased = learner.lease(wait_s=2.0)
            version = learner.commit(leased).version
            learner.client.call(Checkpointed(learner.epoch, version, f"checkpoints/v{version:06d}", "d" * 64))
        learner.close()
        actor.close()
    assert seen == [(False, 0, 0), (False, 1, 1), (False, 2, 2), (False, 3, 3)]
