"""How a whole `leeway run` ends: its exit code, its last words, and that no process is left. The programs are light stand-ins."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from configs.arguments import Arguments
from configs.load import load
from leeway.plan import Plan, make_plan, settle_endpoint
from leeway.programs import Spec
from leeway.run import Session
from leeway.screen import PlainScreen
from replay.store import SCHEMA_VERSION
from wire.errors import ConfigError
from wire.process import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CONFIG = '[model]\npath = "somewhere"\n[task]\ntrain = "train.jsonl"\n'


def start(folder: Path, replay: str, actor: str, learner: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(HERE / "session_main.py"), str(folder), replay, actor, learner], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})


def journal(folder: Path) -> list[str]:
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def wait_ready(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while sum(line.endswith("ready") for line in journal(folder)) < count:
        assert time.monotonic() < deadline, journal(folder)
        time.sleep(0.02)


def left_behind(folder: Path) -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if str(folder / "journal") in (process.info["cmdline"] or [])]


def test_done_when_the_learner_is_done(tmp_path: Path) -> None:
    process = start(tmp_path, "exit 0", "exit 0", "exit 0")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "leeway: learner is done" in out
    assert left_behind(tmp_path) == []


def test_ctrl_c_stops_actors_then_learner_then_replay(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", "wait", "wait")
    wait_ready(tmp_path, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert journal(tmp_path)[-3:] == ["actor-0 interrupted", "learner interrupted", "replay interrupted"]
    assert left_behind(tmp_path) == []


def test_sigterm_is_like_ctrl_c(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", "wait", "wait")
    wait_ready(tmp_path, 3)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert journal(tmp_path)[-1] == "replay interrupted"


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", "deaf", "wait")
    wait_ready(tmp_path, 3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "leeway: killed actor-0" in out
    assert left_behind(tmp_path) == []


def test_a_bad_config_of_a_child_is_ours_too(tmp_path: Path) -> None:
    process = start(tmp_path, "exit 2", "wait", "wait")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "leeway: error: replay was told to end (replay)\n")
    assert left_behind(tmp_path) == []


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", "wait", "cannot")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "leeway: the run cannot go on: nothing to learn (learner)\n")
    assert journal(tmp_path)[-1] == "replay interrupted"


@pytest.mark.parametrize("learner", ["wait", "deaf"])
def test_kill_9_leaves_no_process(tmp_path: Path, learner: str) -> None:
    """Not even one that looks at no signal, as a learner does while it compiles or is in a long update."""
    process = start(tmp_path, "wait", "wait", learner)
    wait_ready(tmp_path, 3)
    assert len(left_behind(tmp_path)) == 3
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while left_behind(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class ScriptedFeed:
    """What replay would tell, one answer a poll."""

    def __init__(self, script: list[list[dict[str, int]]]) -> None:
        self.script = script

    def poll(self) -> dict[str, Any] | None:
        return {"evals": self.script.pop(0)} if self.script else None

    def close(self) -> None:
        pass


def test_the_last_evaluation_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut off 20 s after the learner's end, and the run called done."""
    monkeypatch.setattr("leeway.run.LEAVE_S", 0.5)
    (tmp_path / "logs").mkdir()
    spec = {name: Spec(name, (sys.executable, str(HERE / "stand_in.py"), name, str(tmp_path / "journal"), *behaviour.split()),
                       tmp_path / "logs" / name) for name, behaviour in (("replay", "wait"), ("actor-0", "wait"), ("learner", "exit 0"))}
    screen = PlainScreen(Console(file=StringIO()), 10, tmp_path)
    monkeypatch.setattr(screen, "show", lambda values: None)
    session = Session(Plan(spec["replay"], [spec["actor-0"]], spec["learner"]), tmp_path, "tcp://127.0.0.1:1", screen)
    session._feed.close()
    monkeypatch.setattr("leeway.run.TICK_S", 0.02)
    answers = [[{"eval": 2, "answered": answered // 40}] for answered in range(200)]  # 4 s: eight times LEAVE_S, a step every 0.8 s
    session._feed = ScriptedFeed([*answers, []])  # type: ignore[assignment]
    assert session.run() == 0
    assert session._feed.script == []  # type: ignore[attr-defined]
    assert journal(tmp_path)[-1] == "replay interrupted"


def test_an_evaluation_that_never_ended_is_no_success(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "replay.sqlite") as db:
        db.executescript((ROOT / "replay" / "schema.sql").read_text() + f"PRAGMA user_version = {SCHEMA_VERSION};")
        db.execute("INSERT INTO evals (eval_id, version, updates, state) VALUES (1, 0, 0, 'done'), (2, 9, 9, 'pending')")
    session = Session.__new__(Session)
    session._run_dir = tmp_path
    assert session._evaluation_pending()
    db.execute("UPDATE evals SET state = 'done'")
    db.commit()
    assert not session._evaluation_pending()


def test_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(CONFIG)
    sets = ["actor.count=2", "replay.endpoint=tcp://127.0.0.1:6001"]
    plan = make_plan(Arguments(load([file], sets), "demo", False, False), [file], sets)
    common = (str(file), "--name", "demo", "--set", "actor.count=2", "--set", "replay.endpoint=tcp://127.0.0.1:6001")
    assert plan.replay.argv == (sys.executable, "-m", "replay", *common)
    assert plan.replay.again == ("--resume",)
    assert [actor.name for actor in plan.actors] == ["actor-a0", "actor-a1"]
    assert plan.actors[1].argv == (sys.executable, "-m", "actor", *common, "--set", "actor.name=a1")
    assert plan.learner.argv == (sys.executable, "-m", "learner", *common)
    assert plan.learner.environment["DS_ACCELERATOR"] == "cpu"
    assert all(spec.environment["OMP_NUM_THREADS"] == "1" for spec in (plan.replay, *plan.actors, plan.learner))
    assert plan.learner.log == Path("runs/demo/logs/learner.log")


def test_the_plan_of_a_resumed_run_with_two_ranks_on_gpus(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(CONFIG)
    sets = ["learner.ranks=2", "learner.device=cuda", "actor.device=cuda"]
    plan = make_plan(Arguments(load([file], sets), "demo", True, False), [file], sets)
    assert plan.replay.argv[-1] == "--resume"
    assert plan.replay.again == ()
    assert plan.learner.argv[1:5] == ("-m", "leeway.ranks", "--nproc-per-node", "2")
    assert plan.learner.argv[7:9] == ("-m", "learner")
    assert "DS_ACCELERATOR" not in plan.learner.environment
    assert "OMP_NUM_THREADS" not in plan.actors[0].environment


def test_port_0_becomes_a_free_port() -> None:
    host, port = settle_endpoint("tcp://127.0.0.1:0").rsplit(":", 1)
    assert host == "tcp://127.0.0.1"
    assert int(port) == free_port("127.0.0.1", int(port))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use: is this run's replay already running\\?"):
            settle_endpoint(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
