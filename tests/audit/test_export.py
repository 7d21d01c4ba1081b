"""Export, the supervised set, and verification of a store, on a run whose every number is known."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from leeway import export_command, sft_command, stats_command
from leeway.rollout_table import rollout_table
from replay.verify import main as verify_main
from replay.verify import verify
from tests.support.run_builder import LENGTH, RunBuilder
from wire.manifest import FILE


def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert export_command.main([str(run), "--format", "jsonl"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_rollout_is_exported_once_with_its_columns(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = exported(pristine, capsys)
    assert len(found) == len({row["rollout_id"] for row in found}) == 21
    outcomes = [f"{row['state']}({row['reason']})" if row["reason"] else row["state"] for row in found]
    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes)} == {
        "trained": 13, "dropped(aborted)": 1, "dropped(incomplete_group)": 2, "dropped(no_signal)": 4, "dropped(unverified)": 1}
    for row in found:
        assert [span["start"] for span in row["spans"]][0] == 0
        assert row["spans"][-1]["end"] == LENGTH
        assert (row["reward"] is None) == (row["failure"] is not None)
        if row["response_ids"] is not None:
            assert len(row["mu"]) == len(row["response_ids"]) == LENGTH
    assert {row["failure"] for row in found} == {None, "timeout", "aborted"}
    retained = [row for row in found if row["state"] == "trained" and row["mu"] is not None]
    assert len(retained) == len({tuple(row["cur"]) for row in retained}) == 3  # each has columns of its own
    for row in retained:
        table = rollout_table(pristine, row["rollout_id"])["tokens"]  # made another way
        for name in ("mu", "old", "prox", "cur", "weight", "keep"):
            assert row[name] == pytest.approx([token[name] for token in table]), (row["rollout_id"], name)


def test_the_columns_of_a_rollout_are_those_at_its_place_in_the_record(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut here from the stored bytes by the record's lengths; not only the first, which begins at 0."""
    found = {row["rollout_id"]: row for row in exported(pristine, capsys)}
    with closing(sqlite3.connect(pristine / "replay.sqlite")) as db:
        record = json.loads(db.execute("SELECT record FROM updates WHERE update_id = 5").fetchone()[0])
        columns = {name: np.frombuffer(data, {"f4": "<f4", "u1": "u1"}[dtype]) for name, dtype, data in db.execute(
            "SELECT name, dtype, data FROM update_columns WHERE update_id = 5 AND data IS NOT NULL")}
    assert set(columns) == {"old", "prox", "cur", "weight", "keep", "old_source"}
    start = 0
    for rollout, length in zip(record["rollout_ids"], record["response_lens"], strict=True):
        for name in ("old", "prox", "cur", "weight", "keep"):
            assert found[rollout][name] == columns[name][start : start + length].tolist(), (rollout, name)
        start += length
    assert (len(record["rollout_ids"]), start) == (3, 3 * LENGTH)


