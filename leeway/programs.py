"""One supervised program: started in its own process group, its output in its own log, restarted by a stated policy."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from wire.process import CANNOT_GO_ON, PARENT, signal_group

MAX_RESTARTS = 5
"""Crashes in a row after which a program is given up."""
STABLE_S = 300.0
"""A program that lived this long has proved itself: its crashes are counted from zero again."""
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0)
TAIL_BYTES = 1 << 16

DONE, BAD_CONFIG, TRY_AGAIN = 0, 2, 75


@dataclass(frozen=True)
class Spec:
    """What to run. `again` is appended to `argv` on a restart, once the file `made` is there (None: always).
    The program asks the kernel to die with us (`die_with_parent`)."""

    name: str
    argv: tuple[str, ...]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    made: Path | None = None


def restart_delay(code: int, crashes: int, final: bool = False) -> float | None:
    """Seconds to wait before a restart, or None to give up. `crashes` counts this one; exit 75 asks to be restarted at once; `final`: the
    program said that the run cannot go on."""
    if final or code == BAD_CONFIG or crashes > MAX_RESTARTS:
        return None
    return 0.0 if code == TRY_AGAIN else BACKOFF_S[crashes - 1]


class Program:
    """`code` is None while it runs or waits for its restart, then the exit code (negative: killed by that signal)."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.name = spec.name
        self.code: int | None = None
        self.restarts = 0
        self._crashes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._log_start = 0
        self._restart_at: float | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        spec = self.spec
        argv = spec.argv + (spec.again if self.restarts and (spec.made is None or spec.made.exists()) else ())
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._note(log, f"started: {' '.join(argv)}")
            self._log_start = log.tell()
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                             env={**os.environ, **self.spec.environment, PARENT: str(os.getpid())})
        self._started_at, self._restart_at = time.monotonic(), None

    def poll(self) -> str | None:
        """Reap an exit or carry out a restart that is due. Returns a line for people when something happened."""
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self.restarts += 1
            self.start()
            return f"{self.name} restarted"
        if self._process is None or (code := self._reap()) is None:
            return None
        if code == DONE:
            self.code = code
            return f"{self.name} is done"
        self._crashes = 1 if time.monotonic() - self._started_at > STABLE_S else self._crashes + 1
        delay = restart_delay(code, self._crashes, self._said_final())
        if delay is None:
            self.code = code
            return f"{self.name} {describe(code)}"
        self._restart_at = time.monotonic() + delay
        return f"{self.name} {describe(code)}; restart {self._crashes} of {MAX_RESTARTS} in {delay:.0f} s"

    def cancel_restart(self) -> None:
        self._restart_at = None

    def signal(self, number: signal.Signals) -> None:
        """Signal the program itself, not its children: it knows the order in which they end."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the whole process group at once."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    def ended(self) -> bool:
        """True when no process is left; for a program that was told to stop."""
        if self._process is not None and (code := self._reap()) is not None:
            self.code = code
        return self._process is None

    def last_lines(self, count: int = 12) -> list[str]:
        """Of what it wrote since it was last started."""
        return self._output()[-count:]

    def reason(self) -> str | None:
        """The line in which it said why it ended, if it did."""
        return next((line for line in reversed(self._output()) if line.startswith("leeway: ")), None)

    def _said_final(self) -> bool:
        return any(line.startswith(CANNOT_GO_ON) for line in self._output())

    def _output(self) -> list[str]:
        if not self.spec.log.exists():
            return []
        with self.spec.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if not line.startswith("=== ")]

    def _reap(self) -> int | None:
        """Exit code, if it has exited. What is left of its group is killed first, while its number cannot be anybody else's."""
        assert self._process is not None
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        signal_group(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        with self.spec.log.open("ab") as log:
            self._note(log, describe(code))
        return code

    def _note(self, log: IO[bytes], text: str) -> None:
        log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name} {text}\n".encode())
        log.flush()


def describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
