"""summary.json: exactly the fields that others rely on, recomputed from the store."""

import json
from pathlib import Path

import pytest

from replay.summary import summary, write_summary
from tests.support.run_builder import RunBuilder
from wire.digest import digest_json
from wire.errors import ConfigError

FIELDS = {
    "schema": int, "status": str, "updates": int, "updates_skipped": int, "version_final": int, "max_staleness": int,
    "max_staleness_trained": int,
    "mean_staleness_trained": float, "heldout": {"first": {"sampled", "greedy"}, "last": {"sampled", "greedy"}},
    "rollouts": {"produced", "trained", "dropped", "expired", "lost", "buffered", "leased"}, "duplicates_refused": int, "quarantined": int,
    "trained_twice": int, "old_sources": dict, "tokens": {"generated", "trained", "generated_during_updates"},
    "seconds": {"total", "anchor", "update", "publish", "wait", "other", "engine_busy"}, "actors": int, "seed": int, "config_digest": str,
    "ledger_head": str,
}  # fmt: skip


def test_fields_are_exactly_those_of_the_contract(pristine: Path) -> None:
    found = json.loads((pristine / "summary.json").read_text())
    assert set(found) == set(FIELDS)
    for name, kind in FIELDS.items():
        if isinstance(kind, type):
            assert isinstance(found[name], kind), name
        else:
            assert set(found[name]) == set(kind), name


def test_values(pristine: Path) -> None:
    """By hand: 5 leases of 4 rollouts, one of them skipped; 3 of 16 members not scored or poisoned; 6 tokens each."""
    found = json.loads((pristine / "summary.json").read_text())
    assert (found["status"], found["updates"], found["updates_skipped"], found["version_final"]) == ("done", 4, 1, 4)
    assert found["rollouts"] == {
        "produced": 21, "trained": 13, "dropped": {"aborted": 1, "incomplete_group": 2, "no_signal": 4, "unverified": 1},
        "expired": 0, "lost": 0, "buffered": 0, "leased": 0}  # fmt: skip
    assert (found["max_staleness"], found["max_staleness_trained"]) == (2, 2)
    assert found["mean_staleness_trained"] == pytest.approx(24 / 78, abs=1e-12)
    assert found["tokens"] == {"generated": 126, "trained": 78, "generated_during_updates": 0}
    assert found["old_sources"] == {"resident": 60, "snapshot": 18}
    assert found["heldout"] == {"first": {"sampled": 0.5, "greedy": 1.0}, "last": {"sampled": 0.5, "greedy": 1.0}}
    assert found["seconds"] == {
        "total": 11.0, "anchor": 1.25, "update": 2.5, "publish": 0.625, "wait": 5.0, "other": 0.625, "engine_busy": 9.75}  # fmt: skip
    assert (found["trained_twice"], found["quarantined"], found["duplicates_refused"], found["actors"]) == (0, 1, 0, 1)
    assert found["config_digest"] == digest_json(json.loads((pristine / "config.json").read_text()))


def test_unknown_values_are_null(tmp_path: Path) -> None:
    """A run that has only begun."""
    build = RunBuilder(tmp_path / "young")
    found = summary(build.run_dir, "interrupted")
    assert found["updates"] == 0
    assert found["max_staleness_trained"] is None
    assert found["mean_staleness_trained"] is None
    assert found["seconds"]["total"] is None
    assert found["tokens"] == {"generated": 0, "trained": 0, "generated_during_updates": None}
    assert found["old_sources"] == {}
    build.core.store.close()


def test_trained_tokens_are_those_with_an_anchor(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "missing", updates=1)
    rollout = f"{build.generate(2)[0].order_id}.1.0"
    build.update(missing=rollout)
    found = json.loads((build.finish() / "summary.json").read_text())
    assert found["tokens"]["trained"] == 3 * 6
    assert found["old_sources"] == {"resident": 18}


def test_trained_twice_counts(run: Path, damage) -> None:  # type: ignore[no-untyped-def]
    one, other = (damage("SELECT rollout_id FROM rollouts WHERE update_id = ? ORDER BY 1", update)[0][0] for update in (4, 5))
    damage("UPDATE updates SET record = replace(record, ?, ?) WHERE update_id = 5", other, one)
    assert write_summary(run, "failed")["trained_twice"] == 1
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert not list(run.glob(".summary*"))


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs in"):
        summary(tmp_path / "none", "failed")
