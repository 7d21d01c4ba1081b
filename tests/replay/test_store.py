"""Group commit, the chain, faults of the storage, memory rebuilt from tables."""

import json
import resource
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from replay.ledger import FIRST, row_hash
from replay.metrics import MetricsFile
from replay.store import MAX_PENDING_BYTES, Storage, Store
from tests.replay.conftest import Stage
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, rollout
from wire.digest import digest
from wire.errors import StoreError
from wire.messages import PROTOCOL, Commit, Hello, SampleFailure
from wire.record import Failed


def test_the_chain_holds_and_the_hash_is_that_of_the_row(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    learner.score()
    learner.commit(learner.lease())
    prev = FIRST
    for number, (seq, kind, body, before, found) in enumerate(stage.rows("SELECT * FROM ledger ORDER BY seq"), 1):
        assert (seq, before) == (number, prev)
        assert found == row_hash(prev, seq, kind, body) == digest(f"{prev}|{seq}|{kind}|{body}".encode())
        prev = found
    assert prev == stage.core.store.ledger.head
    assert stage.kinds() == [
        "created",
        "hello",
        "version",
        "hello",
        "engine",
        "applied",
        "grant",
        "put",
        "groups",
        "anchors",
        "lease",
        "commit",
    ]


def test_the_hash_of_a_row_in_literal_form() -> None:
    assert row_hash(FIRST, 1, "created", "{}") == "9280f8d9d6441f1c184f30700b14aad2d3408271160ae43180751d925bbea1be"


def test_commits_are_grouped_by_time_and_by_size(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.sqlite", commit_s=0.005)
    assert store.due_in(0.0) is None
    store.begin(10.0)
    store.begin(10.004)
    assert store.due_in(10.004) == pytest.approx(0.001)
    assert store.due_in(10.2) == 0.0
    store.wrote(MAX_PENDING_BYTES)
    assert store.due_in(10.0) == 0.0
    store.commit()
    assert store.due_in(10.3) is None
    store.close()


def test_settings_of_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.sqlite")
    assert [store.one(f"PRAGMA {name}") for name in ("journal_mode", "synchronous", "auto_vacuum", "user_version")] == ["wal", 2, 2, 2]
    store.close()


def test_counters_and_meta_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.sqlite")
    store.begin(0.0)
    store.count("a")
    store.count("a", 2.5)
    store.set_meta("key", "value")
    store.commit()
    store.close()
    again = Store(tmp_path / "x.sqlite")
    assert (again.counters, again.meta("key"), again.meta("other")) == ({"a": 3.5}, "value", None)
    again.close()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x.sqlite")
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(StoreError, match="has schema version 7, this Leeway reads 2"):
        Store(tmp_path / "x.sqlite").close()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"not a database, " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path / "x.sqlite")


class Failing(Storage):
    """Fails the statement that `when` picks, once; every later one would succeed."""

    when: Callable[[str], bool] = staticmethod(lambda sql: False)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if type(self).when(sql):
            type(self).when = staticmethod(lambda sql: False)
            raise StoreError("the store failed: disk I/O error")
        return super().execute(sql, values)


@pytest.mark.parametrize("statement", ["COMMIT", "INSERT INTO ledger", "BEGIN"])
def test_the_first_failure_ends_the_daemon_and_nothing_is_acknowledged(tmp_path: Path, statement: str) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config, storage=Failing) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        orders = actor.pull(want=1).orders
        actor.answer(orders)
        second = actor.pull(want=1).orders
        Failing.when = staticmethod(lambda sql: sql.startswith(statement))
        head = daemon.core.store.one("SELECT count(*) FROM rollouts")
        with pytest.raises(TimeoutError):
            actor.client.call(Hello("actor", "a1", PROTOCOL, config.shared()), timeout_s=1.0)
        daemon.thread.join(10)
        assert isinstance(daemon.error, StoreError)
        for client in (learner, actor):
            client.close()
    with DaemonThread(config) as daemon:
        assert daemon.core.store.one("SELECT count(*) FROM rollouts") == head == 2
        assert daemon.core.sessions.find("actor", "a1") is None
        assert [group.group_id for group in daemon.core.book.in_state("granted")] == [f"{second[0].order_id}.1"]


def test_a_full_disk_ends_the_daemon(tmp_path: Path) -> None:
    config = make_config(tmp_path, learner={"updates": 100, "groups_per_update": 20})
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull()
        actor.pull(want=1)
        pages = daemon.core.store.one("PRAGMA page_count")
        daemon.core.store.db.execute(f"PRAGMA max_page_count = {pages + 2}")
        actor.client.close()
        actor.client = type(actor.client)(daemon.endpoint, patience_s=1.0)  # type: ignore[arg-type]

        def fill() -> None:
            for number in range(200):
                actor.client.call(Hello("actor", f"b{number}", PROTOCOL, config.shared()), timeout_s=2.0)

        with pytest.raises(TimeoutError):
            fill()
        daemon.thread.join(10)
        assert "database or disk is full" in str(daemon.error)
        for client in (learner, actor):
            client.close()


