"""One value of one row changed: it is not handed out as what was acknowledged, neither to be scored, nor leased, nor run again."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay.client import BlockingClient
from tests.replay.conftest import Stage
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config
from tests.support.run_builder import RunBuilder
from wire.errors import StoreError
from wire.messages import GiveBack, Lease, Recall, Recalled, Unscored

ONE = "rollout_id = 't0000003.1.0'"
"""Of the second update: its first two tokens are a version older than the others."""
SPAN = f"{ONE} AND span = 1"

HEAD = {
    "a reward in the head": (
        f"UPDATE rollouts SET head = replace(head, '\"reward\":1.0', '\"reward\":5.0') WHERE {ONE}", "the head of rollout"),
    "a head's digest": (f"UPDATE rollouts SET head_digest = payload_digest WHERE {ONE}", "the head of rollout"),
    "a head that is no text": (f"UPDATE rollouts SET head = CAST(x'ff7b7d' AS TEXT) WHERE {ONE}", "a row .*UTF-8"),
    "a head that is bytes": (f"UPDATE rollouts SET head = 5 WHERE {ONE}", "the head of rollout"),
    "the payload": (f"UPDATE rollouts SET payload = zeroblob(length(payload)) WHERE {ONE}", "the payload of rollout"),
    "a payload's digest": (f"UPDATE rollouts SET payload_digest = head_digest WHERE {ONE}", "the payload of rollout"),
    "an older token called younger": (f"UPDATE spans SET version = 1 WHERE {ONE} AND span = 0", "the spans of rollout"),
    "where a span ends": (f'UPDATE spans SET "end" = 3 WHERE {ONE} AND span = 0', "the spans of rollout"),
    "where a span begins": (f"UPDATE spans SET start = 3 WHERE {SPAN}", "the spans of rollout"),
    "a clean cache": (f"UPDATE spans SET kv_clean = 0 WHERE {SPAN}", "the spans of rollout"),
    "the row's oldest version": (f"UPDATE rollouts SET oldest_version = 1 WHERE {ONE}", "the row of rollout"),
    "the row's newest version": (f"UPDATE rollouts SET newest_version = 0 WHERE {ONE}", "the row of rollout"),
    "the row's length": (f"UPDATE rollouts SET response_len = 5 WHERE {ONE}", "the row of rollout"),
    "the row's sample": (f"UPDATE rollouts SET sample = 1 WHERE {ONE}", "the row of rollout"),
    "the row's reward": (f"UPDATE rollouts SET reward = 5 WHERE {ONE}", "the row of rollout"),
}  # fmt: skip
"""What damages what a learner scores."""
REST = {
    "no reward": (f"UPDATE rollouts SET reward = NULL WHERE {ONE}", "the row of rollout"),
    "another group": (f"UPDATE rollouts SET group_id = 't0000002.1' WHERE {ONE}", "the row of rollout"),
    "no row": (f"DELETE FROM rollouts WHERE {ONE}", "rollout"),
    "old": (f"UPDATE spans SET old = zeroblob(length(old)) WHERE {SPAN}", "the old log-probs of rollout t0000003.1.0, span 1"),
    "old, cut": (f"UPDATE spans SET old = substr(old, 5) WHERE {SPAN}", "the old log-probs of rollout t0000003.1.0, span 1"),
    "no old": (f"UPDATE spans SET old = NULL WHERE {SPAN}", "old log-probs"),
    "old's digest": (f"UPDATE spans SET old_digest = anchor_digest WHERE {SPAN}", "the anchor of rollout"),
    "an anchor's digest": (f"UPDATE spans SET anchor_digest = old_digest WHERE {SPAN}", "the anchor of rollout"),
    "an anchor's source": (f"UPDATE spans SET source = 'snapshot' WHERE {SPAN}", "the anchor of rollout"),
    "no source": (f"UPDATE spans SET source = NULL WHERE {SPAN}", "the anchor of rollout"),
    "an anchor's weights": (f"UPDATE spans SET weights_digest = 'x' WHERE {SPAN}", "the anchor of rollout"),
    "an anchor's trainer": (f"UPDATE spans SET trainer = 'x' WHERE {SPAN}", "the anchor of rollout"),
    "an anchor's place": (f"UPDATE spans SET row = row + 1 WHERE {SPAN}", "the anchor of rollout"),
    "a span's row": (f"DELETE FROM spans WHERE {SPAN}", "the spans of rollout"),
}  # fmt: skip
LEASED = {**HEAD, **REST, "the state": (f"UPDATE rollouts SET state = 'trained' WHERE {ONE}", "the state of rollout"),
          "no payload": (f"UPDATE rollouts SET payload = NULL WHERE {ONE}", "the payload of rollout")}
RECALLED = {
    **HEAD, **REST,
    "the record": ("UPDATE updates SET record = replace(record, '0.001', '0.002') WHERE update_id = 2", "update 2: its record"),
    "the record's digest": ("UPDATE updates SET record_digest = 'x' WHERE update_id = 2", "update 2: its record"),
    "whether it was skipped": ("UPDATE updates SET skipped = 1 WHERE update_id = 2", "update 2: its row"),
    "where it began": ("UPDATE updates SET version_in = 0 WHERE update_id = 2", "an update between versions 1 and 2, before update 3,"),
    "that it was committed": (
        "UPDATE updates SET state = 'lost' WHERE update_id = 2", "an update between versions 1 and 2, before update 3,"),
    "that the last was": ("UPDATE updates SET state = 'lost' WHERE update_id = 3", "an update between versions 2 and 3"),
    "a column": (
        "UPDATE update_columns SET data = zeroblob(length(data)) WHERE update_id = 2 AND name = 'prox'", "update 2: its column prox"),
    "a column's digest": ("UPDATE update_columns SET digest = 'x' WHERE update_id = 2 AND name = 'cur'", "update 2: its column cur"),
    "a column's name": ("UPDATE update_columns SET name = 'x' WHERE update_id = 2 AND name = 'cur'", "update 2: the list of its columns"),
    "the weights of the last version": ("UPDATE versions SET weights_digest = 'x' WHERE version = 3", "the row of version 3"),
    "the weights it made": ("UPDATE versions SET weights_digest = 'x' WHERE version = 2", "update 2: the row of version 2"),
    "no payload": (f"UPDATE rollouts SET payload = NULL WHERE {ONE}", "update 2: a payload or old log-probs, which no retention removed"),
}  # fmt: skip


@pytest.fixture
def build(tmp_path: Path) -> Iterator[RunBuilder]:
    one = RunBuilder(tmp_path / "run")
    one.update()
    yield one
    one.core.store.close()


def damage(build: RunBuilder, statement: str) -> None:
    for sql in ("PRAGMA foreign_keys = OFF", statement, "PRAGMA foreign_keys = ON"):
        build.core.store.db.execute(sql)


def refuses(build: RunBuilder, request: Lease | Recall | Unscored, what: str) -> None:
    with pytest.raises(StoreError, match=f"{what}.* in the store is not what was acknowledged: .*leeway replay --verify RUN"):
        build.ask(request)


@pytest.mark.parametrize("name", HEAD)
def test_it_is_not_scored(build: RunBuilder, name: str) -> None:
    statement, what = HEAD[name]
    build.generate(2)
    damage(build, statement)
    refuses(build, Unscored(build.learner, 1, 100), what)


@pytest.mark.parametrize("when", ["before the lease", "before it is leased again", "before a restart"])
@pytest.mark.parametrize("name", LEASED)
def test_it_is_not_leased(build: RunBuilder, name: str, when: str) -> None:
    statement, what = LEASED[name]
    build.generate(2)
    build.anchor()
    if when == "before it is leased again":
        build.ask(Lease(build.learner, 1, 0.0))
    damage(build, statement)
    if when == "before a restart":
        if name in ("a head that is no text", "no row"):
            return  # found as it starts; not there for it at all: `leeway replay --verify` finds that
        build.resume()
    refuses(build, Lease(build.learner, 1, 0.0), what)


@pytest.mark.parametrize("name", RECALLED)
def test_it_is_not_run_again(build: RunBuilder, name: str) -> None:
    statement, what = RECALLED[name]
    build.checkpoint()
    build.update()
    build.update()
    reply, _ = build.ask(Recall(build.learner, 1, 1))
    assert isinstance(reply, Recalled)
    damage(build, statement)
    refuses(build, Recall(build.learner, 1, 1), what)


def test_what_retention_removed_is_refused_and_no_damage(build: RunBuilder) -> None:
    """The learner forks then: it holds a checkpoint from before."""
    build.update()
    damage(build, f"UPDATE rollouts SET payload = NULL WHERE {ONE}")
    refuses(build, Recall(build.learner, 1, 1), "update 2: a payload or old log-probs, which no retention removed")
    build.core.begin().record("retention", {"version": 2, "update": 2})
    with pytest.raises(AssertionError, match="not retained: what update 2 was trained on"):
        build.ask(Recall(build.learner, 1, 1))


@pytest.mark.parametrize(("statement", "what"), [
    ("UPDATE eval_rollouts SET head = replace(head, '\"reward\":0.0', '\"reward\":0.5') WHERE rollout_id = ?", "the head of rollout"),
    ("UPDATE eval_rollouts SET reward = 0.5 WHERE rollout_id = ?", "the row of rollout"),
    ("UPDATE eval_rollouts SET reward = NULL WHERE rollout_id = ?", "the row of rollout"),
    ("UPDATE eval_rollouts SET group_id = 'x' WHERE rollout_id = ?", "the row of rollout"),
    ("UPDATE eval_rollouts SET eval_id = 1 WHERE rollout_id = ?", "a greedy response of the groups"),
    ("DELETE FROM eval_rollouts WHERE rollout_id = ?", "a greedy response of the groups"),
])
def test_a_greedy_baseline_that_rotted_is_subtracted_from_nothing(make_stage: Callable[..., Stage], statement: str, what: str) -> None:
    stage = make_stage(recipe={"estimator": "remax"})
    learner, actor = stage.learner(), stage.actor()
    actor.pull(want=0)
    for _ in range(2):
        actor.work()
        learner.score()
        if stage.core.committed == 0:
            learner.commit(learner.lease())
    baseline = max(rollout for rollout, in stage.rows("SELECT rollout_id FROM eval_rollouts"))
    stage.core.store.db.execute(statement, (baseline,))
    with pytest.raises(StoreError, match=what):
        learner.lease()
    first = min(rollout for rollout, in stage.rows("SELECT rollout_id FROM eval_rollouts"))
    stage.core.store.db.execute(statement, (first,))
    with pytest.raises(StoreError, match="a greedy response of its groups" if "the groups" in what else what):
        learner.client.call(Recall(learner.epoch, 0, 0))


@pytest.mark.parametrize("statement", [
    "UPDATE groups SET work_order = replace(work_order, '\"answer\"', '\"answed\"') WHERE state = ?",
    "UPDATE groups SET work_order_digest = 'x' WHERE state = ?",
])
@pytest.mark.parametrize("state", ["granted", "queued"])
def test_a_prompt_or_its_answer_that_rotted_is_not_asked(stage: Stage, statement: str, state: str) -> None:
    stage.learner()
    actor = stage.actor()
    actor.pull()
    actor.pull(want=2)
    if state == "queued":
        actor.client.call(give_back(actor))
    stage.core.store.db.execute(statement, (state,))
    with pytest.raises(StoreError, match=r"the work order of group t0000000\.\d in the store is not what was acknowledged"):
        stage.reopen()


def give_back(actor: LightActor) -> GiveBack:
    return GiveBack(actor.epoch, list(actor.holding), "stopping")


def test_the_daemon_ends_and_says_so(tmp_path: Path) -> None:
    """No refusal: a learner that is refused forks, and blames the machine."""
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        actor.work()
        learner.score()
        learner.commit(learner.lease(wait_s=2.0))
        with closing(sqlite3.connect(daemon.run_dir / "replay.sqlite")) as db:
            db.execute("UPDATE spans SET old = zeroblob(length(old))")
            db.commit()
        assert isinstance(learner.client, BlockingClient)
        with pytest.raises(TimeoutError):
            learner.client.call(Recall(learner.epoch, 0, 0), timeout_s=1.0)
        daemon.thread.join(10)
        assert isinstance(daemon.error, StoreError)
        assert str(daemon.error).startswith("update 1: the old log-probs of rollout t0000000.1.0, span 0, in the store is not what was")
        learner.close()
        actor.close()
    with sqlite3.connect(daemon.run_dir / "replay.sqlite") as db:
        assert db.execute("SELECT state FROM updates").fetchall() == [("committed",)]
    db.close()
