"""A whole run through `leeway run`, with real SGLang and real DeepSpeed, on the demo's model and task."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "LEEWAY_TEST_RUN"
"""In the environment of every process of the run, SGLang's included: so the leftovers can be found."""


class WholeRun:
    def __init__(self, folder: Path, name: str, *sets: str) -> None:
        self.dir = folder / name
        self.words = [str(ROOT / "configs" / "tiny-cpu.toml"), "--name", name]
        for item in (f"run.dir={folder}", "replay.endpoint=tcp://127.0.0.1:0", *sets):
            self.words += ["--set", item]
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "leeway.cli", "run", *self.words, *more], cwd=ROOT, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, MARK: self.mark})

    def finish(self, seconds: float = 900) -> tuple[int, str]:
        """(exit code, everything it printed)."""
        assert self.process is not None
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
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
            assert self.process.poll() is None, f"the run ended before {what}: {self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s"
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for process in self.processes():
            process.kill()


def books_balance(rollouts: dict[str, Any]) -> bool:
    """produced = trained + dropped + expired + lost + buffered + leased."""
    held = rollouts["trained"] + sum(rollouts["dropped"].values()) + sum(rollouts[k] for k in ("expired", "lost", "buffered", "leased"))
    return rollouts["produced"] == held
