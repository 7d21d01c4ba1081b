"""torchrun as a child of `leeway run`: an interrupt reaches every rank, and a kill -9 of the agent ends them. The ranks are stand-ins."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from leeway.programs import Program, Spec
from wire.process import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Program]:
    argv = (sys.executable, "-m", "leeway.ranks", "--nproc-per-node", "2", "--master-port", str(free_port("127.0.0.1")),
            str(HERE / "stand_in.py"), "rank", str(tmp_path / "journal"), "wait")
    program = Program(Spec("learner", argv, tmp_path / "learner.log", {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}))
    program.start()
    deadline = time.monotonic() + 90
    while journal(tmp_path).count("rank ready") < 2:
        assert time.monotonic() < deadline, program.last_lines()
        time.sleep(0.05)
    yield program
    program.kill()
    while not program.ended():
        time.sleep(0.05)


def journal(folder: Path) -> list[str]:
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def test_an_interrupt_reaches_every_rank(ranks: Program, tmp_path: Path) -> None:
    ranks.signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while not ranks.ended():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert journal(tmp_path).count("rank interrupted") == 2


def test_kill_9_of_the_agent_ends_every_rank(ranks: Program) -> None:
    assert ranks.pid is not None
    children = psutil.Process(ranks.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(ranks.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
