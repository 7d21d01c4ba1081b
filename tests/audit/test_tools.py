"""The read-only commands: exit codes, one-line errors, what they print, and that a writer's lock does not stop them."""

import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from leeway import audit_command, drift, report, stats_command
from tests.support.run_builder import RunBuilder


def test_stats_of_a_finished_run(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stats_command.main([str(pristine)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("eval"))
    assert lines["books"] == (
        "produced 21 = trained 13 + dropped(aborted) 1 + dropped(incomplete_group) 2 + dropped(no_signal) 4 + dropped(unverified) 1 + "
        "expired 0 + lost 0 + buffered 0 + leased 0  [balanced]"
    )
    assert lines["updates"] == "4 of 4, 1 skipped, 0 lost"
    assert lines["staleness"] == "budget 2, trained mean 0.308, oldest 2; tokens by age: 0 56, 1 20, 2 2"
    assert lines["versions"] == "5 committed, newest v4, 4 retained, 0 orphaned"
    assert lines["sources"] == "resident 60, snapshot 18; 0 spans wait for an anchor"
    command, rollout = lines["rollout"].split(": ")[1].split(" --rollout ")
    assert command == "leeway audit small"
    assert audit_command.main([str(pristine), "--rollout", rollout]) == 0


def test_stats_say_how_far_off_policy_the_newest_update_was(run: Path, damage: Callable[..., object]) -> None:
    def factor(size: float) -> dict[str, float]:
        return {"mean_abs": size, "ess": 0.5}

    metrics = {"mismatch": factor(0.01), "staleness_ratio": factor(0.2), "update_ratio": factor(0.0), "total_ratio": factor(0.21),
               "masked": 0.25, "clipped": 0.125, "ess_corrected": 0.75, "loss": 1.0,
               "lags": {"0": {"mismatch": factor(0.02), "masked": 0.0}, "2": {"mismatch": factor(0.005), "masked": 0.5}}}
    damage("UPDATE updates SET record = json_set(record, '$.metrics', json(?)) WHERE NOT skipped", json.dumps(metrics))
    values = stats_command.stats(run)
    update = values["drift"]["update"]
    assert values["drift"] == {"update": update, **{key: value for key, value in metrics.items() if key != "loss"}}
    assert [line.split(maxsplit=1)[1] for line in stats_command.text("small", values).splitlines() if line.startswith("drift")] == [
        f"update {update}: mean |log-ratio| old/mu 0.01, prox/old 0.2, cur/prox 0, prox/mu 0.21; "
        "masked 0.25, clipped 0.125, ESS of the weights 0.75",
        "of age 0: mean |log-ratio| old/mu 0.02; masked 0", "of age 2: mean |log-ratio| old/mu 0.005; masked 0.5"]


def test_the_report_says_it_by_age_over_all_updates(run: Path, damage: Callable[..., object]) -> None:
    """Means by tokens: 10 tokens of |log| .1 and 30 of .3 are 40 of .25."""
    def lag(tokens: int, size: float, masked: float) -> dict[str, object]:
        sizes = {name: {"mean_abs": size * place} for place, name in enumerate(drift.FACTORS)}
        return {"tokens": tokens, **sizes, "masked": masked, "clipped": 0.5, "ess_corrected": 0.25}

    one, two = {"lags": {"2": lag(10, 0.1, 0.0), "0": lag(4, 0.5, 0.0)}}, {"lags": {"2": lag(30, 0.3, 1.0)}}
    zero, old = drift.by_age([one, {"loss": 1.0}, two])
    assert zero == [0, 4, 0, 0.5, 1.0, 1.5, 0, 0.5, 0.25]
    assert old == pytest.approx([2, 40, 0, 0.25, 0.5, 0.75, 0.75, 0.5, 0.25])
    damage("UPDATE updates SET record = json_set(record, '$.metrics', json(?)) WHERE NOT skipped", json.dumps(two))
    rows = re.findall(r"<tr><td>2</td><td class=n>\d+</td>(.*?)</tr>", report.write_report(run).read_text())
    assert rows == ["".join(f"<td class=n>{cell}</td>" for cell in ("0", "0.3", "0.6", "0.9", "1", "0.5", "0.25"))]


def test_stats_of_a_run_before_its_first_version_say_none_of_it(tmp_path: Path) -> None:
    values = stats_command.stats(RunBuilder(tmp_path / "live").run_dir)
    values["versions"]["newest"] = None
    values["actors"] = [{"name": "a0", "epoch": 1, "confirmed": -1, "rollouts": 0, "probe_mean": None, "probe_max": None}]
    shown = stats_command.text("live", values)
    assert "newest none," in shown and "epoch 1, version none, 0 rollouts" in shown
    assert "None" not in shown and "--rollout" not in shown


def test_stats_while_a_writer_holds_its_lock(tmp_path: Path) -> None:
    """An open transaction in replay, with rows that are not committed: readers see the state before it, at once."""
    build = RunBuilder(tmp_path / "live")
    build.update()
    build.generate(1)
    store = build.core.begin()
    store.db.execute("UPDATE rollouts SET state = 'lost'")
    with pytest.raises(sqlite3.OperationalError, match="locked"), sqlite3.connect(build.run_dir / "replay.sqlite", timeout=0) as other:
        other.execute("BEGIN IMMEDIATE")
    other.close()
    found = stats_command.stats(build.run_dir)
    assert found["rollouts"]["produced"] == 6
    assert found["rollouts"]["buffered"] == 2
    assert found["unaccounted"] == 0
    assert found["unscored_spans"] == 4
    store.close()


def test_stats_of_books_that_do_not_balance(run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    damage("UPDATE rollouts SET state = 'nowhere' WHERE state = 'trained'")
    assert stats_command.main([str(run)]) == 3
    assert "[NOT BALANCED: 13 unaccounted for]" in capsys.readouterr().out


def test_stats_of_a_rollout_that_was_trained_twice(run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    damage("UPDATE updates SET record = json_set(record, '$.rollout_ids[#]', (SELECT json_extract(record, '$.rollout_ids[0]') FROM updates "
           "WHERE update_id = 1)) WHERE update_id = 4")
    assert stats_command.main([str(run)]) == 3
    out = capsys.readouterr().out
    assert "trained_twice 1" in out and "[balanced]" in out


def test_stats_and_report_name_the_alarms(run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    assert stats_command.stats(run)["alarms"] == {}
    for update, alarms in ((1, {"ess": "0.21"}), (4, {"weight_mean": "far", "ess": "0.25 <x>"})):
        damage("UPDATE updates SET record = json_set(record, '$.metrics.alarms', json(?)) WHERE update_id = ?", json.dumps(alarms), update)
    found = stats_command.stats(run)["alarms"]
    assert found == {"ess": {"updates": 2, "first": 1, "last": 4, "text": "0.25 <x>"},
                     "weight_mean": {"updates": 1, "first": 4, "last": 4, "text": "far"}}
    assert stats_command.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "ALARM      ess at 2 updates from 1 to 4: 0.25 <x>" in out
    assert "ALARM      weight_mean at update 4: far" in out
    page = report.write_report(run).read_text()
    assert "<td>weight_mean</td><td>1</td><td>4</td><td>4</td><td>far</td>" in page
    assert "0.25 &lt;x&gt;" in page


def test_stats_as_json(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stats_command.main([str(pristine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["staleness"] == {"budget": 2, "mean": pytest.approx(24 / 78), "max": 2, "tokens": {"0": 56, "1": 20, "2": 2}}
    assert [e["state"] for e in found["evals"]] == ["done", "done"]


@pytest.mark.parametrize("main", [stats_command.main, audit_command.main, report.main])
def test_a_missing_run_is_one_line_and_exit_2(main: Callable[[list[str]], int], pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pristine.parent / "other")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"leeway: error: no run at {pristine.parent}/other: {pristine.parent} holds small\n"


def test_a_store_that_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "replay.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
    assert stats_command.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_may_be_named(pristine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").symlink_to(pristine)
    monkeypatch.chdir(tmp_path)
    assert stats_command.main(["small"]) == 0
    assert "[balanced]" in capsys.readouterr().out


def test_a_run_where_nothing_may_be_written(pristine: Path) -> None:
    """A finished run on read-only storage: no -wal, no -shm, and none can be made."""
    folder = Path(tempfile.mkdtemp())
    run_dir = Path(shutil.copytree(pristine, folder / "small"))
    for left_over in run_dir.glob("replay.sqlite-*"):
        left_over.unlink()
    for path in (folder, run_dir):
        path.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        assert stats_command.stats(run_dir)["rollouts"]["produced"] == 21
    finally:
        os.seteuid(user)
        for path in (folder, run_dir):
            path.chmod(0o755)
        shutil.rmtree(folder)


# ---------------------------------------------------------------- audit
def test_audit_exits_0_or_3(run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_command.main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "result     clean"
    damage("UPDATE rollouts SET reward = 7 WHERE rollout_id = (SELECT min(rollout_id) FROM rollouts WHERE state = 'trained')")
    assert audit_command.main([str(run)]) == 3
    shown = capsys.readouterr().out
    assert "FINDING    [reward] t0000000.1.0: the verdict gave reward 1.0 failure None, the row holds reward 7.0 failure None" in shown
    assert shown.splitlines()[-1] == "result     1 findings"
    assert audit_command.main([str(run), "--json"]) == 3
    assert [f["ids"] for f in json.loads(capsys.readouterr().out)["findings"]] == [["t0000000.1.0"]]


def test_many_findings_of_a_kind_are_cut_short(run: Path, damage: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    damage("UPDATE rollouts SET reward = 7 WHERE state = 'trained'")
    assert audit_command.main([str(run)]) == 3
    assert capsys.readouterr().out.splitlines()[-2] == "FINDING    [reward] and 3 more of this kind; --json lists them all"


def test_token_table(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = sqlite3.connect(pristine / "replay.sqlite")
    rollout = db.execute("SELECT rollout_id FROM rollouts WHERE update_id = 5 AND state = 'trained' ORDER BY 1").fetchone()[0]
    old = db.execute("SELECT old FROM spans WHERE rollout_id = ? AND span = 1", [rollout]).fetchone()[0]
    db.close()
    assert audit_command.main([str(pristine), "--rollout", rollout, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = found["tokens"]
    assert [token["position"] for token in tokens] == list(range(6))
    assert [token["version"] for token in tokens] == [1, 1, 2, 2, 2, 2]
    assert [token["source"] for token in tokens] == ["snapshot"] * 2 + ["resident"] * 4
    assert tokens[3]["old"] == pytest.approx(memoryview(old).cast("f")[1])
    assert tokens[3]["cur"] == tokens[3]["old"] == tokens[3]["prox"]
    assert {token["keep"] for token in tokens} == {1}
    assert audit_command.main([str(pristine), "--rollout", rollout]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_token_table_of_what_is_not_retained(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_command.main([str(pristine), "--rollout", "t0000000.1.0"]) == 0
    shown = capsys.readouterr().out
    assert "t0000000.1.0: trained by update 1, reward 1.0" in shown
    assert "tokens and log-probs are not retained" in shown


def test_token_table_of_an_unknown_rollout(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_command.main([str(pristine), "--rollout", "t0000000.1"]) == 2
    assert capsys.readouterr().err.endswith("; the next one is t0000000.1.0\n")


# ---------------------------------------------------------------- report
def test_report_is_one_page_without_scripts_or_hosts(run: Path) -> None:
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 11
    assert not re.search(r"<script|src=|@import|url\(|<link", page)
    assert set(re.findall(r"https?://[^\s\"<]+", page)) <= {"tcp://127.0.0.1:5757"}
    assert "NaN" not in page
    for title in ("Held-out accuracy", "Reward", "Staleness of trained tokens", "Off-policy distance", "Where the learner's time went"):
        assert title.replace("'", "&#x27;") in page


def test_report_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "<young>")
    assert "no data" in report.write_report(build.run_dir).read_text()
    assert "&lt;young&gt;" in (build.run_dir / "report.html").read_text()
    build.core.store.close()
