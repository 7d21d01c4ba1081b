"""Where a learner that was there before takes up: the newest complete checkpoint. What was committed after it is run again (`rerun.py`)."""

import logging
from pathlib import Path
from typing import NamedTuple

from learner import checkpoint
from learner.checkpoint import Checkpoint
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.session import Session
from wire.errors import RunError, TryAgainError
from wire.manifest import version_path
from wire.messages import Checkpointed
from wire.record import VersionNotice

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """The version that the engine holds, and the checkpoint that it came from; None for the freshly loaded initial model."""

    notice: VersionNotice
    checkpoint: Checkpoint | None


def load_newest(engine: TrainEngine, session: Session, run_dir: Path, committed: VersionNotice) -> Loaded:
    """Load the newest checkpoint that is sound and that replay knows. Without any, the freshly loaded initial model will do if it is what
    is committed. RunError when there is nothing to go on from."""
    one = _choose(session, run_dir, committed.version)
    if one is not None:
        checkpoint.load(engine, run_dir, one)
        version, expected = one.saved.version, one.saved.weights_digest
    else:
        version, expected = 0, committed.weights_digest
        if committed.version != 0:
            raise RunError(f"version {committed.version} is committed, but no checkpoint can be used to go on from it: start a new run")
    if session.ranks.decide(session.ranks.is_first and digest_state(engine.full_state()) != expected):
        raise RunError(f"what was loaded as version {version} does not have that version's weights digest: was model.path changed?")
    if version == committed.version and expected != committed.weights_digest:
        raise RunError(f"the checkpoint of version {version} does not hold the weights that were committed")
    log.info("go on from version %d (committed: %d)", version, committed.version)
    return Loaded(VersionNotice(version, version_path(version), "", expected), one)


def load_again(engine: TrainEngine, run_dir: Path, loaded: Loaded) -> None:
    """What was loaded before, after steps were made that are given up. RunError when it was no checkpoint."""
    if loaded.checkpoint is not None:
        checkpoint.load(engine, run_dir, loaded.checkpoint)
    elif engine.steps:
        raise RunError("an update does not come out on this machine as it was committed, and there is no checkpoint to go back to: "
                       "start a new run")


def _choose(session: Session, run_dir: Path, newest: int) -> Checkpoint | None:
    """Rank 0 chooses; the other ranks check the same folder themselves before anything is unpickled."""
    ranks = session.ranks
    for version in _offered(session, run_dir, newest):
        one = checkpoint.read(run_dir, run_dir / checkpoint.checkpoint_path(version))
        request = Checkpointed(session.epoch, version, one.path, one.manifest_digest) if ranks.is_first else None
        try:
            session.call(request)
            return one
        except TryAgainError as error:
            log.warning("checkpoint of version %d is not used: %s", version, error)
    return None


def _offered(session: Session, run_dir: Path, newest: int) -> list[int]:
    ranks = session.ranks
    versions = checkpoint.complete_versions(run_dir, newest) if ranks.is_first else []
    return [int(word) for word in ranks.broadcast(" ".join(map(str, versions)).encode() if ranks.is_first else None).split()]
