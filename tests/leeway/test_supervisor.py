"""Restart limit and backoff, the order in which programs end, and that nothing is left behind. The programs are light stand-ins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from leeway import programs
from leeway.programs import Program, Spec, restart_delay
from leeway.supervisor import Supervisor

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Room:
    """A folder with a journal that the stand-ins write, and the programs made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[Program] = []
        self.said: list[str] = []

    def program(self, name: str, *behaviour: str, again: tuple[str, ...] = (), made: Path | None = None) -> Program:
        argv = (sys.executable, str(HERE / "stand_in.py"), name, str(self.folder / "journal"), *behaviour)
        self.programs.append(Program(Spec(name, argv, self.folder / f"{name}.log", {"PYTHONPATH": str(ROOT)}, again, made)))
        return self.programs[-1]

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def supervise(self) -> Supervisor:
        supervisor = Supervisor(self.programs, self.said.append)
        supervisor.start()
        return supervisor


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setattr(programs, "BACKOFF_S", (0.01,) * programs.MAX_RESTARTS)
    room = Room(tmp_path)
    yield room
    for program in room.programs:
        program.kill()
        until(program.ended)


@pytest.mark.parametrize(("code", "crashes", "delay"), [
    (1, 1, 1.0), (1, 2, 2.0), (1, 5, 16.0), (1, 6, None), (-9, 1, 1.0), (75, 1, 0.0), (75, 5, 0.0), (75, 6, None), (2, 1, None),
    (130, 1, 1.0),
])
def test_restart_policy(code: int, crashes: int, delay: float | None) -> None:
    assert restart_delay(code, crashes) == delay


def test_a_crashing_program_is_restarted_five_times_and_then_given_up(room: Room) -> None:
    program = room.program("actor-0", "exit", "1", again=("again",))
    supervisor = room.supervise()
    until(lambda: supervisor.poll() or program.code is not None)
    assert program.code == 1
    assert program.restarts == 5
    assert room.journal() == ["actor-0 started exit 1"] + ["actor-0 started exit 1 again"] * 5
    assert supervisor.failed() is program
    assert "leeway: error: actor-0 was told to end" in program.last_lines()
    assert room.said[0] == "actor-0 ended with exit code 1; restart 1 of 5 in 0 s"


def test_a_program_that_crashed_before_it_had_made_its_run_is_not_told_to_resume_it(room: Room) -> None:
    program = room.program("replay", "exit", "1", again=("again",), made=room.folder / "config.json")
    supervisor = room.supervise()
    until(lambda: supervisor.poll() or program.restarts == 2)
    (room.folder / "config.json").touch()
    until(lambda: supervisor.poll() or program.code is not None)
    assert room.journal() == ["replay started exit 1"] * 3 + ["replay started exit 1 again"] * 3


def test_a_bad_config_is_not_tried_again(room: Room) -> None:
    program = room.program("replay", "exit", "2")
    supervisor = room.supervise()
    until(lambda: supervisor.poll() or program.code is not None)
    assert (program.code, program.restarts) == (2, 0)


def test_a_run_that_cannot_go_on_is_not_tried_again(room: Room) -> None:
    program = room.program("learner", "cannot")
    supervisor = room.supervise()
    until(lambda: supervisor.poll() or program.code is not None)
    assert (program.code, program.restarts) == (1, 0)
    assert program.reason() == "leeway: the run cannot go on: nothing to learn"


def test_a_killed_program_comes_back(room: Room) -> None:
    program = room.program("learner", "wait")
    supervisor = room.supervise()
    until(lambda: "learner ready" in room.journal())
    os.kill(program.pid or 0, signal.SIGKILL)
    until(lambda: supervisor.poll() or room.journal().count("learner ready") == 2)
    assert room.said[0] == "learner killed by SIGKILL; restart 1 of 5 in 0 s"
    assert supervisor.failed() is None


def test_what_a_dead_program_leaves_in_its_group_is_killed(room: Room) -> None:
    program = room.program("actor-0", "parent")
    supervisor = room.supervise()
    until(lambda: "actor-0 ready" in room.journal())
    child = int(room.journal()[1].split()[-1])
    os.kill(program.pid or 0, signal.SIGKILL)
    until(lambda: supervisor.poll() or program.restarts == 1)
    until(lambda: not alive(child))


def test_programs_end_in_order_each_after_the_one_before(room: Room) -> None:
    replay, actor, learner = (room.program(name, "wait") for name in ("replay", "actor-0", "learner"))
    supervisor = room.supervise()
    until(lambda: sum(line.endswith("ready") for line in room.journal()) == 3)
    supervisor.stop([([actor], 20), ([learner], 20), ([replay], 20)], hurry=lambda: False)
    assert room.journal()[-3:] == ["actor-0 interrupted", "learner interrupted", "replay interrupted"]
    assert [program.code for program in room.programs] == [130, 130, 130]


def test_what_does_not_stop_is_killed(room: Room) -> None:
    program = room.program("learner", "deaf")
    supervisor = room.supervise()
    until(lambda: "learner ready" in room.journal())
    supervisor.stop([([program], 0.3)], hurry=lambda: False)
    assert program.code == -signal.SIGKILL
    assert room.said == ["stopping learner", "killed learner: it did not stop in time"]


def test_a_second_interrupt_kills_everything_at_once(room: Room) -> None:
    deaf, waiting = room.program("actor-0", "deaf"), room.program("replay", "wait")
    supervisor = room.supervise()
    until(lambda: sum(line.endswith("ready") for line in room.journal()) == 2)
    began = time.monotonic()
    supervisor.stop([([deaf], 1000), ([waiting], 1000)], hurry=lambda: time.monotonic() > began + 0.3)
    assert deaf.code == -signal.SIGKILL
    assert waiting.ended()


def test_a_program_that_waits_for_its_restart_is_not_started_while_stopping(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "BACKOFF_S", (0.2,) * 5)
    program = room.program("learner", "exit", "1")
    supervisor = room.supervise()
    until(lambda: supervisor.poll() or bool(room.said))
    supervisor.stop([([program], 1)], hurry=lambda: False)
    time.sleep(0.4)
    supervisor.poll()
    assert (program.restarts, program.running) == (0, False)


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, str(HERE / "supervise.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 3
    until(lambda: (tmp_path / "journal").exists() and (tmp_path / "journal").read_text().count("ready") == 3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(alive(pid) for pid in children), seconds=10)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
