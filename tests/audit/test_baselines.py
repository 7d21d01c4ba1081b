"""The audit of greedy baselines: clean where nobody touched them, and every planted fault is found."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.audit import audit
from replay.recall import recall
from tests.support.run_builder import RunBuilder
from wire.record import Failed, Scored

Sql = Callable[..., list[tuple]]
FIRST = "SELECT rollout_id FROM eval_rollouts WHERE eval_id = 0 ORDER BY 1"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four updates, one skipped; a group whose greedy response has no verdict; retention."""
    build = RunBuilder(tmp_path_factory.mktemp("audit") / "remax", recipe={"estimator": "remax"})
    build.update()
    build.update()
    build.checkpoint()
    build.generate(verdict=lambda sample: Scored(1.0))
    build.update(skipped=True)
    build.generate(1, verdict=lambda sample: Failed("timeout") if sample == 2 else Scored(1.0))
    build.update()
    build.checkpoint()
    build.update()
    return build.finish()


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "remax"))


def test_nobody_touched_it(pristine: Path) -> None:
    found = audit(pristine)
    assert found.findings == []
    assert (found.checked["rollouts"], found.checked["greedy baselines"]) == (22, 11)
    with sqlite3.connect(pristine / "replay.sqlite") as db:
        assert recall(db, 5)[0].record.greedy_rewards == [0.0, 0.0]
        assert db.execute("SELECT state, reason, count(*) FROM groups WHERE purpose = 'train' GROUP BY 1, 2 ORDER BY 1, 2").fetchall() == [
            ("dropped", "incomplete_group", 1), ("dropped", "no_signal", 2), ("trained", None, 8)]
    db.close()


def reward(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET reward = 7 WHERE rollout_id = ?", name)
    return "the row says"


def head_and_reward(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET reward = 7, head = json_set(head, '$.verdict.reward', 7.0) WHERE rollout_id = ?", name)
    return "the head was changed"


def gone(sql: Sql, name: str) -> str:
    sql("DELETE FROM eval_rollouts WHERE rollout_id = ?", name)
    return "it has no row"


def unheard_of(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET rollout_id = 't9999999.1.2' WHERE rollout_id = ?", name)
    return "no ledger row"


def sampled(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET head = json_set(head, '$.sampling.temperature', 1.0) WHERE rollout_id = ?", name)
    return "sampled at temperature 1.0, which is not greedy"


def spans(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET head = json_set(head, '$.spans[0][2]', 1) WHERE rollout_id = ?", name)
    return "do not cover"


def no_head(sql: Sql, name: str) -> str:
    sql("UPDATE eval_rollouts SET head = 'x' WHERE rollout_id = ?", name)
    return "is not a rollout head"


def among_the_rows(sql: Sql, name: str) -> str:
    sql("UPDATE rollouts SET head = json_set(head, '$.sampling.temperature', 0.0) WHERE rollout_id = ?", f"{name[:-1]}0")
    return "sampled at temperature 0"


@pytest.mark.parametrize("plant", [reward, head_and_reward, gone, unheard_of, sampled, spans, no_head, among_the_rows])
def test_a_planted_fault_is_found(run: Path, plant: Callable[[Sql, str], str]) -> None:
    with sqlite3.connect(run / "replay.sqlite") as db:
        def sql(query: str, *values: object) -> list[tuple]:
            return db.execute(query, values).fetchall()

        name = sql(FIRST)[0][0]
        text = plant(sql, name)
    db.close()
    assert any(finding.kind == "greedy" and text in finding.text for finding in audit(run).findings)


def test_what_an_update_subtracted_is_held_against_what_is_stored(run: Path) -> None:
    with sqlite3.connect(run / "replay.sqlite") as db:
        name, = db.execute("SELECT json_extract(record, '$.group_ids[0]') FROM updates WHERE update_id = 1").fetchone()
        db.execute("DELETE FROM eval_rollouts WHERE rollout_id = ?", (f"{name}.2",))
    db.close()
    found = [finding for finding in audit(run).findings if finding.ids == ["update 1"]]
    assert [finding.text for finding in found] == ["the greedy rewards of its record are not those stored with its groups"]


def test_a_greedy_response_past_the_budget_is_a_finding(run: Path) -> None:
    with sqlite3.connect(run / "replay.sqlite") as db:
        name, = db.execute("SELECT json_extract(record, '$.group_ids[0]') FROM updates WHERE update_id = 5").fetchone()
        db.execute("UPDATE eval_rollouts SET head = json_set(head, '$.spans[0][0]', 0) WHERE rollout_id = ?", (f"{name}.2",))
    db.close()
    assert any(finding.kind == "budget" and finding.ids == [f"{name}.2", "update 5"] for finding in audit(run).findings)
