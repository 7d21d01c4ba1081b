"""`python -m learner CONFIG... [--name NAME] [--set key=value]...`: the learner, alone or under torchrun or the deepspeed launcher."""

import os
import sys

from configs.arguments import Arguments, parse
from configs.schema import Config
from learner.stop import Stop
from learner.stopwatch import Stopwatch
from replay.client import BlockingClient
from wire.folders import model_config
from wire.keys import LEARNER, client_keys
from wire.process import INTERRUPTED, end, run_main
from wire.sockets import check_endpoint


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run cannot go on, 2 bad config, 75 start again and recover, 130 interrupted."""
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]  # the deepspeed launcher's
    return run_main(lambda: learn(parse(words, "leeway learner", check).config))


def check(arguments: Arguments) -> None:
    """For --dry-run: what can be looked at without torch. Raises ConfigError."""
    config = arguments.config
    check_endpoint(config.replay.endpoint, keyed=client_keys(config.security, LEARNER) is not None)
    model_config(config.model.path)
    if config.learner.reference not in (None, "initial"):
        model_config(config.learner.reference, "learner.reference")


def learn(config: Config) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", config.learner.device)
    stopwatch, stop = Stopwatch(), Stop()
    stop.install()
    from learner.assemble import assemble  # torch and DeepSpeed read the environment when imported

    keys = client_keys(config.security, LEARNER)
    learner = assemble(config, lambda: BlockingClient(config.replay.endpoint, keys), stop, stopwatch)
    try:
        finished = learner.run()
    finally:
        learner.session.close()
    return 0 if finished else INTERRUPTED


if __name__ == "__main__":
    end(main())
