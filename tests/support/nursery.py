"""Real learner processes that start at once. `python -m tests.support.nursery` has imported everything; for each line on stdin it forks a
process that becomes a learner, may be killed with -9 at a named point, and for each one it prints how it ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
POINTS = ("lease", "forward", "step", "weight files", "commit", "checkpoint")


class Nursery:
    """`with Nursery(folder) as nursery: nursery.learn(config_json, endpoint, "step", 3)`. What learners say goes to a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.said = folder / "learners.txt"

    def __enter__(self) -> Self:
        with self.said.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, "-m", "tests.support.nursery"], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.communicate(timeout=30)

    def learn(self, config: Path, endpoint: str, point: str | None = None, count: int = 1) -> int:
        """Run one learner to its end: its exit code, -9 when it was killed on its `count`th passage of the point."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(config), endpoint, point, count]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.said.read_text()[-4000:]
        return int(answer)


def kill_at(learner: Any, point: str, count: int) -> None:
    """Just after the `count`th time that this was done: a lease received, a micro-batch's forward, an optimizer step, a version's files
    written, a commit acknowledged, a checkpoint's files written and its manifest not yet. Reruns count, too."""
    owner, name = {"lease": (learner, "wait_for_lease"), "forward": (learner.engine, "forward"), "step": (learner.engine, "step"),
                   "weight files": (learner.publisher, "publish"), "commit": (learner, "commit"),
                   "checkpoint": (learner.engine.engine, "save_checkpoint")}[point]
    original, left = getattr(owner, name), count

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        found = original(*args, **kwargs)
        left -= point != "lease" or found is not None
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, wrapped)


def become_learner(config_file: str, endpoint: str, point: str | None, count: int) -> int:
    from configs.load import load_resolved
    from learner import __main__, assemble
    from wire.process import run_main

    config = load_resolved(Path(config_file))
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"endpoint": endpoint})})
    original: Callable[..., Any] = assemble.assemble

    def assemble_to_die(*args: Any) -> Any:
        learner = original(*args)
        if point is not None:
            kill_at(learner, point, count)
        return learner

    assemble.assemble = assemble_to_die
    return run_main(lambda: __main__.learn(config))


def main() -> None:
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import learner.assemble  # noqa: F401 - what takes long

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(2, 1)
                code = become_learner(*json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
