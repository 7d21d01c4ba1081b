"""`python -m replay CONFIG... [--name NAME] [--set key=value]... [--resume] [--dry-run]`: the replay daemon of one run."""

import asyncio
import logging
import sqlite3
import sys
from pathlib import Path

from configs.arguments import Arguments, parse
from replay import rundir
from replay.core import Core
from replay.daemon import Daemon
from replay.start import check_start, open_core
from replay.summary import write_summary
from replay.verify import main as verify
from wire.errors import LeewayError, StoreError
from wire.process import run_main, set_up_logging
from wire.sockets import Router

log = logging.getLogger(__name__)


def main() -> int | None:
    words = sys.argv[1:]
    if any(word.partition("=")[0] == "--verify" for word in words) and not {"-h", "--help"} & {*words}:
        return verify(words)
    arguments = parse(words, "leeway replay", check_start)
    set_up_logging("replay", arguments.config.logging.level)
    changed, prompts, keys = check_start(arguments)
    router = Router(arguments.config.replay.endpoint, keys)
    try:
        rundir.create(arguments.run_dir)
        with rundir.lock(arguments.run_dir):
            set_up_logging("replay", arguments.config.logging.level, arguments.run_dir)
            rundir.save_config(arguments.run_dir, arguments.config)
            core = open_core(arguments.config, arguments.run_dir, prompts, changed=changed)
            serve(arguments, core, router)
    finally:
        router.close()
    return None


def serve(arguments: Arguments, core: Core, router: Router) -> None:
    """Run the daemon to its end, and write the summary whatever that end is."""
    log.info("run %s: listening on %s, version %d, %d of %d updates", arguments.run_dir, router.endpoint, core.committed, core.stepped,
             core.config.learner.updates)
    daemon, status = Daemon(core, router), "failed"
    try:
        asyncio.run(daemon.run())
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except StoreError:
        core.store.close()  # what is not committed is in doubt, and goes
        raise
    else:
        log.info("the run is done")
    finally:
        if status != "failed":
            daemon.close()
        try_summary(arguments.run_dir, status)


def try_summary(run_dir: Path, status: str) -> None:
    try:
        write_summary(run_dir, status)
    except (LeewayError, OSError, sqlite3.Error) as error:
        log.error("summary.json could not be written: %s", error)


if __name__ == "__main__":
    sys.exit(run_main(main))
