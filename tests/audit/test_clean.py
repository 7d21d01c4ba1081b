"""The audit finds nothing in a run that nobody touched, whatever that run went through."""

import json
import sqlite3
from pathlib import Path

import pytest

from replay.audit import audit
from replay.reader import find_run
from tests.support.run_builder import RunBuilder
from wire.errors import ConfigError
from wire.record import Failed, Scored


def test_a_finished_run_is_clean(pristine: Path) -> None:
    found = audit(pristine)
    assert found.findings == []
    assert found.checked == {
        "ledger rows": 63, "rollouts": 21, "spans": 38, "updates": 5, "versions": 5, "checkpoints": 2, "evaluations": 2,
        "greedy baselines": 0}  # fmt: skip


def test_what_retention_removed_is_a_note(pristine: Path) -> None:
    assert audit(pristine).notes == [
        "not retained: 1 of 2 checkpoints",
        "not retained: the files of 1 of 5 versions (v0 to v0)",
        "not retained: the tokens and log-probs of 16 rollouts and the columns of 3 updates (before version 3)",
    ]


def test_a_fork_and_what_it_lost(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "forked", updates=4)
    build.update()
    build.checkpoint()
    build.update()
    build.generate(1)
    build.update()
    build.fork(1)
    while not build.core.training_done:
        build.update()
    run_dir = build.finish()
    assert audit(run_dir).findings == []
    with sqlite3.connect(run_dir / "replay.sqlite") as db:
        assert db.execute("SELECT state, count(*) FROM rollouts GROUP BY state ORDER BY 1").fetchall() == [("lost", 8), ("trained", 16)]
        assert db.execute("SELECT version, state FROM versions ORDER BY 1").fetchall() == [
            (0, "live"), (1, "live"), (2, "orphaned"), (3, "orphaned"), (4, "live"), (5, "live"), (6, "live"), (7, "live")]  # fmt: skip
    db.close()


def test_groups_dropped_for_want_of_contrast(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "dynamic", updates=2, recipe={"dynamic_sampling": True}, min_scored=2)
    build.generate(2, verdict=lambda sample: Scored(1.0))
    build.update()
    build.generate(1, verdict=lambda sample: Scored(0.5))
    build.checkpoint()
    build.update()
    run_dir = build.finish()
    assert audit(run_dir).findings == []
    summary = json.loads((run_dir / "summary.json").read_text())["rollouts"]
    assert (summary["produced"], summary["trained"], summary["dropped"]) == (14, 8, {"no_contrast": 6})


def test_a_resume_with_another_budget(tmp_path: Path) -> None:
    """Tokens of an old budget stay within it, although the config now says less."""
    build = RunBuilder(tmp_path / "resumed", updates=4)
    for _ in range(2):
        build.update()
    build.generate(2, version=1)
    build.update()
    build.resume(max_staleness=0)
    build.generate(2, version=3)
    build.update()
    run_dir = build.finish("interrupted")
    assert audit(run_dir).findings == []
    with sqlite3.connect(run_dir / "replay.sqlite") as db:
        db.execute("DELETE FROM ledger WHERE seq > (SELECT min(seq) FROM ledger WHERE kind = 'opened') - 1")
        db.commit()
        assert any(finding.kind == "budget" for finding in audit(run_dir).findings)
    db.close()


def test_missing_anchors_that_were_masked(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "missing", updates=1)
    orders = build.generate(2)
    build.update(missing=f"{orders[0].order_id}.1.0")
    assert audit(build.finish()).findings == []


def test_a_live_run_with_an_open_transaction(tmp_path: Path) -> None:
    """The writer holds its lock and has uncommitted rows: readers see the last commit and do not wait."""
    build = RunBuilder(tmp_path / "live")
    build.update()
    build.pull(1)
    build.core.begin().db.execute("UPDATE rollouts SET state = 'lost'")
    found = audit(build.run_dir)
    assert found.findings == []
    assert found.notes == ["no summary.json: the run is going on or was killed, so a cut ledger tail shows only against checkpoints"]
    build.core.store.close()


def test_failed_groups_are_asked_again(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "failed", updates=1)
    build.generate(2, verdict=lambda sample: Failed("timeout"))
    build.update()
    run_dir = build.finish()
    assert audit(run_dir).findings == []
    with sqlite3.connect(run_dir / "replay.sqlite") as db:
        assert db.execute("SELECT state, reason, count(*) FROM rollouts GROUP BY 1, 2").fetchall() == [
            ("dropped", "incomplete_group", 4), ("trained", None, 4)]  # fmt: skip
    db.close()


def test_a_missing_run_names_those_that_exist(pristine: Path) -> None:
    with pytest.raises(ConfigError, match=f"^no run at {pristine.parent}/smal: {pristine.parent} holds small$"):
        audit(pristine.parent / "smal")


def test_a_missing_bare_name_names_the_runs_in_runs(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^no run at nosuch: there are no runs in . or runs$"):
        audit(find_run("nosuch"))
    Path("runs").symlink_to(pristine.parent)
    with pytest.raises(ConfigError, match="^no run at nosuch: runs holds small$"):
        audit(find_run("nosuch"))
