"""Coverage-guided, for a while: nothing is found. And what the engine would do if there were something: a bug put in is found, and kept."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.parts import unpack
from tests.support.torture import TORTURE, mine, scaled, tell
from wire.codec import decode

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"decoder": 120, "handlers": 240, "version_files": 120, "outbox": 60, "keys": 60}
TRIED = list(SECONDS) if TORTURE else ["handlers"]
"""In `make test` all of them are tried without the engine (`test_targets.py`); here, that the engine runs."""
if importlib.util.find_spec("atheris") is None and (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("atheris has no build for this machine", allow_module_level=True)


def fuzz(target: str, seconds: int, found: Path, seed: int = 0) -> subprocess.CompletedProcess[str]:
    # By way of a shell, for its limit on memory: a process begins with the peak of the one that started it
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.fuzz", target]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--found", str(found)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, errors="replace")


def statistic(said: str, name: str) -> int:
    return int(re.findall(rf"^stat::{name}:\s+(\d+)", said, re.MULTILINE)[-1])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("target", mine(TRIED))
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    seconds = scaled(1, SECONDS[target])
    ended = fuzz(target, seconds, tmp_path)
    assert ended.returncode == 0, f"{[path.name for path in tmp_path.iterdir()]}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    inputs, reached = statistic(ended.stderr, "number_of_executed_units"), re.findall(r"cov: (\d+)", ended.stderr)
    assert inputs > 20 * seconds
    tell(seconds=seconds, **{f"inputs_to_{target}": inputs, f"places_reached_by_{target}": int(reached[-1])})


@pytest.mark.timeout(100)
def test_a_bug_that_was_put_in_is_found(tmp_path: Path) -> None:
    ended = fuzz("planted", 60, tmp_path, seed=1)
    assert ended.returncode == 77
    assert "KeyError: 't1.1'" in ended.stderr + ended.stdout
    (kept,) = tmp_path.iterdir()
    assert decode(unpack(kept.read_bytes()))[1].kind == "t1.1"  # type: ignore[union-attr]
