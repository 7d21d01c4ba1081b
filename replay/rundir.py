"""The run directory, `<run>/{config.json, replay.sqlite, weights/, checkpoints/, logs/}`: created once, resumed only with what may
change."""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from configs.arguments import Arguments
from configs.load import load_resolved
from configs.schema import RESUMABLE, SHARED, SHARED_EXCEPT, Config
from replay.store import check_store
from wire.errors import ConfigError
from wire.manifest import fsync

FOLDERS = ("weights", "checkpoints", "logs")
Changed = dict[str, tuple[Any, Any]]


def check_run(arguments: Arguments) -> Changed:
    """The keys that a resume changes, as (before, now). Raises ConfigError when the run may not be started like this,
    StoreError when another Leeway made its store."""
    run_dir = arguments.run_dir
    saved = run_dir / "config.json"
    if not saved.is_file():
        if arguments.resume:
            raise ConfigError(f"no run at {run_dir} to resume: leave out --resume to start it")
        return {}
    if not arguments.resume:
        raise ConfigError(f"{run_dir} exists: add --resume to go on with it, remove it with `rm -r {run_dir}`, or choose another --name")
    check_store(run_dir / "replay.sqlite")
    try:
        before = load_resolved(saved)
    except ValueError as error:
        raise ConfigError(f"{saved}: {error}") from None
    changed = changes(before, arguments.config)
    for key, (was, now) in changed.items():
        if not any(key == known or key.startswith(f"{known}.") for known in RESUMABLE):
            raise ConfigError(f"{key} was {was!r} when {run_dir} was started and is {now!r} now: "
                              f"a resumed run may change only {', '.join(RESUMABLE)}; to start anew, choose another --name, or "
                              f"remove this run with `rm -r {run_dir}`")
    return changed


def changes(before: Config, now: Config) -> Changed:
    one, other = (_flat(config.model_dump(mode="json")) for config in (before, now))
    return {key: (one.get(key), other.get(key)) for key in sorted({*one, *other}) if one.get(key) != other.get(key)}


def shared_changed(changed: Changed) -> bool:
    """Whether a change concerns keys that all processes must agree on."""
    return any(key.split(".")[0] in SHARED and key.partition(".")[2] not in SHARED_EXCEPT.get(key.split(".")[0], ()) for key in changed)


def create(run_dir: Path) -> None:
    for folder in FOLDERS:
        (run_dir / folder).mkdir(parents=True, exist_ok=True)


def lock(run_dir: Path) -> IO[str]:
    """Held for the life of the process: one replay per run, whatever its address."""
    file = (run_dir / "replay.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{run_dir}: this run's replay is already running") from None
    return file


def save_config(run_dir: Path, config: Config) -> None:
    temporary = run_dir / ".config.json.tmp"
    temporary.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n")
    fsync(temporary)
    os.replace(temporary, run_dir / "config.json")
    fsync(run_dir)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
