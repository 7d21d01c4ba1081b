"""Puts a learner together: process group, model, engine, and the conversation with replay."""

import logging
from collections.abc import Callable
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from configs.needs import uncorrected
from configs.rules import check_ranks
from configs.schema import Config
from learner.anchor import Anchors
from learner.deepspeed_engine import TrainEngine
from learner.loop import Learner
from learner.model import load_policy, load_tokenizer, set_determinism
from learner.publish import Publisher
from learner.ranks import join
from learner.session import Client, Session
from learner.stop import Stop
from learner.stopwatch import Stopwatch
from wire.errors import ConfigError
from wire.process import set_up_logging

log = logging.getLogger(__name__)


def assemble(config: Config, connect: Callable[[], Client], stop: Stop, stopwatch: Stopwatch) -> Learner:
    """`connect` is called by rank 0 only. ConfigError for a model or a number of ranks that will not do, RefusedError from replay."""
    ranks = join(config)
    set_up_logging("learner" if ranks.is_first else f"learner rank {ranks.rank}", config.logging.level)
    try:
        check_ranks(config.learner.groups_per_update // config.learner.steps_per_update, ranks.world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if ranks.is_first and (line := uncorrected(config)) is not None:
        log.warning("%s", line)
    set_determinism(config.run.seed, config.learner.device)
    disable_progress_bar()  # in a log it is noise
    policy = load_policy(config.model.path, config.model.dtype, config.model.attention, partitioned=config.learner.zero_stage == 3)
    tokens = len(load_tokenizer(config.model.path))
    session = Session(ranks, connect() if ranks.is_first else None, stop)
    welcome = session.hello(config.shared())
    run_dir = Path(welcome.run_dir)
    if ranks.is_first:
        set_up_logging("learner", config.logging.level, run_dir)
    engine = TrainEngine(policy, config, ranks)
    publisher = Publisher(engine, run_dir, Path(config.model.path), tokens, config.run.seed)
    return Learner(config, engine, session, publisher, Anchors(engine, session, config, run_dir), stopwatch, welcome)
