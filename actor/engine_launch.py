"""Runs `sglang.launch_server` so that none of its processes outlives the actor. Started as a file, by engine_process.py, with the standard
library alone.

    actor --- guardian (this process, leader of a process group) --- SGLang server --- its scheduler, detokenizer, ...

The kernel signals the guardian when the actor is gone, however it went, and the guardian then kills the whole group. That also covers
server processes that have only just been born and do not watch their parent yet, and compilers that SGLang may have started.
"""

import ctypes
import os
import runpy
import shutil
import signal
import sys
import tempfile
from types import FrameType

OWNER, API_KEY, FOLDER = "LEEWAY_ENGINE_OWNER", "LEEWAY_ENGINE_API_KEY", "LEEWAY_ENGINE_FOLDER"
OWNER_GONE = signal.SIGUSR1
PR_SET_PDEATHSIG = 1


def main() -> int:
    os.umask(0o077)
    owner, api_key, folder = int(os.environ.pop(OWNER)), os.environ.pop(API_KEY), os.environ.pop(FOLDER)

    def clean_up(_signal: int, _frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    signal.signal(OWNER_GONE, clean_up)
    die_with_parent(owner, OWNER_GONE)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the group, and the guardian stays until the server has gone
    guardian = os.getpid()
    server = os.fork()
    if server == 0:
        serve(guardian, folder, api_key)
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    return code if code >= 0 else 128 - code


def serve(guardian: int, folder: str, api_key: str) -> None:
    """Become the SGLang server. The key is not on the command line, which every user of the machine can read; the sockets between SGLang's
    processes lie in a folder of ours."""
    signal.signal(OWNER_GONE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(guardian, signal.SIGKILL)
    tempfile.tempdir = folder
    sys.argv += ["--api-key", api_key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def die_with_parent(parent: int, sign: signal.Signals) -> None:
    """Have the kernel send us `sign` when the thread that started us ends; leave at once if `parent` is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sign), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
