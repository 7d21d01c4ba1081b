"""`leeway run --dry-run`: what the three daemons look at before they start, without starting them. Makes nothing."""

from pathlib import Path

import actor.__main__ as actor
import learner.__main__ as learner
from configs.arguments import Arguments
from configs.schema import Config
from replay.rundir import check_run
from replay.start import check_start
from verifier.pool import check_spec
from wire.keys import LEARNER, client_keys, server_keys
from wire.sockets import check_endpoint


def check(arguments: Arguments) -> None:
    """Raises ConfigError, one line, for the first thing that is wrong. Where a cold start still has to make model and data, these are
    not looked at."""
    config = arguments.config
    if not waits_for_cold_start(config):
        for look in (check_start, actor.check, learner.check):
            look(arguments)
        return
    check_run(arguments)
    server_keys(config.security)
    check_endpoint(config.replay.endpoint, keyed=client_keys(config.security, LEARNER) is not None)
    check_spec(config.task.verifier, config.task.verifier_arguments)


def waits_for_cold_start(config: Config) -> bool:
    """Whether something that the run reads is not there and lies where the cold start will make it."""
    if config.cold_start is None:
        return False
    out = Path(config.cold_start.out)
    read = (config.model.path, config.task.train, config.task.heldout)
    return any(path is not None and out in Path(path).parents and not Path(path).exists() for path in read)
