"""Runs one part: pytest processes, and what their tests told (`tests/support/torture.py`)."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from scripts.torture.parts import Part

LOGS = Path("build/torture")


class Outcome(NamedTuple):
    """`text` is one line: what was counted, or what failed."""

    passed: bool
    text: str
    seconds: float


def run(name: str, part: Part, processes: int, share: float) -> Outcome:
    """`share`: of all there is to do. Each process's output is kept in `build/torture`."""
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.glob(f"{name}-*"):
        old.unlink()
    shards = processes if part.shared else 1
    jobs = [(LOGS / f"{name}-{number}-{shard}", job, f"{shard}/{shards}")
            for number, job in enumerate(part.jobs) for shard in range(shards)]
    began = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        codes = list(pool.map(lambda job: _pytest(*job, share), jobs))
    logs = [log for log, *_ in jobs]
    seconds = time.monotonic() - began
    failed = [line for log in logs for line in _ended(log, "failure", "error")]
    if any(codes) or failed:
        return Outcome(False, "; ".join(failed) or f"pytest ended with {max(codes)}: see {logs[0]}.log", seconds)
    done = _counts(logs)
    skipped = [f"not run: {line}" for line in dict.fromkeys(line for log in logs for line in _ended(log, "skipped"))]
    return Outcome(True, "; ".join([*([done] if done else []), *skipped]), seconds)


def _pytest(log: Path, arguments: Iterable[str], shard: str, share: float) -> int:
    environment = os.environ | {"LEEWAY_TORTURE": str(share), "LEEWAY_SHARD": shard, "LEEWAY_COUNTS": str(log.with_suffix(".counts")),
                                "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "--timeout=7200", f"--junitxml={log}.xml", "-p", "no:cacheprovider"]
    with open(f"{log}.log", "w") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode


def _counts(logs: list[Path]) -> str:
    """What the tests told, added up, and how many tests passed."""
    found: Counter[str] = Counter()
    for log in logs:
        file = log.with_suffix(".counts")
        for line in file.read_text().splitlines() if file.exists() else []:
            found.update(json.loads(line))
    passed = sum(len(list(case)) == 0 for log in logs for case in _cases(log))
    return ", ".join([f"{count:,} {name}" for name, count in found.items()] or [f"{passed:,} tests passed"] * bool(passed))


def _ended(log: Path, *how: str) -> list[str]:
    """The tests that ended so, each with the first line of its reason."""
    return [f"{case.get('name')}: {(end.get('message') or 'no reason given').splitlines()[0].removeprefix('Skipped: ')}"
            for case in _cases(log) for end in case if end.tag in how]


def _cases(log: Path) -> list[ET.Element]:
    file = Path(f"{log}.xml")
    return list(ET.parse(file).iter("testcase")) if file.exists() else []
