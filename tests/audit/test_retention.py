"""What retention may remove, as a property of the pure decision, and what it does to a run."""

import sqlite3
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from replay.audit import audit
from replay.retention import Facts, sweep, what_may_go
from tests.support.run_builder import RunBuilder


@st.composite
def histories(draw: st.DrawFn) -> tuple[Facts, dict[int, list[str]], int]:
    """A history of updates with some skipped, checkpoints at some, rollouts up to `eta` versions old. Also: rollouts by update, and eta."""
    eta = draw(st.integers(0, 4))
    version, versions, columns = 0, [0], []
    checkpoints: dict[int, int] = {}
    rollouts: list[tuple[str, int, int | None]] = []
    by_update: dict[int, list[str]] = {}
    for update in range(1, draw(st.integers(1, 30)) + 1):
        by_update[update] = [f"r{update}.{i}" for i in range(2)]
        rollouts += [(name, max(0, version - draw(st.integers(0, eta))), update) for name in by_update[update]]
        if draw(st.booleans()):
            rollouts.append((f"d{update}", max(0, version - draw(st.integers(0, 9))), None))
        if draw(st.integers(0, 4)):
            version += 1
            versions.append(version)
            columns.append(update)
        if not draw(st.integers(0, 3)) and version not in checkpoints:
            checkpoints[version] = update
    needed = draw(st.sets(st.sampled_from(versions), max_size=3))
    orphaned = draw(st.sets(st.integers(100, 110), max_size=2))
    return Facts(version, checkpoints, sorted(orphaned), versions, needed, rollouts, columns, [(1, 0), (2, version)]), by_update, eta


@given(histories(), st.integers(1, 3), st.integers(0, 3))
def test_what_must_be_kept_is_kept(history: tuple[Facts, dict[int, list[str]], int], keep_checkpoints: int, keep_versions: int) -> None:
    facts, by_update, eta = history
    going = what_may_go(facts, max_staleness=eta, keep_checkpoints=keep_checkpoints, keep_versions=keep_versions)
    if going is None:
        assert not facts.checkpoints
        return
    kept = set(facts.checkpoints) - set(going.checkpoints)
    assert kept == set(sorted(facts.checkpoints)[-keep_checkpoints:])
    oldest = min(kept)
    # Every update after the oldest kept checkpoint can be run again: its rollouts, columns and all versions since are there.
    for update in by_update:
        if update > facts.checkpoints[oldest]:
            assert not set(by_update[update]) & set(going.rollouts)
            assert update not in going.columns
    assert all(version < oldest for version in going.versions)
    assert not set(going.versions) & facts.needed
    recent = [v for v in facts.versions if v > facts.version - eta - 1 - keep_versions]
    assert not set(going.versions) & set(recent)
    assert set(facts.orphaned_checkpoints) <= set(going.checkpoints)


@given(histories())
def test_what_is_old_goes(history: tuple[Facts, dict[int, list[str]], int]) -> None:
    """Otherwise keeping everything would pass."""
    facts, by_update, eta = history
    going = what_may_go(facts, max_staleness=eta, keep_checkpoints=1)
    if going is None:
        return
    version, update = going.line
    old = {v for v in facts.versions if v < version and v < facts.version - eta} - facts.needed
    assert set(going.versions) == old
    assert {name for u, names in by_update.items() if u <= update for name in names} <= set(going.rollouts) | {
        name for name, newest, _ in facts.rollouts if newest >= version}  # fmt: skip
    assert set(going.columns) == {u for u in facts.columns if u <= update}


def test_retain_payloads_keeps_tokens_but_not_weights() -> None:
    facts = Facts(5, {4: 4}, [], [0, 1, 2, 3, 4, 5], set(), [("a", 0, 1)], [1, 2], [])
    assert what_may_go(facts, max_staleness=0, keep_checkpoints=1)[1:] == ([], [0, 1, 2, 3], ["a"], [1, 2], [])  # type: ignore[index]
    going = what_may_go(facts, max_staleness=0, keep_checkpoints=1, retain_payloads=True)
    assert going is not None
    assert going[1:] == ([], [0, 1, 2, 3], [], [], [])


def test_a_stale_rollout_trained_after_the_checkpoint_stays() -> None:
    """Its tokens are older than the checkpoint, its update is not: without its payload that update could not be run again."""
    facts = Facts(4, {3: 3}, [], [3, 4], set(), [("stale", 1, 4), ("dropped", 1, None)], [], [])
    going = what_may_go(facts, max_staleness=3, keep_checkpoints=1)
    assert going is not None
    assert going.rollouts == ["dropped"]


def test_a_run_keeps_its_rows_and_loses_files_and_payloads(pristine: Path) -> None:
    assert sorted(path.name for path in (pristine / "weights").iterdir()) == ["v000001", "v000002", "v000003", "v000004"]
    assert [path.name for path in (pristine / "checkpoints").iterdir()] == ["v000003"]
    db = sqlite3.connect(pristine / "replay.sqlite")
    assert db.execute("SELECT count(*), count(payload) FROM rollouts").fetchone() == (21, 5)
    assert db.execute("SELECT count(*), count(data) FROM update_columns").fetchone() == (24, 6)
    assert db.execute("SELECT count(*), sum(old IS NULL) FROM spans WHERE source IS NOT NULL").fetchone() == (30, 24)
    assert [kind for kind, in db.execute("SELECT kind FROM ledger WHERE kind = 'retention'")] == ["retention", "retention"]
    db.close()


def test_a_crash_before_the_files_went_is_made_good(tmp_path: Path) -> None:
    """Marked and committed, then killed: the folders are garbage that the next sweep removes, and the audit is clean either way."""
    build = RunBuilder(tmp_path / "crash")
    for _ in range(3):
        build.update()
    build.checkpoint()
    (build.run_dir / "weights/v000000").mkdir()
    (build.run_dir / "weights/v000000/model.safetensors").write_bytes(b"left over")
    assert audit(build.run_dir).findings == []
    sweep(build.core.store.db, build.run_dir)
    assert not (build.run_dir / "weights/v000000").exists()
    build.core.store.close()


def test_a_version_that_an_evaluation_needs_stays(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "needed")
    for _ in range(3):
        build.update()
    store = build.core.begin()
    store.db.execute("INSERT INTO evals VALUES (9, 0, 0, 'pending', NULL, NULL, NULL, NULL)")
    store.commit()
    build.checkpoint()
    assert (build.run_dir / "weights/v000000").exists()
    build.core.store.close()


def test_sweep_leaves_alone_what_lies_elsewhere(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "path")
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (str(outside), "../outside", "checkpoints", "."):
        build.core.store.db.execute("INSERT OR REPLACE INTO checkpoints VALUES (7, 1, ?, 'm', 'removed')", (path,))
        sweep(build.core.store.db, build.run_dir)
        assert outside.exists()
        assert (build.run_dir / "checkpoints").exists()
    build.core.store.close()
