"""Keeps a set of programs running, and ends them in order. Knows nothing of what they do."""

import signal
import time
from collections.abc import Callable, Sequence

from leeway.programs import Program

POLL_S = 0.05


class Supervisor:
    """`say` gets one line for people at every start, crash and end. Programs start and are listed in the order given."""

    def __init__(self, programs: Sequence[Program], say: Callable[[str], None]) -> None:
        self.programs = list(programs)
        self._say = say

    def start(self) -> None:
        for program in self.programs:
            program.start()

    def poll(self) -> None:
        """Reap, restart, report. Does not wait."""
        for program in self.programs:
            if line := program.poll():
                self._say(line)

    def failed(self) -> Program | None:
        """The first program that was given up, if any."""
        return next((program for program in self.programs if program.code not in (None, 0)), None)

    def stop(self, order: Sequence[tuple[Sequence[Program], float]], hurry: Callable[[], bool]) -> None:
        """Interrupt the programs group by group, each group with its grace in seconds; what is still there afterwards is killed.
        Everything is killed as soon as `hurry()` is true (a second Ctrl-C)."""
        for program in self.programs:
            program.cancel_restart()
        for programs, grace_s in order:
            waiting = [program for program in programs if not program.ended()]
            for program in waiting:
                program.signal(signal.SIGINT)
            if waiting:
                self._say(f"stopping {', '.join(program.name for program in waiting)}")
            deadline = time.monotonic() + grace_s
            while not all(program.ended() for program in waiting) and time.monotonic() < deadline and not hurry():
                time.sleep(POLL_S)
            self._kill([program for program in waiting if not program.ended()], hurried=hurry())
        self._kill([program for program in self.programs if not program.ended()], hurried=hurry())

    def _kill(self, programs: Sequence[Program], *, hurried: bool) -> None:
        for program in programs:
            self._say(f"killed {program.name}" + ("" if hurried else ": it did not stop in time"))
            program.kill()
        while not all(program.ended() for program in programs):
            time.sleep(POLL_S)