def facts(stage: Stage) -> dict[str, Any]:
    core = stage.core
    return {
        "groups": {g: (v.state, v.actor, v.seq, v.outcomes, v.oldest_version) for g, v in core.book.groups.items()},
        "next_seq": core.book.next_seq,
        "orders": core.orders,
        "queue": list(core.queue),
        "cursor": core.cursor,
        "versions": core.versions,
        "committed": core.committed,
        "updates": (core.stepped, core.skipped, core.next_update),
        "vocabularies": core.vocabularies,
        "counters": core.store.counters,
        "sessions": core.sessions.saved(),
        "epoch": core.sessions.next_epoch,
        "evals": [(e.answered, e.held(), e.actor if e.held() else None) for e in core.evals],
        "evaluated": sorted(core.evaluated),
        "metrics": core.last_metrics,
    }


def test_memory_is_rebuilt_as_it_was(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(sampling={"n": 3}, replay={"min_scored": 1, "max_staleness": 3}, learner={"updates": 9})
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    orders = actor.pull().orders
    assert len(orders) == 8
    for order in orders[:3]:
        actor.put([rollout(order, 0, 0), rollout(order, 1, 0, verdict=Failed("timeout")), rollout(order, 2, 0)])
    learner.score()
    learner.commit(learner.lease())
    actor.pull(want=0)
    actor.put([rollout(orders[3], 0, 1), rollout(orders[3], 1, 1, verdict=Failed("aborted"))])
    actor.put([rollout(orders[4], 0, 1, response_len=2)], [SampleFailure(orders[4].order_id, 1, 1, "no_token")])
    actor.put([rollout(orders[5], s, 1, verdict=Failed("crash")) for s in range(3)])
    actor.put([rollout(orders[6], s, 1) for s in range(3)])
    learner.lease()
    before = facts(stage)
    assert {state for state, *_ in before["groups"].values()} == {"granted", "leased"}
    assert len(before["queue"]) == 1
    stage.reopen()
    assert facts(stage) == before
    assert stage.kinds()[-1] == "opened"


def test_a_prompt_is_neither_skipped_nor_repeated_by_a_restart(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    seen: list[str] = []
    for update in range(4):
        actor.pull(want=0)
        work = actor.pull().orders
        seen += [order.prompt_id for order in work]
        actor.answer(work)
        learner.commit(learner.lease())
        if update % 2:
            stage.reopen()
            learner, actor = stage.learner(), stage.actor()
    assert len(seen) == len(set(seen)) == 8


def test_a_lease_that_a_lower_budget_forbids_is_taken_back(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(learner={"updates": 9})
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    actor.work()
    learner.commit(learner.lease())
    leased = learner.lease()
    assert {head.spans[0].version for head in leased.heads} == {0}
    stage.reopen(replay={"max_staleness": 0})
    learner = stage.learner()
    learner.lease()
    assert stage.rows("SELECT count(*) FROM groups WHERE state = 'expired'") == [(2,)]
    assert stage.rows("SELECT count(*) FROM rollouts WHERE state = 'leased'") == [(0,)]


def test_metrics_lines_that_a_crash_kept_back_are_appended_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def lines() -> list[int]:
        return [json.loads(line)["update"] for line in (tmp_path / "runs/test/metrics.jsonl").read_text().splitlines()]

    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        for _ in range(3):
            actor.pull(want=0)
            actor.work()
            learner.commit(learner.lease(wait_s=2.0))
        learner.close()
        actor.close()
    path = tmp_path / "runs/test/metrics.jsonl"
    assert lines() == [1, 2, 3]
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + whole[1][:17])
    for _ in range(2):
        with DaemonThread(config):
            pass
        assert lines() == [1, 2, 3]
        assert path.read_bytes().splitlines(keepends=True) == whole


def test_a_full_disk_keeps_a_metrics_line_back_and_leaves_no_half_of_it(tmp_path: Path) -> None:
    """The file may grow by 10 bytes: the first write is cut short, the next one fails."""
    file = MetricsFile(tmp_path)
    file.append(['{"update": 1}'])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24, before[1]))
    try:
        with pytest.raises(StoreError, match="metrics.jsonl cannot be written: File too large; the update is committed, and its line is "
                                             "written at the next start"):
            file.append(['{"update": 2}'])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.path.read_text() == '{"update": 1}\n'


def test_a_metrics_line_that_could_not_be_written_ends_replay_and_comes_at_the_next_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = tmp_path / "runs/test/metrics.jsonl"
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull(want=0)
        actor.work()
        leased = learner.lease(wait_s=2.0)
        path.mkdir()
        record, bulk, notice = learner.record(leased)
        with pytest.raises(TimeoutError):
            learner.client.call(Commit(learner.epoch, record, notice), bulk, timeout_s=2.0)
        learner.close()
        actor.close()
    assert isinstance(daemon.error, StoreError)
    assert "metrics.jsonl cannot be written: Is a directory; the update is committed" in str(daemon.error)
    path.rmdir()
    with DaemonThread(config):
        pass
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1]
