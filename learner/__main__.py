"""`python -m learner CONFIG... [--name NAME] [--set key=value]...`: the learner, alone or under torchrun or the deepspeed launcher."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from configs.arguments import parse
from configs.rules import check_ranks
from configs.schema import Config
from wire.errors import ConfigError
from wire.process import INTERRUPTED, run_main, set_up_logging


class StopSignal:
    """The first SIGINT (or SIGTERM) asks for a clean stop at the next commit, a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run cannot go on, 2 bad config, 75 start again and recover, 130 interrupted."""
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]  # the deepspeed launcher's
    config = parse(words, "leeway learner").config
    return run_main(lambda: learn(config))


def learn(config: Config) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", config.learner.device)
    from learner.anchor import Anchors  # torch and DeepSpeed read the environment when imported
    from learner.deepspeed_engine import TrainEngine
    from learner.loop import Learner
    from learner.model import load_policy, load_tokenizer, set_determinism
    from learner.publish import Publisher
    from learner.ranks import join
    from learner.session import Session
    from learner.stopwatch import Stopwatch
    from replay.client import BlockingClient

    stopwatch, stopping = Stopwatch(), StopSignal()
    ranks = join(config)
    set_up_logging("learner" if ranks.is_first else f"learner rank {ranks.rank}", config.logging.level)
    try:
        check_ranks(config.learner.groups_per_update // config.learner.steps_per_update, ranks.world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    set_determinism(config.run.seed, config.learner.device)
    policy = load_policy(config.model.path, config.model.dtype, config.model.attention)
    tokens = len(load_tokenizer(config.model.path))
    session = Session(ranks, BlockingClient(config.replay.endpoint) if ranks.is_first else None, stopping)
    welcome = session.hello(config.shared())
    run_dir = Path(welcome.run_dir)
    if ranks.is_first:
        set_up_logging("learner", config.logging.level, run_dir)
    engine = TrainEngine(policy, config, ranks)
    publisher = Publisher(engine, run_dir, Path(config.model.path), tokens, config.run.seed)
    learner = Learner(config, engine, session, publisher, Anchors(engine, session, config, run_dir), stopwatch, stopping, welcome)
    return 0 if learner.run() else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
