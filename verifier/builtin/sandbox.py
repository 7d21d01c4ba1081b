"""One Python program in bubblewrap: namespaces, an almost empty read-only root, limits. Refuses when any of it is missing."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import IO

LAYERS = "layers: user, pid, net, ipc, uts, cgroup and mount namespaces; no capabilities; read-only root; rlimits"
MAX_OUTPUT_BYTES = 64 * 2**10
MAX_SCRATCH_BYTES = 16 * 2**20
SELF_TEST_S = 10.0
LAUNCHER = """import resource, runpy
resource.setrlimit(resource.RLIMIT_NPROC, (32, 32))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
runpy.run_path("/program.py", run_name="__main__")
"""


class NoSandbox(Exception):
    """A required layer is missing on this machine; nothing was run."""


@functools.cache
def require_sandbox() -> None:
    """Raises NoSandbox unless a program that must work does, so that a broken sandbox is never mistaken for a wrong answer."""
    if run_python("print(6 * 7)", "", SELF_TEST_S) != "42\n":
        raise NoSandbox("a program that prints 42 did not, in the sandbox")


def run_python(program: str, stdin: str, seconds: float) -> str | None:
    """What `program` prints, given `stdin`; None if it is too slow, prints too much, or does not exit with 0.

    Raises NoSandbox before the program runs if bubblewrap is not there or could not build every layer.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoSandbox("bubblewrap (bwrap) is not installed")
    with _file(stdin) as given, _file(program) as source, _file() as output, _file() as errors, _file() as status:
        fds = (source.fileno(), status.fileno())
        try:
            subprocess.run(
                [bwrap, *_layers(*fds), _interpreter(), "-I", "-c", LAUNCHER],
                stdin=given, stdout=output, stderr=errors, pass_fds=fds, timeout=seconds, check=False,
            )  # fmt: skip
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        facts = _facts(_read(status, MAX_OUTPUT_BYTES))
        if "child-pid" not in facts or not (timed_out or "exit-code" in facts):
            raise NoSandbox(_read(errors, 500).decode(errors="replace").strip())
        printed = _read(output, MAX_OUTPUT_BYTES + 1)
    if timed_out or facts["exit-code"] != 0 or len(printed) > MAX_OUTPUT_BYTES:
        return None
    return printed.decode(errors="replace")


def _layers(program_fd: int, status_fd: int) -> list[str]:
    """bubblewrap's options. No file of the machine is visible but /usr and the interpreter's own folder."""
    python = [] if sys.base_prefix.startswith("/usr") else ["--ro-bind", sys.base_prefix, sys.base_prefix]
    links = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    return [
        "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
        "--ro-bind", "/usr", "/usr", *links, *python, "--proc", "/proc", "--dev", "/dev",
        "--size", str(MAX_SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp",
        "--ro-bind-data", str(program_fd), "/program.py", "--remount-ro", "/", "--json-status-fd", str(status_fd),
    ]  # fmt: skip


def _interpreter() -> str:
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def _file(text: str = "") -> IO[bytes]:
    """An anonymous file; what is written to it falls under the worker's limit on file size."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's `with` closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _read(file: IO[bytes], limit: int) -> bytes:
    file.seek(0)
    return file.read(limit)


def _facts(status: bytes) -> dict[str, int]:
    return {key: value for line in status.splitlines() for key, value in json.loads(line).items()}
