"""Checkpoints: `<run>/checkpoints/v000060/{manifest.json, state/...}`.

`state/` is DeepSpeed's own format, which is unpickled when loaded: the one exception to "nothing is ever executed". So one is loaded only
when it is complete, lies in our own folders, belongs to us, nobody else may write there, and every file has the digest in its manifest.
"""

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from learner.deepspeed_engine import TrainEngine
from wire.digest import digest, digest_file
from wire.errors import RunError
from wire.manifest import MANIFEST, fsync

log = logging.getLogger(__name__)
STATE = "state"


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's manifest. `update`: the newest committed one; `rng`: torch's generator state, hexadecimal; `files`: digest by path."""

    version: int
    update: int | None
    weights_digest: str
    ledger_head: str
    seed: int
    rng: str
    world: int
    zero_stage: int
    steps: int
    files: dict[str, str]


class Checkpoint(NamedTuple):
    """`path` is relative to the run directory."""

    path: str
    manifest_digest: str
    saved: Saved


def checkpoint_path(version: int) -> str:
    return f"checkpoints/v{version:06d}"


def save(engine: TrainEngine, run_dir: Path, version: int, *, update: int | None, weights_digest: str, ledger_head: str,
         seed: int) -> Checkpoint | None:
    """Every rank calls it; rank 0 gets the checkpoint. Complete once it is renamed; an interrupted one leaves only a temporary folder."""
    target = run_dir / checkpoint_path(version)
    staged = target.with_name(f".{target.name}.tmp")
    if engine.ranks.is_first:
        for left in target.parent.glob(".v*.tmp"):  # of savers that were killed
            shutil.rmtree(left)
        staged.mkdir(parents=True, mode=0o700)
    engine.ranks.barrier()
    engine.engine.save_checkpoint(str(staged), tag=STATE, save_latest=False)
    engine.ranks.barrier()
    if not engine.ranks.is_first:
        return None
    engine.memory.save(staged)
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    saved = Saved(version, update, weights_digest, ledger_head, seed, torch.get_rng_state().numpy().tobytes().hex(), engine.ranks.world,
                  engine.zero_stage, engine.steps, {str(path.relative_to(staged)): digest_file(path) for path in files})
    body = msgspec.json.format(msgspec.json.encode(saved))
    (staged / MANIFEST).write_bytes(body)
    for path in [*files, staged / MANIFEST, staged / STATE, staged]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        fsync(path)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    fsync(target.parent)
    return Checkpoint(checkpoint_path(version), digest(body), saved)


def complete_versions(run_dir: Path, newest: int) -> list[int]:
    """Versions up to `newest` that have a sound checkpoint, the newest first. One that must not be loaded is passed over, and said so."""
    found = []
    for folder in sorted((run_dir / "checkpoints").glob("v*"), reverse=True):
        try:
            found.append(read(run_dir, folder).saved.version)
        except RunError as error:
            log.error("checkpoint %s is not used: %s", folder.name, error)
    return [version for version in found if version <= newest]


def read(run_dir: Path, folder: Path) -> Checkpoint:
    """Check everything but load nothing. Raises RunError with the reason why this checkpoint must not be loaded."""
    try:
        body = (folder / MANIFEST).read_bytes()
        saved = msgspec.json.decode(body, type=Saved)
        present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}
        for path in [folder, *folder.rglob("*")]:
            _check_owner(path)
        if folder.name != Path(checkpoint_path(saved.version)).name:
            raise RunError(f"its manifest speaks of version {saved.version}")
        if odd := present ^ saved.files.keys():
            raise RunError(f"{min(odd)} is in only one of folder and manifest")
        for name, expected in saved.files.items():
            if digest_file(folder / name) != expected:
                raise RunError(f"the digest of {name} does not match")
    except FileNotFoundError:
        raise RunError("it is not complete") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"it cannot be read: {error}") from None
    return Checkpoint(str(folder.relative_to(run_dir)), digest(body), saved)


def _check_owner(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise RunError(f"{path.name} is a symbolic link")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunError(f"{path.name} belongs to another user, or others may write to it")


def load(engine: TrainEngine, run_dir: Path, checkpoint: Checkpoint) -> None:
    """Into a fresh engine, on every rank. Raises RunError when it was made by another number of ranks or ZeRO stage."""
    saved = checkpoint.saved
    if (saved.world, saved.zero_stage) != (engine.ranks.world, engine.zero_stage):
        raise RunError(f"checkpoint {checkpoint.path} was made by {saved.world} ranks at ZeRO stage {saved.zero_stage}; "
                       f"this is {engine.ranks.world} at stage {engine.zero_stage}: start the learner as it was")
    loaded, _ = engine.engine.load_checkpoint(str(run_dir / checkpoint.path), tag=STATE)
    if loaded is None:
        raise RunError(f"DeepSpeed could not load checkpoint {checkpoint.path}")
    engine.loaded(saved.steps)
    engine.memory.load(run_dir / checkpoint.path, first=engine.ranks.is_first)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(saved.rng), dtype=torch.uint8))
