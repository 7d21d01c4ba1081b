"""From a config and a folder to a Core that knows where the run is."""

import secrets
import sqlite3
from pathlib import Path
from typing import NamedTuple

from configs.arguments import Arguments
from configs.schema import Config
from replay.core import Core
from replay.prompts import PromptFile
from replay.rebuild import rebuild
from replay.rundir import Changed, check_run, shared_changed
from replay.store import Storage, Store
from wire.digest import digest_json
from wire.errors import ConfigError, StoreError
from wire.keys import ServerKeys, server_keys
from wire.process import Clock
from wire.sockets import check_endpoint

DAMAGED = (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What reading a damaged store may raise."""


class Found(NamedTuple):
    changed: Changed
    prompts: tuple[PromptFile, PromptFile | None]
    keys: ServerKeys | None


def check_start(arguments: Arguments) -> Found:
    """All that replay reads before it listens; makes nothing. Raises ConfigError."""
    config = arguments.config
    changed, prompts, keys = check_run(arguments), read_prompts(config), server_keys(config.security)
    check_endpoint(config.replay.endpoint, keyed=keys is not None)
    return Found(changed, prompts, keys)


def read_prompts(config: Config) -> tuple[PromptFile, PromptFile | None]:
    task = config.task
    heldout = PromptFile(Path(task.heldout), task.prompt_column, config.eval.prompts) if task.heldout else None
    return PromptFile(Path(task.train), task.prompt_column), heldout


def open_core(config: Config, run_dir: Path, prompts: tuple[PromptFile, PromptFile | None], *, changed: Changed | None = None,
              clock: Clock | None = None, storage: type[Storage] = Storage) -> Core:
    """Open or create the store, rebuild memory from it, and record the start. Raises ConfigError when the prompt files are not those
    that the run began with, StoreError when the store cannot be read."""
    try:
        return _open(config, run_dir, prompts, changed, clock or Clock(), storage)
    except DAMAGED as error:
        raise StoreError(f"{run_dir / 'replay.sqlite'} is damaged ({type(error).__name__}: {error}): see what is, with `leeway replay "
                         f"--verify {run_dir}`, and bring back a copy of the file") from error


def _open(config: Config, run_dir: Path, prompts: tuple[PromptFile, PromptFile | None], changed: Changed | None, clock: Clock,
          storage: type[Storage]) -> Core:
    store = Store(run_dir / "replay.sqlite", commit_s=config.replay.commit_ms / 1000, storage=storage)
    try:
        return _fill(Core(config, run_dir, store, clock, *prompts), prompts, changed)
    except BaseException:
        store.close()
        raise


def _fill(core: Core, prompts: tuple[PromptFile, PromptFile | None], changed: Changed | None) -> Core:
    config, run_dir, store = core.config, core.run_dir, core.store
    known = store.meta("prompts")
    digests = [prompt_file.digest for prompt_file in prompts if prompt_file is not None]
    if known is not None and known != " ".join(digests):
        raise ConfigError(f"task.train or task.heldout no longer holds what {run_dir} was started with: restore the files, "
                          "or start another run")
    core.begin().set_meta("prompts", " ".join(digests))
    if changed and shared_changed(changed):
        store.set_meta("sessions", "[]")  # whoever joined under the old config has to say HELLO again
    rebuild(core)
    config_digest = digest_json(config.model_dump(mode="json"))
    body = {"config": config_digest, "changed": changed or {}}
    store.record(*(("created", {**body, "run": secrets.token_hex(8)}) if known is None else ("opened", body)))
    core.run_id = store.one("SELECT hash FROM ledger WHERE seq = 1")[:16]
    core.plan_evaluation()
    store.commit()
    return core
