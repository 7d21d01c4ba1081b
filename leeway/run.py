"""`leeway run`: one run on one machine. Cold start, then replay, actors and learner as separate processes, supervised until the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from configs.arguments import parse, parser
from leeway.dry_run import check
from leeway.feed import Feed
from leeway.plan import Plan, make_plan, settle_endpoint
from leeway.programs import Program
from leeway.screen import Screen, open_screen
from leeway.supervisor import Supervisor
from replay.reader import STORE, RunReader
from replay.rundir import check_run
from replay.summary import write_summary
from wire.errors import ConfigError, RunError
from wire.keys import LEARNER, ClientKeys, client_keys
from wire.process import CANNOT_GO_ON, INTERRUPTED, PARENT, run_main
from wire.text import printable

TICK_S = 0.1
ACTOR_GRACE_S, LEARNER_GRACE_S, REPLAY_GRACE_S = 20.0, 120.0, 20.0
"""How long each may take to stop. The learner writes a checkpoint."""
LEAVE_S = 20.0
"""How long actors and replay may take to end by themselves once the learner is done and the last evaluation is stored."""
EVAL_STALL_S = 300.0
"""How long the last evaluation may go without a further answer: an actor may have to start its engine again."""


def main(arguments: list[str]) -> int:
    return run_main(lambda: run(arguments))


def run(arguments: list[str]) -> int:
    """Exit code of the whole run. Raises ConfigError for what is wrong before anything was started."""
    options = parse(arguments, "leeway run", check)
    given = parser("leeway run").parse_args(arguments)
    check_run(options)
    keys = client_keys(options.config.security, LEARNER)
    endpoint = settle_endpoint(options.config.replay.endpoint, keyed=keys is not None)
    if options.config.cold_start is not None:
        make_cold_start(given.configs, given.set)
    plan = make_plan(options, given.configs, [*given.set, f"replay.endpoint={endpoint}"])
    screen = open_screen(options.config, options.run_dir)
    try:
        return Session(plan, options.run_dir, endpoint, screen, keys).run()
    finally:
        screen.close()


def make_cold_start(files: list[Path], sets: list[str]) -> None:
    """In a process of its own, so that torch never enters this one; its progress goes to our screen. Finds a fresh cache by itself."""
    settings = [word for item in sets for word in ("--set", item)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}
    code = subprocess.run([sys.executable, "-m", "learner.coldstart", *map(str, files), *settings], env=environment, check=False,
                          stdout=subprocess.DEVNULL).returncode
    if code == INTERRUPTED or code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        kind = ConfigError if code == 2 else RunError
        raise kind(f"the cold start ended with exit code {code}; the reason is above")


class Session:
    """The programs of one run, from their start to the last exit."""

    def __init__(self, plan: Plan, run_dir: Path, endpoint: str, screen: Screen, keys: ClientKeys | None = None) -> None:
        self._run_dir, self._screen = run_dir, screen
        self._replay, self._learner = Program(plan.replay), Program(plan.learner)
        self._actors = [Program(spec) for spec in plan.actors]
        self._supervisor = Supervisor([self._replay, *self._actors, self._learner], screen.say)
        self._open_evals: list[object] = []
        self._feed = Feed(endpoint, keys)
        self._interrupts = 0

    def run(self) -> int:
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._supervisor.start()
            while not self._over():
                self._tick()
            return self._end()
        finally:
            self._supervisor.stop([], hurry=lambda: True)
            self._feed.close()
            signal.signal(signal.SIGINT, previous)

    def _interrupt(self, *_: object) -> None:
        self._interrupts += 1

    def _over(self) -> bool:
        return bool(self._interrupts) or self._learner.code is not None or self._supervisor.failed() is not None

    def _tick(self) -> None:
        self._supervisor.poll()
        if (values := self._feed.poll()) is not None:
            self._open_evals = values["evals"]
            self._screen.show(values)
        time.sleep(TICK_S)

    def _end(self) -> int:
        """Let everything end, in order; say what came of it."""
        if not self._interrupts and self._supervisor.failed() is None:
            self._let_them_leave()
        failed, interrupted = self._supervisor.failed(), self._interrupts > 0
        if interrupted:
            self._screen.say("interrupted: everything stops in order, the learner writes a checkpoint; Ctrl-C again kills")
        self._supervisor.stop([(self._actors, ACTOR_GRACE_S), ([self._learner], LEARNER_GRACE_S), ([self._replay], REPLAY_GRACE_S)],
                              hurry=lambda: self._interrupts > 1)
        unfinished = not failed and not interrupted and self._evaluation_pending()
        status = "failed" if failed or unfinished else "interrupted" if interrupted else "done"
        self._screen.finish(self._summary(status))
        if failed:
            self._explain(failed)
            return 2 if failed.code == 2 else 1
        if unfinished:
            print(f"leeway: the last evaluation was not finished: no answer came for {EVAL_STALL_S:.0f} s; all updates are committed, "
                  f"the model is exported; the actors' logs are in {self._run_dir / 'logs'}", file=sys.stderr)
            return 1
        return INTERRUPTED if interrupted else 0

    def _let_them_leave(self) -> None:
        """The learner is done: the last evaluation goes on as long as answers come; then replay tells the actors, and ends after them."""
        seen, deadline = self._open_evals, time.monotonic() + self._patience_s()
        while time.monotonic() < deadline and not self._interrupts and any(p.code is None for p in self._supervisor.programs):
            self._tick()
            if self._open_evals != seen:
                seen, deadline = self._open_evals, time.monotonic() + self._patience_s()

    def _patience_s(self) -> float:
        return EVAL_STALL_S if self._open_evals else LEAVE_S

    def _evaluation_pending(self) -> bool:
        if not (self._run_dir / STORE).exists():
            return False
        with RunReader(self._run_dir) as run:
            return bool(run.one("SELECT 1 FROM evals WHERE state = 'pending'"))

    def _summary(self, status: str) -> dict[str, object]:
        """What replay wrote at its exit; written by us when replay died, or could not know how the run ended. Empty without a store."""
        if not (self._run_dir / STORE).exists():
            return {}
        path = self._run_dir / "summary.json"
        if self._replay.code in (0, INTERRUPTED) and path.exists():
            found = json.loads(path.read_text())
            if found["status"] == status:
                return found
        return write_summary(self._run_dir, status)

    def _explain(self, failed: Program) -> None:
        reason = failed.reason()
        if reason and (failed.code == 2 or reason.startswith(CANNOT_GO_ON)):
            print(f"{printable(reason)} ({failed.name})", file=sys.stderr)
            return
        print(f"leeway: error: {failed.name} was given up; the last lines of {failed.spec.log}:", file=sys.stderr)
        print("\n".join(f"    {printable(line)}" for line in failed.last_lines()), file=sys.stderr)
