"""Start a real `leeway run`, and read from its run directory what it came to."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import load_resolved

RUNS = Path("runs")
STOP_S = 60.0
"""What a run that took too long gets to end in order."""


@dataclass(frozen=True)
class Measured:
    """`lines` are the run's metrics.jsonl. Seconds are rank 0's, as the run reports them."""

    name: str
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    wall_s: float

    @property
    def rl_s(self) -> float:
        """From the first lease to the last commit: evaluation and start-up apart."""
        return self.lines[-1]["time"] - self.lines[0]["time"]

    @property
    def updates_per_s(self) -> float:
        return (len(self.lines) - 1) / self.rl_s

    @property
    def tokens_per_s(self) -> float:
        return self.updates_per_s * self.summary["tokens"]["trained"] / max(1, self.summary["updates"])


def measure(name: str, configs: list[str], *, limit_s: float | None = None, **settings: object) -> Measured:
    """Run to the end, from nothing. Raises RuntimeError with the run's last words when it fails, or takes longer than limit_s."""
    folder = RUNS / f"bench-{name}"
    if folder.exists():
        subprocess.run(["rm", "-r", str(folder)], check=True)
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    began = time.monotonic()
    command = [sys.executable, "-m", "leeway.cli", "run", *configs, "--name", folder.name, "--set", 'replay.endpoint="tcp://127.0.0.1:0"']
    code, out, err = finished([*command, *sets], limit_s)
    if code:
        raise RuntimeError(f"{name}: exit {code}\n{out[-2000:]}\n{err[-2000:]}")
    load_resolved(folder / "config.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Measured(name, json.loads((folder / "summary.json").read_text()), lines, time.monotonic() - began)


def finished(command: list[str], limit_s: float | None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command. After limit_s it is asked to stop, then killed; RuntimeError."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, err = process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            raise RuntimeError(f"{out[-2000:]}\n{err[-2000:]}\nnot done after {limit_s:.0f} s: stopped") from None
    return process.returncode, out, err
