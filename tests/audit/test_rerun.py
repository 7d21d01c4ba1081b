"""`leeway audit RUN --update U` on runs that a real learner made."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from learner import scratch
from leeway import audit_command, rerunning
from tests.support.learning import LearningDaemon, RandomActor, acting, make_run_config, random_answer
from wire.digest import digest, digest_file
from wire.record import RolloutHead, Scored, WorkOrder

pytestmark = pytest.mark.deepspeed
ROOT = Path(__file__).resolve().parents[2]
QUIET = ("t0000008", "t0000009")
"""The prompts of update 5: nothing to learn from."""


def answer(actor: RandomActor, order: WorkOrder, sample: int) -> tuple[RolloutHead, bytes]:
    head, payload = random_answer(actor, order, sample)
    return msgspec.structs.replace(head, verdict=Scored(1.0)) if order.order_id in QUIET else head, payload


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 updates with a step, and the fifth skipped. Checkpoints of versions 4 (updates 1 to 4) and 6 are kept."""
    config = make_run_config(
        tmp_path_factory.mktemp("made"), replay={"max_staleness": 1}, recipe={"base": "prox", "engine": "tis"},
        learner={"updates": 6, "checkpoint_every": 2, "keep_checkpoints": 2, "micro_batch_rows": 2, "steps_per_update": 2, "zero_stage": 1})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config, answer):
        assert daemon.learner().run()
        return daemon.run_dir


def files(run_dir: Path) -> dict[str, str]:
    return {str(path): digest_file(path) for path in run_dir.rglob("*") if path.is_file() and "sqlite-" not in path.name}


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    run_dir = Path(shutil.copytree(made, tmp_path / "copy"))
    with closing(sqlite3.connect(run_dir / "replay.sqlite", isolation_level=None)) as db:
        yield run_dir, db


def test_an_update_comes_again_bit_for_bit_and_the_run_is_only_read(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(made)
    assert audit_command.main([str(made), "--update", "7"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("run again", "run_again").splitlines())
    assert shown["run_again"] == "updates 5 to 7 from the checkpoint of version 4"
    assert shown["then"] == shown["now"]
    assert shown["now"].count("loss") == 2
    assert shown["result"] == "clean: loss, gradient norm, columns and weights digest agree bit for bit"
    assert files(made) == before


def test_a_skipped_update_is_skipped_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_command.main([str(made), "--update", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["result"], found["skipped"], found["from_checkpoint"], found["run_again"]) == ("clean", True, 4, [5])
    assert found["then"] == found["now"]


@pytest.mark.parametrize("update", [1, 4])
def test_what_retention_removed_is_not_retained(made: Path, update: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_command.main([str(made), "--update", str(update)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"note       not retained: no checkpoint from before update {update}", "result     not retained"]


def test_lost_payloads_and_damaged_checkpoints_are_said(copy: tuple[Path, sqlite3.Connection]) -> None:
    run_dir, db = copy
    db.execute("UPDATE spans SET old = NULL WHERE rollout_id = (SELECT min(rollout_id) FROM rollouts WHERE update_id = 6)")
    assert rerunning.rerun_update(run_dir, 6).notes == ["not retained: what update 6 was trained on"]
    db.execute("UPDATE checkpoints SET manifest_digest = 'f' WHERE version = 4")
    found = rerunning.rerun_update(run_dir, 6)
    assert "version 4 cannot be used: it is not the one that was committed" in found.notes[0]
    assert found.result == "not retained"


def change(db: sqlite3.Connection, path: str, value: object) -> None:
    """In the record of update 6, its digest made to fit."""
    db.create_function("digest", 1, lambda text: digest(text.encode() if isinstance(text, str) else text))
    db.execute("UPDATE updates SET record = json_replace(record, ?, ?) WHERE update_id = 6", (path, value))
    db.execute("UPDATE updates SET record_digest = digest(record)")
    if path == "$.weights_digest_out":
        db.execute("UPDATE versions SET weights_digest = ? WHERE update_id = 6", (value,))


def change_prox(db: sqlite3.Connection) -> None:
    data = bytes(db.execute("SELECT length(data) FROM update_columns WHERE update_id = 6 AND name = 'prox'").fetchone()[0])
    db.execute("UPDATE update_columns SET data = ?, digest = ? WHERE update_id = 6 AND name = 'prox'", (data, digest(data)))


def zero_old(db: sqlite3.Connection) -> None:
    db.execute("UPDATE spans SET old = zeroblob(length(old)) WHERE rollout_id = (SELECT min(rollout_id) FROM rollouts WHERE update_id = 6)")


@pytest.mark.parametrize(("damage", "kind", "says"), [
    (zero_old, "store", "update 6: the old log-probs of rollout t0000010.1.0, span 0, in the store is not what was acknowledged"),
    (lambda db: change(db, "$.steps[0].loss", 0.5), "rerun", "step 0: loss was 0.5, is "),
    (change_prox, "rerun", "column prox differs"),
    (lambda db: change(db, "$.weights_digest_out", "beef"), "rerun", "weights digest was beef"),
])
def test_a_changed_record_is_found(copy: tuple[Path, sqlite3.Connection], damage: Callable[[sqlite3.Connection], None], kind: str,
                                   says: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, db = copy
    damage(db)
    assert audit_command.main([str(run_dir), "--update", "6"]) == 3
    out = capsys.readouterr().out
    assert f"FINDING    [{kind}] update 6: " in out
    assert says in out
    assert audit_command.main([str(run_dir), "--update", "7", "--json"]) == 3  # on the way there
    assert json.loads(capsys.readouterr().out)["run_again"] == [5, 6]


def test_another_trainer_need_only_be_close(copy: tuple[Path, sqlite3.Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, db = copy
    change(db, "$.weights_digest_out", "beef")
    monkeypatch.setattr(scratch, "trainer_fingerprint", lambda config, policy: "another")
    found = rerunning.rerun_update(run_dir, 6)
    assert found.result == "clean"
    assert found.then != found.now
    assert any("was trained on another trainer" in note for note in found.notes)
    assert any("weights digest was beef" in note for note in found.notes)
    change(db, "$.steps[0].grad_norm", 0.1)
    assert rerunning.rerun_update(run_dir, 6).result == "1 findings"


def test_what_cannot_be_asked_is_one_line_and_exit_two(copy: tuple[Path, sqlite3.Connection], monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, db = copy
    db.execute("UPDATE updates SET state = 'lost' WHERE update_id = 2")
    cases = {"9": "has no update 9: the newest is 7", "2": "update 2 was given up when the learner went back"}
    for update, says in cases.items():
        assert audit_command.main([str(run_dir), "--update", update]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert audit_command.main([str(run_dir), "--update", "7"]) == 2
    assert "torchrun --nproc-per-node 1 -m leeway.cli audit" in capsys.readouterr().err


def test_as_a_process_of_its_own_it_prints_json_alone(made: Path) -> None:
    found = subprocess.run([sys.executable, "-m", "leeway.cli", "audit", str(made), "--update", "6", "--json"], cwd=ROOT, text=True,
                           capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=100)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["result"] == "clean"
