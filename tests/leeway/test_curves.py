"""The runs behind docs/recipes.md: which there are, when one is run again, and how they are drawn. No run is started here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import scripts.curves.__main__ as program
from configs.load import load
from scripts.bench.runs import Measured, finished
from scripts.curves import rows
from scripts.curves.draw import cell, spark
from scripts.curves.plan import CONFIG, LR, ROOT, UPDATES, Case, cases, pointless, sets, settings, source_digest

STALE = Case("dr_grpo", "none", 4)


def line(reward: float, **other: Any) -> dict[str, Any]:
    return {"reward": reward, "skipped": False, "masked": 0.25, "clipped": 0.5, "mismatch": {"ess": 1.0}, "staleness_ratio": {"ess": 0.5},
            "time": 10.0 * reward, **other}


def run(first: float, last: float) -> Measured:
    heldout = {"first": {"sampled": first, "greedy": 0.6}, "last": {"sampled": last, "greedy": 0.7}}
    summary = {"updates": 2, "updates_skipped": 1, "heldout": heldout, "mean_staleness_trained": 1.234}
    return Measured("x", summary, [line(0.49), {"reward": 0.0, "skipped": True, "time": 6.0}, line(0.7)], 1.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The harness on a scratch page and a scratch file, with runs that answer at once; the list fills with the names of those started."""
    names: list[str] = []

    def measure(name: str, configs: list[str], *, limit_s: float, **settings: object) -> Measured:
        names.append(name)
        (tmp_path / "runs" / f"bench-{name}").mkdir(parents=True, exist_ok=True)
        if settings["recipe.name"] == "gspo":
            raise RuntimeError("gspo: exit 1\nthe last word")
        if settings["recipe.name"] == "tis":
            raise RuntimeError(f"{name}: exit 130\nstopped")
        return run(0.5, 0.4 if settings["recipe.name"] == "grpo" else 0.6)

    monkeypatch.setattr(rows.read, "__defaults__", (tmp_path / "curves.jsonl",))
    monkeypatch.setattr(rows.keep, "__defaults__", (tmp_path / "curves.jsonl",))
    monkeypatch.setattr(program, "measure", measure)
    monkeypatch.setattr(program, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(program, "PAGE", tmp_path / "recipes.md")
    return names


def test_every_case_is_a_config_that_loads_as_the_case_says() -> None:
    for case in cases():
        config = load([ROOT / CONFIG], sets(settings(case, 7)))
        assert (config.recipe.name, config.actor.round_weights, config.replay.max_staleness, config.learner.updates) == (*case, 7)


def test_only_what_leaves_staleness_alone_is_kept_to_budget_0() -> None:
    assert {(case.recipe, case.budget) for case in cases() if pointless(case)} == {("rloo", 4), ("online_icepop", 4)}


def test_no_right_answer_is_overlong_in_dapos_run() -> None:
    config = load([ROOT / CONFIG], sets(settings(Case("dapo", "none", 4), 1)))
    assert config.recipe.overlong == 0.2 and config.sampling.max_new_tokens - max(1, round(0.2 * config.sampling.max_new_tokens)) == 4


def test_a_digest_tells_settings_apart() -> None:
    digests = [source_digest(case, 60) for case in (STALE, STALE._replace(budget=0), STALE._replace(engine="fp8"), Case("grpo", "none", 4))]
    assert len({*digests, source_digest(STALE, 61)}) == 5
    assert digests[0] == source_digest(STALE, 60)


def test_a_row_takes_the_place_of_the_older_one_in_the_order_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    for case, updates in ((STALE, 1), (Case("grpo", "none", 4), 2), (STALE, 3)):
        rows.keep(case, "abc", {"updates": updates}, path)
    written = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(row["recipe"], row["updates"]) for row in written] == [("grpo", 2), ("dr_grpo", 3)]
    assert rows.read(path)[STALE]["source"] == "abc"


def test_what_a_row_holds() -> None:
    row = rows.learned(run(0.5, 0.6), 1e-4)
    assert row["lr"] == 1e-4
    assert row["reward"] == [0.49, 0.0, 0.7] and (row["updates"], row["skipped"]) == (2, 1)
    assert (row["staleness"], row["masked"], row["clipped"], row["engine_ess"], row["staleness_ess"]) == (1.23, 0.25, 0.5, 1.0, 0.5)


