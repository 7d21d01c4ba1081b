"""`leeway doctor`: does this machine have what Leeway needs? Each line is a fact; a missing need makes the exit code 1."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from leeway.arguments import no_arguments

Level = Literal["ok", "note", "missing"]

PACKAGES = ("torch", "transformers", "sglang", "deepspeed", "accelerate", "pyzmq", "msgspec", "pydantic", "safetensors",
            "math-verify", "reasoning-gym")
OURS = ("configs", "wire", "replay", "correction", "verifier", "actor", "learner", "leeway")
DEFAULT_PORT = 5757
GIB = 1 << 30
MEMORY_NEEDED, DISK_NEEDED, SHM_NEEDED = 6 * GIB, 5 * GIB, 1 * GIB
"""A demo run holds about 5 GiB of memory; the environment takes 3 GiB of disk."""


class Finding(NamedTuple):
    level: Level
    subject: str
    fact: str


def examine(root: Path) -> Iterator[Finding]:
    """Every finding, cheapest first. Imports of the heavy packages happen in processes of their own."""
    yield _python()
    yield from _packages()
    yield _one_folder()
    yield _compiler()
    yield _cpu()
    yield from _resources(root)
    yield _port(DEFAULT_PORT)
    yield _libzmq()
    yield _sqlite()
    gpus = _torch_gpus()
    yield gpus
    yield _imports("trainer", "import deepspeed; deepspeed.DeepSpeedEngine", {"DS_ACCELERATOR": "cpu"} if gpus.level == "note" else {})
    yield from _engine(cpu=gpus.level == "note")


def main(arguments: list[str]) -> int:
    """Print the findings; exit code 0, or 1 when something needed is missing."""
    no_arguments("leeway doctor", __doc__, arguments)
    worst = 0
    for finding in examine(Path.cwd()):
        print(f"{finding.level:8}{finding.subject:18}{finding.fact}", flush=True)
        worst = max(worst, int(finding.level == "missing"))
    print("something needed is missing" if worst else "all that is needed is here")
    return worst


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info[:2] == (3, 11)
    return Finding("ok" if good else "missing", "python", version if good else f"{version}: 3.11 is needed")


def _packages() -> Iterator[Finding]:
    for package in PACKAGES:
        try:
            yield Finding("ok", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", package, "not installed: make setup, or pip install -e .[gpu]")


def _one_folder() -> Finding:
    """Another distribution may install a `replay`: ours must all come from one place."""
    places = {name: Path(spec.origin).parent.parent for name in OURS if (spec := importlib.util.find_spec(name)) and spec.origin}
    if absent := sorted(set(OURS) - places.keys()):
        return Finding("missing", "our packages", f"not importable: {', '.join(absent)}")
    if len(set(places.values())) > 1:
        return Finding("missing", "our packages", f"come from several folders: {', '.join(f'{n} from {p}' for n, p in places.items())}")
    return Finding("ok", "our packages", f"in {places['leeway']}")


def _compiler() -> Finding:
    path = shutil.which("g++")
    return Finding("ok", "g++", path) if path else Finding("missing", "g++", "not found: DeepSpeed compiles a small C++ helper once")


def _cpu() -> Finding:
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        flags = []
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    return Finding("ok", "cpu", f"{len(os.sched_getaffinity(0))} cores, {', '.join(features) or platform.machine()}")


def _resources(root: Path) -> Iterator[Finding]:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            available = int(line.split()[1]) * 1024
    yield _amount("memory", available, MEMORY_NEEDED)
    yield _amount("disk", shutil.disk_usage(root).free, DISK_NEEDED)
    if Path("/dev/shm").exists():
        yield _amount("/dev/shm", shutil.disk_usage("/dev/shm").free, SHM_NEEDED)


def _amount(subject: str, free: int, needed: int) -> Finding:
    text = f"{free / GIB:.1f} GiB free"
    return Finding("ok", subject, text) if free >= needed else Finding("note", subject, f"{text}: the demo may want {needed // GIB} GiB")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding("note", "port", f"{port} is in use: --set replay.endpoint=tcp://127.0.0.1:0 lets `leeway run` pick another")
    return Finding("ok", "port", f"{port} is free on loopback")


def _libzmq() -> Finding:
    if importlib.util.find_spec("zmq") is None:
        return Finding("missing", "libzmq", "pyzmq is not installed")
    import zmq

    good = zmq.zmq_version_info() >= (4, 3, 5)
    return Finding("ok" if good else "missing", "libzmq", zmq.zmq_version() + ("" if good else ": 4.3.5 or newer is needed"))


def _sqlite() -> Finding:
    good = sqlite3.sqlite_version_info >= (3, 35, 0)
    return Finding("ok" if good else "missing", "sqlite", sqlite3.sqlite_version + ("" if good else ": 3.35 or newer is needed"))


def _torch_gpus() -> Finding:
    done = _python_says("import torch; print(torch.version.cuda, torch.cuda.device_count())")
    if done.returncode:
        return Finding("missing", "gpu", f"torch does not import: {_last_line(done)}")
    cuda, count = done.stdout.split()[-2:]
    if count == "0":
        return Finding("note", "gpu", "none: everything runs on the CPU" + ("" if cuda == "None" else ", though torch is a CUDA build"))
    return Finding("ok", "gpu", f"{count}, CUDA {cuda}")


def _imports(subject: str, code: str, environment: dict[str, str]) -> Finding:
    done = _python_says(code, environment)
    return Finding("missing", subject, _last_line(done)) if done.returncode else Finding("ok", subject, "imports")


def _engine(*, cpu: bool) -> Iterator[Finding]:
    stand_ins = Path(__file__).resolve().parent.parent / "actor" / "cpu_shim"
    environment = {}
    if cpu:
        needed = importlib.util.find_spec("sgl_kernel") is None
        yield Finding("ok", "stand-ins", f"{'needed for' if needed else 'not needed: there is a real'} sgl_kernel; in {stand_ins}")
        environment = {"PYTHONPATH": f"{stand_ins}{os.pathsep}{Path(sys.prefix) / 'engine-only'}", "SGLANG_USE_CPU_ENGINE": "1"}
    yield _imports("engine", "import sglang.srt.server_args, sglang.srt.entrypoints.http_server", environment)


def _python_says(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
