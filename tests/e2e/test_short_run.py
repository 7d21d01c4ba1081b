"""A short run of the demo, with every part real: it learns, its books balance, its audit is clean, its model loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun, books_balance

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(1200)]

UPDATES = 120
SUMMARY_FIELDS = {
    "schema", "status", "updates", "updates_skipped", "version_final", "max_staleness", "max_staleness_trained", "mean_staleness_trained",
    "heldout", "rollouts", "duplicates_refused", "quarantined", "trained_twice", "old_sources", "tokens", "seconds", "actors", "seed",
    "config_digest", "ledger_head",
}


@pytest.fixture(scope="module")
def run(make_run: Callable[..., WholeRun]) -> WholeRun:
    run = make_run("short", f"learner.updates={UPDATES}", "learner.checkpoint_every=40")
    run.start()
    code, out = run.finish()
    assert code == 0, out
    return run


def test_nothing_is_left_running(run: WholeRun) -> None:
    assert run.processes() == []


def test_it_learns(run: WholeRun) -> None:
    heldout = run.summary()["heldout"]
    assert heldout["last"]["sampled"] >= heldout["first"]["sampled"] + 0.10
    assert heldout["last"]["greedy"] > heldout["first"]["greedy"]


def test_the_summary_holds_the_contract(run: WholeRun) -> None:
    summary = run.summary()
    assert set(summary) == SUMMARY_FIELDS
    assert set(summary["rollouts"]) == {"produced", "trained", "dropped", "expired", "lost", "buffered", "leased"}
    assert set(summary["tokens"]) == {"generated", "trained", "generated_during_updates"}
    assert set(summary["seconds"]) == {"total", "anchor", "update", "publish", "wait", "other", "engine_busy"}
    assert (summary["status"], summary["updates"], summary["actors"], summary["trained_twice"]) == ("done", UPDATES, 1, 0)


def test_it_was_asynchronous_within_the_budget(run: WholeRun) -> None:
    summary = run.summary()
    assert summary["max_staleness"] == 2
    assert summary["max_staleness_trained"] <= 2
    assert summary["mean_staleness_trained"] > 0
    assert summary["tokens"]["generated_during_updates"] >= 0.3 * summary["tokens"]["generated"]


def test_the_seconds_add_up(run: WholeRun) -> None:
    seconds = run.summary()["seconds"]
    assert sum(seconds[part] for part in ("anchor", "update", "publish", "wait", "other")) == pytest.approx(seconds["total"], abs=0.5)


def test_old_has_sources_and_none_is_invented(run: WholeRun) -> None:
    summary = run.summary()
    assert set(summary["old_sources"]) <= {"resident", "snapshot"}
    assert summary["old_sources"]["resident"] > 0
    assert sum(summary["old_sources"].values()) == summary["tokens"]["trained"]


def test_the_books_balance(run: WholeRun) -> None:
    rollouts = run.summary()["rollouts"]
    assert books_balance(rollouts)
    assert rollouts["trained"] >= UPDATES * 32 * 8 - rollouts["dropped"].get("unverified", 0)
    assert rollouts["leased"] == 0
    stats = run.tool("stats", "--json")
    assert stats.returncode == 0, stats.stderr
    assert json.loads(stats.stdout)["unaccounted"] == 0


def test_there_is_one_line_of_metrics_per_update(run: WholeRun) -> None:
    lines = run.metrics()
    assert [line["update"] for line in lines if not line["skipped"]] == sorted({line["update"] for line in lines if not line["skipped"]})
    assert sum(not line["skipped"] for line in lines) == UPDATES
    assert lines[-1]["mismatch"]["mean_abs"] < 1e-4


def test_the_audit_is_clean(run: WholeRun) -> None:
    audit = run.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_the_report_is_one_page(run: WholeRun) -> None:
    report = run.tool("report")
    assert report.returncode == 0, report.stderr
    assert "</html>" in (run.dir / "report.html").read_text()


def test_the_model_loads_and_adds(run: WholeRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run.dir / "model")
    config = json.loads((run.dir / "config.json").read_text())
    problems = [json.loads(line) for line in Path(config["task"]["heldout"]).read_text().splitlines()[:64]]
    right = 0
    for problem in problems:
        ids = tokenizer(problem["prompt"], return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1]:]
        right += tokenizer.decode(made, skip_special_tokens=True).strip() == problem["answer"]
    assert right / len(problems) == pytest.approx(run.summary()["heldout"]["last"]["greedy"], abs=0.2)


def test_every_process_has_its_log(run: WholeRun) -> None:
    names = {path.name for path in (run.dir / "logs").iterdir()}
    assert {"replay.log", "learner.log", "actor-a0.log"} <= names
