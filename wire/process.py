"""What every process of Leeway does the same way: signals and errors to exit codes, dying with its parent, logs, one source folder."""

import ctypes
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from wire.errors import ConfigError, LeewayError, RunError
from wire.text import printable, printable_lines

PACKAGES = ("configs", "wire", "replay", "correction", "verifier", "actor", "learner", "leeway")
PARENT = "LEEWAY_PARENT_PID"
"""Set by a supervisor to its own pid: children that find it die with it. Unset when a person starts a daemon by hand."""
PR_SET_PDEATHSIG = 1
ORPHAN_S = 5.0
"""How long a process may take to end in order once its supervisor is dead; then it is gone."""
INTERRUPTED = 130
CANNOT_GO_ON = "leeway: the run cannot go on: "
"""How a process says that starting it again would not help; a supervisor looks for it."""


def run_main(main: Callable[[], int | None]) -> int:
    """Run a process's main function and return its exit code. SIGTERM acts like Ctrl-C; errors of ours become one line on stderr."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        die_with_parent()
        check_packages()
        return main() or 0
    except (KeyboardInterrupt, CancelledError):  # asyncio turns Ctrl-C into the second while a task group ends for another reason
        return INTERRUPTED
    except RunError as error:
        print(f"{CANNOT_GO_ON}{printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except LeewayError as error:
        print(f"leeway: error: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code


def end(code: int) -> NoReturn:
    """The end of a process that was a rank: written is what was said, and the kernel does the rest. While the interpreter is torn down a
    thread of gloo that still has a tensor to free cannot have the GIL, and aborts the process: exit code -6 after all its work was done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel for `signal_number` when the supervisor named in the environment dies. No effect when nobody is named."""
    named = os.environ.get(PARENT, "")
    if not named.isdigit():
        return
    set_death_signal(signal_number)
    if os.getppid() != int(named):
        raise KeyboardInterrupt  # it died before the kernel was asked
    threading.Thread(target=_outlive_no_longer, args=(int(named),), daemon=True).start()


def _outlive_no_longer(parent: int) -> None:
    """The signal may find us in a start or an update that looks at no signal for a long time: whatever is lost comes again by recovery."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(ORPHAN_S)
    os._exit(INTERRUPTED)


def set_death_signal(signal_number: int) -> None:
    """The kernel sends us `signal_number` when the thread that started us ends. Look at the parent afterwards: it may be gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def signal_group(group: int, signal_number: int) -> bool:
    """Signal a process group. Is anybody of it left to receive it?"""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def free_port(host: str = "127.0.0.1", wanted: int = 0) -> int:
    """`wanted` if nobody listens there, or any free port when 0. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return int(probe.getsockname()[1])


def check_packages() -> None:
    """All packages come from one folder: another distribution may install a `replay` of its own. Raises ConfigError naming the odd one."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"package {name!r} is not installed beside {home / 'wire'}: install Leeway again")
        folder = Path(next(iter(spec.submodule_search_locations))).resolve()
        if folder.parent != home:
            raise ConfigError(f"package {name!r} comes from {folder}, not from {home}: another distribution hides Leeway's; "
                              "use a clean environment")


class _ScreenLines(logging.Formatter):
    """Whatever was logged, and whoever sent it: one line that a terminal can show."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(process: str, level: str, run_dir: Path | None = None) -> None:
    """Lines for people on stderr; with a run, also JSON lines in `<run>/logs/<process>.jsonl`."""
    screen = logging.StreamHandler()
    screen.setFormatter(_ScreenLines(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S"))
    handlers: list[logging.Handler] = [screen]
    if run_dir is not None:
        folder = run_dir / "logs"
        folder.mkdir(exist_ok=True)
        file = logging.FileHandler(folder / f"{process}.jsonl")
        file.setFormatter(_JsonLines())
        handlers.append(file)
    for handler in handlers:
        handler.addFilter(_worth_a_line)
    logging.basicConfig(level=level, handlers=handlers, force=True)


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Ours at the level asked for; of libraries (compilers log each command at INFO, on the root logger) what is a warning."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in (*PACKAGES, "__main__")


class Clock:
    """Time, so that tests can drive it: monotonic for decisions, wall for people."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
