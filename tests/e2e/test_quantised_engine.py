"""`configs/quantised-engine.toml`: an engine rounded to fp8. IcePop masks, the group-mass cap cuts, the loss is what the store says."""

import json
from collections.abc import Callable

import pytest

from tests.support.recompute import icepop_gmc_score, open_store, read_update
from tests.support.whole_run import WholeRun

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(make_run: Callable[..., WholeRun]) -> WholeRun:
    run = make_run("rounded", "learner.updates=8", "eval.prompts=8", over=("quantised-engine.toml",))
    run.start()
    code, out = run.finish()
    assert code == 0, out
    return run


def test_tokens_are_masked_and_groups_are_capped(run: WholeRun) -> None:
    lines = run.metrics()
    assert sum(line["masked"] for line in lines) > 0
    assert sum(line["capped"] for line in lines) > 0
    assert all(1e-4 < line["mismatch"]["mean_abs"] < 0.2 for line in lines)  # 1e-6 with an engine that is not rounded


def test_the_logged_loss_is_what_the_store_says(run: WholeRun) -> None:
    config = json.loads((run.dir / "config.json").read_text())["recipe"]
    db, masked, cut = open_store(run.dir), 0, 0
    for (update,) in db.execute("SELECT update_id FROM updates WHERE NOT skipped").fetchall():
        found = read_update(db, update)
        loss, weights, groups = icepop_gmc_score(found["rows"], low=config["engine_low"], high=config["engine_high"],
                                                 cap_per_response=config["group_mass_cap"], constant=config["constant"])
        (step,) = found["record"]["steps"]
        assert step["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert [w for row in found["rows"] for w in row["weight"]] == pytest.approx(weights, rel=1e-5)
        masked, cut = masked + weights.count(0.0), cut + groups
    assert masked > 0
    assert cut > 0


def test_the_audit_is_clean(run: WholeRun) -> None:
    audit = run.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
