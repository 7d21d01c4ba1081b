"""`python -m actor CONFIG... [--set key=value]... --name RUN`: one actor with its engine. An actor is named by `--set actor.name=NAME`."""

import asyncio
import os
import sys
from pathlib import Path

from actor.host import AttachedEngine, StartedEngine, host_for
from actor.loop import Actor
from actor.name import free_name
from actor.tokenise import Tokeniser
from configs.arguments import Arguments, parse
from configs.schema import Config
from replay.client import AsyncClient
from verifier.pool import VerifierPool, check_spec
from wire.keys import client_keys
from wire.process import run_main, set_up_logging
from wire.sockets import check_endpoint


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 the run is done, 1 it cannot go on, 2 bad config, 75 try again, 130 interrupted."""
    return run_main(lambda: start(parse(sys.argv[1:] if argv is None else argv, "leeway actor", check)))


def start(arguments: Arguments) -> None:
    asyncio.run(serve(arguments.config, arguments.run_dir))


def check(arguments: Arguments) -> None:
    """For --dry-run: what `serve` and its engine look at before anybody is waited for. Raises ConfigError."""
    config = arguments.config
    keys = client_keys(config.security, config.security.actor_key)
    check_endpoint(config.replay.endpoint, keyed=keys is not None)
    host_for(config, "dry-run", Path(os.devnull))
    check_spec(config.task.verifier, config.task.verifier_arguments)


def log_home(run_dir: Path, local: Path) -> Path:
    """The run directory where it is visible, else this machine's own folder of the same name."""
    home = run_dir if os.access(run_dir / "logs", os.W_OK) else local
    (home / "logs").mkdir(parents=True, exist_ok=True)
    return home


async def serve(config: Config, local: Path) -> None:
    name, _held = (config.actor.name, None) if config.actor.name else free_name(config.replay.endpoint)
    set_up_logging(f"actor {name}", config.logging.level)

    def make_host(run_dir: Path) -> StartedEngine | AttachedEngine:
        home = log_home(run_dir, local)
        set_up_logging(f"actor-{name}", config.logging.level, home)
        return host_for(config, name, home / "logs" / f"engine-{name}.log")

    host_for(config, name, Path(os.devnull))  # says what is wrong with the config before anybody is waited for

    def make_tokeniser() -> Tokeniser:
        return Tokeniser(config.model.path, config.task.chat)

    keys = client_keys(config.security, config.security.actor_key)
    pool = VerifierPool(config.task.verifier, deadline_s=config.task.deadline_s, slots=config.actor.verifier_slots,
                        arguments=config.task.verifier_arguments)
    client = AsyncClient(config.replay.endpoint, keys)
    try:
        await pool.start()
        await Actor(config, name, client, make_host, make_tokeniser, pool).run()
    finally:
        await pool.close()
        await client.close()


if __name__ == "__main__":
    sys.exit(main())