def test_parquet_holds_the_same(pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = exported(pristine, capsys)
    out = tmp_path / "x.parquet"
    assert export_command.main([str(pristine), "--format", "parquet", "--out", str(out)]) == 0
    assert "21 rollouts in" in capsys.readouterr().err
    found = pq.read_table(out).to_pylist()
    assert [row["rollout_id"] for row in found] == [row["rollout_id"] for row in rows]
    for got, row in zip(found, rows, strict=True):
        assert (got["response_ids"], got["spans"], got["reward"], got["old"]) == (
            row["response_ids"], row["spans"], row["reward"], pytest.approx(row["old"]) if row["old"] else None)
    assert export_command.main([str(pristine), "--format", "parquet", "--out", str(out)]) == 2
    assert "exists: remove it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [out]


def test_a_live_run_is_exported_as_it_was_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = RunBuilder(tmp_path / "live")
    build.update()
    build.generate(1)
    build.core.begin().db.execute("UPDATE rollouts SET state = 'lost'")  # in a transaction that is open
    assert [row["state"] for row in exported(build.run_dir, capsys)] == ["buffered"] * 2 + ["trained"] * 4
    build.core.store.close()


class Letters:
    def texts(self, responses: list[list[int]]) -> list[str]:
        return ["".join(chr(97 + token) for token in ids) for ids in responses]


def test_a_supervised_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_command, "make_tokeniser", lambda run_dir, model: Letters())
    build = RunBuilder(tmp_path / "sft")
    build.update()
    build.update()
    run = build.finish("interrupted")
    assert sft_command.main([str(run), "--min-reward", "1"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 4  # of eight responses, every first was right
    assert {row["reward"] for row in rows} == {1.0}
    assert rows[0]["prompt"] == "0+0=" or rows[0]["prompt"].count("+") == 1
    assert all(len(row["completion"]) == LENGTH - 1 for row in rows)
    assert err == "4 rows; left out: 4 below 1 or without a verdict, 0 cut off, 0 duplicates, 0 not retained\n"


def test_duplicates_and_cut_responses_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_command, "make_tokeniser", lambda run_dir, model: Letters())
    build = RunBuilder(tmp_path / "sft")
    build.update()
    run = build.finish("interrupted")
    with sqlite3.connect(run / "replay.sqlite") as db:
        first, second, third, fourth = [r for r, in db.execute("SELECT rollout_id FROM rollouts ORDER BY 1")]
        db.execute("UPDATE rollouts SET head = json_set(head, '$.verdict.reward', 1.0), reward = 1.0")
        same = "UPDATE rollouts SET payload = (SELECT payload FROM rollouts WHERE rollout_id = ?) WHERE rollout_id = ?"
        db.execute(same, (first, second))
        db.execute("UPDATE rollouts SET head = json_set(head, '$.finish_reason', 'length') WHERE rollout_id = ?", (third,))
        db.execute("UPDATE rollouts SET payload = NULL WHERE rollout_id = ?", (fourth,))
    db.close()
    out = tmp_path / "sft.parquet"
    assert sft_command.main([str(run), "--min-reward", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().err == "1 rows; left out: 0 below 1 or without a verdict, 1 cut off, 1 duplicates, 1 not retained\n"
    assert pq.read_table(out).column("rollout_id").to_pylist() == [first]


@pytest.mark.parametrize("tool", [stats_command.main, lambda words: export_command.main([*words, "--format", "jsonl"]),
                                  lambda words: sft_command.main([*words, "--min-reward", "1"])])
def test_no_such_run_is_exit_2(tool: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"leeway: error: no run at {tmp_path / 'nothing'}: there are no runs in {tmp_path}\n"


def test_a_store_that_breaks_in_the_middle_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run / "replay.sqlite"
    with closing(sqlite3.connect(store)) as db:
        root = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'rollouts'").fetchone()[0]
    with store.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 64)
    assert export_command.main([str(run), "--format", "jsonl"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("leeway: error: the run's store cannot be read: database disk image is malformed")
    assert error.count("\n") == 1
    assert verify_main(["--verify", str(run)]) == 3


# ---------------------------------------------------------------- verify
def test_a_sound_store(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main(["--verify", str(pristine)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "result     sound"


def test_the_command_and_its_exit_codes(pristine: Path, run: Path, tmp_path: Path) -> None:
    file = next(run.glob("weights/*/" + FILE))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    for folder, code, text in ((run, 3, "FINDING    ["), (tmp_path / "none", 2, "leeway: error: no run at")):
        done = subprocess.run([sys.executable, "-m", "leeway.cli", "replay", "--verify", str(folder)], capture_output=True, text=True)
        assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done


@pytest.mark.parametrize(("statement", "kind"), [
    ("UPDATE spans SET old = zeroblob(length(old)) WHERE rollout_id = (SELECT min(rollout_id) FROM spans WHERE old IS NOT NULL)", "anchor"),
    ("UPDATE update_columns SET data = zeroblob(length(data)) WHERE update_id = 5 AND name = 'cur'", "column"),
    ("DELETE FROM rollouts WHERE rollout_id = (SELECT max(rollout_id) FROM rollouts)", "integrity"),
    ("UPDATE rollouts SET head = 'x' WHERE rollout_id = (SELECT max(rollout_id) FROM rollouts)", "head"),
    ("UPDATE ledger SET body = 'x' WHERE seq = 9", "ledger"),
])
def test_damage_is_named(run: Path, damage: Callable[..., object], statement: str, kind: str) -> None:
    damage(statement)
    assert kind in {finding.kind for finding in verify(run).findings}


def test_a_store_that_is_no_database(run: Path) -> None:
    shutil.copy(run / "config.json", run / "replay.sqlite")
    finding, = verify(run).findings
    assert finding.kind == "store"
    assert "cannot be read as a run's store" in finding.text


def test_the_least_reward_is_a_finite_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sft_command.main([str(run), "--min-reward", "nan"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "leeway: error: argument --min-reward: must be a finite number, not 'nan'\n"
