"""No statement between an order and its commit looks at every rollout of the run."""

import sqlite3
from pathlib import Path

import pytest

from replay.store import Storage
from tests.replay.conftest import Stage
from tests.support.replay import FakeClock, make_config, make_core

GROWS = ("rollouts", "r", "spans", "s", "groups", "g", "ledger", "update_columns")
"""The tables of which a long run has many rows, and their short names."""


class Traced(Storage):
    seen: set[str] = set()

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.set_trace_callback(self.seen.add)


def scans(path: Path, statements: set[str]) -> list[tuple[str, str]]:
    """(step, statement) of every full scan."""
    with sqlite3.connect(path) as db:
        plans = [(row[3], sql) for sql in sorted(statements) if sql.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")
                 for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")]
    return [(step, sql) for step, sql in plans if step.startswith("SCAN") and step.split()[1] in GROWS]


@pytest.mark.parametrize("skipped", [False, True])
def test_no_statement_of_a_round_scans_a_table_that_grows(tmp_path: Path, skipped: bool) -> None:
    config, clock = make_config(tmp_path), FakeClock()
    stage = Stage(tmp_path, config, make_core(config, clock=clock, storage=Traced), clock)
    learner, actor = stage.learner(), stage.actor()
    actor.pull()
    Traced.seen.clear()
    actor.work()
    learner.score()
    learner.commit(learner.lease(), skipped=skipped)
    assert any("FROM rollouts" in sql and "reward" in sql for sql in Traced.seen)
    assert scans(stage.core.run_dir / "replay.sqlite", Traced.seen) == []
    stage.core.store.close()
