"""A whole run through `leeway run`, with real SGLang and real DeepSpeed, on the demo's model and task."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent


class WholeRun:
    def __init__(self, folder: Path, name: str, *sets: str, over: tuple[str, ...] = ()) -> None:
        """`over`: shipped configs laid over the demo's."""
        self.dir = folder / name
        self.words = [*(str(ROOT / "configs" / config) for config in ("tiny-cpu.toml", *over)), "--name", name]
        for item in (f"run.dir={folder}", "replay.endpoint=tcp://127.0.0.1:0", *sets):
            self.words += ["--set", item]
        self._seen: dict[psutil.Process, str] = {}
        self._out = folder / "screen.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self._out.open("w") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "leeway.cli", "run", *self.words, *more], cwd=ROOT, stdout=out,
                                            stderr=subprocess.STDOUT)

    def finish(self, seconds: float = 900) -> tuple[int, str]:
        """(exit code, everything it printed since its start)."""
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the run did not end within {seconds} s"
            self.note_processes()
            time.sleep(0.5)
        return self.process.returncode, self._out.read_text()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.note_processes()
        self.process.send_signal(number)

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "leeway.cli", words[0], str(self.dir), *words[1:]], cwd=ROOT, text=True, check=False,
                              capture_output=True)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_update(self, update: int, seconds: float = 600) -> None:
        self.until(lambda: len(self.metrics()) >= update, seconds, f"update {update}")

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended before {what}: {self._out.read_text()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s"
            self.note_processes()
            time.sleep(0.2)
        self.note_processes()

    def note_processes(self) -> None:
        """Remember every descendant of the run as it is now, so that it is known when its parents are gone."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {child: child.name() for child in psutil.Process(self.process.pid).children(recursive=True)}

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those ever seen that still live, and whose name starts with `name`."""
        return [process for process, seen in self._seen.items() if seen.startswith(name) and _lives(process)]

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            process.kill()


def books_balance(rollouts: dict[str, Any]) -> bool:
    """produced = trained + dropped + expired + lost + buffered + leased."""
    held = rollouts["trained"] + sum(rollouts["dropped"].values()) + sum(rollouts[k] for k in ("expired", "lost", "buffered", "leased"))
    return rollouts["produced"] == held


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