@pytest.mark.parametrize(("values", "points", "bars"), [
    ([0.0, 0.36, 0.4, 0.49, 0.52, 0.64, 1.0], 7, "▁▁▂▄▅██"), ([0.35, 0.67, 0.36, 0.36], 2, "▅▁"), ([0.8], 12, "█"), ([], 12, "")])
def test_bars(values: list[float], points: int, bars: str) -> None:
    assert spark(values, points) == bars


def test_cells() -> None:
    short = rows.learned(run(0.5, 0.6), LR)
    assert cell(None, None) == "not run" and cell(None, "for budget 0") == "for budget 0"
    assert cell({**short, "updates": UPDATES, "warmup": 3}, None) == "▄▁█<br>0.50 → 0.60<br>warm-up 3"
    assert cell({**short, "updates": UPDATES, "lr": 5e-5}, None) == "▄▁█<br>0.50 → 0.60<br>lr 5e-05"
    without = {key: value for key, value in short.items() if key != "lr"}  # measured before rows had one: with the usual rate
    assert cell({**without, "updates": UPDATES}, None) == "▄▁█<br>0.50 → 0.60"
    assert cell({"failed": "no memory"}, None) == "failed: no memory"
    assert cell(short, None) == "▄▁█<br>0.50 → 0.60<br>2 updates" and cell({**short, "updates": UPDATES}, None) == "▄▁█<br>0.50 → 0.60"


def test_a_measured_case_is_not_run_again_and_a_failed_one_is(started: list[str]) -> None:
    chosen = ["--engine", "none", "--budget", "4", "--only", "dr_grpo", "--only", "gspo", "--only", "rloo"]
    assert program.main(chosen) == 1 and started == ["curve-dr-grpo-none-4", "curve-gspo-none-4"]
    assert program.main(chosen) == 1 and started[2:] == ["curve-gspo-none-4"]
    assert rows.read()[Case("gspo", "none", 4)]["failed"] == "the last word" and rows.read()[STALE]["lr"] == LR
    assert program.main([*chosen, "--again"]) == 1 and len(started) == 5
    assert program.main([*chosen[:6], "--updates", "61"]) == 0 and len(started) == 6


def test_a_cell_names_the_rate_of_a_recipe_that_needs_its_own(started: list[str], tmp_path: Path) -> None:
    assert program.main(["--only", "gppo", "--engine", "none", "--budget", "4", "--updates", str(UPDATES)]) == 0
    assert rows.read()[Case("gppo", "none", 4)]["lr"] == 5e-5
    assert "| `gppo` | ▄▁█<br>0.50 → 0.60<br>lr 5e-05<br>2 updates |" in (tmp_path / "recipes.md").read_text()


def test_a_recipe_that_fell_is_a_finding_and_the_folder_of_a_good_run_goes(started: list[str], tmp_path: Path) -> None:
    assert program.main(["--only", "grpo", "--engine", "fp8", "--budget", "0"]) == 3
    assert program.main(["--only", "grpo", "--engine", "fp8", "--budget", "0"]) == 3 and len(started) == 1
    assert list((tmp_path / "runs").iterdir()) == []
    assert program.main(["--only", "dapo", "--engine", "fp8", "--budget", "0", "--keep"]) == 0
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["bench-curve-dapo-fp8-0"]
    assert "| `grpo` | not run | not run | not run | ▄▁█<br>0.50 → 0.40<br>2 updates |" in (tmp_path / "recipes.md").read_text()


def test_runs_side_by_side_keep_every_row(started: list[str]) -> None:
    some = ["dapo", "dr_grpo", "grpo", "grpo_kl", "icepop"]
    assert program.main([*(word for name in some for word in ("--only", name)), "--jobs", "4"]) == 3
    assert sorted(started) == sorted(f"curve-{name}-{engine}-{budget}".replace("_", "-")
                                     for name in some for engine in ("none", "fp8") for budget in (0, 4))
    assert len(rows.read()) == 20


def test_an_interrupted_run_is_no_result(started: list[str]) -> None:
    assert program.main(["--engine", "none", "--budget", "4", "--only", "tis", "--only", "dr_grpo"]) == 130
    assert len(started) == 2 and set(rows.read()) == {STALE}


def test_a_run_that_hangs_is_asked_to_stop() -> None:
    words = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit('in order')); print('begun', flush=True); time.sleep(60)"
    assert finished([sys.executable, "-c", "print(1); raise SystemExit(3)"], 60) == (3, "1\n", "")
    with pytest.raises(RuntimeError, match=r"(?s)begun.*in order.*not done after 2 s: stopped"):
        finished([sys.executable, "-c", words], 2)
