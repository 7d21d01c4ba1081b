"""A folder of this actor's own for weights, on tmpfs when there is room. What a killed actor left behind is removed by the next one."""

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

TMPFS = Path("/dev/shm")
NEW, PREFIX, LOCK = "leeway-new-", "leeway-actor-", "lock"


class Scratch:
    """Lives until `close`, or until its process is gone: a lock in the folder says which."""

    def __init__(self, room: int, tmpfs: Path = TMPFS) -> None:
        """`room`: bytes that must be free on `tmpfs`, else the system's temporary folder is used."""
        fallback = Path(tempfile.gettempdir())
        for parent in {tmpfs, fallback}:
            _remove_abandoned(parent)
        fits = tmpfs.is_dir() and shutil.disk_usage(tmpfs).free >= room
        unlocked = Path(tempfile.mkdtemp(prefix=NEW, dir=tmpfs if fits else fallback))
        self._lock = (unlocked / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = unlocked.rename(unlocked.with_name(PREFIX + unlocked.name.removeprefix(NEW)))  # found by others only once locked

    def close(self) -> None:
        shutil.rmtree(self.folder)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        if _is_free(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)  # another actor may be removing it too


def _is_free(lock: Path) -> bool:
    try:
        handle: IO[str] = lock.open("r+")
    except OSError:  # gone meanwhile, or another user's
        return False
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
