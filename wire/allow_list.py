"""Replay's list of keys while it runs: read again when the file has changed, with the checks of the start."""

import logging
import threading

from wire.errors import ConfigError
from wire.keys import Known, ServerKeys, check_private, read_allowed, signature

log = logging.getLogger(__name__)


class AllowList:
    """A file that will not do changes nothing: the list before it holds, one log line says what is wrong, and the file is looked at
    again. Asked from two threads: the one that answers handshakes, and the daemon's."""

    def __init__(self, keys: ServerKeys) -> None:
        self._folder, self._known = keys.folder, keys.allowed
        self._read, self._refused = keys.read_at, ""
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Known | None:
        """Whose key this is; None when it is not on the list."""
        return self._known.get(key)

    def look(self) -> None:
        """Read the file again if it is not the one that was read last."""
        with self._lock:
            found = signature(self._folder)
            if found == self._read:
                return
            try:
                known = read_allowed(check_private(self._folder))
            except ConfigError as error:
                if str(error) != self._refused:
                    log.error("the changed list of keys is not used, the one before it still holds: %s", error)
                self._refused = str(error)
                return
            added, removed = ({one.name for one in of.values()} for of in (_without(known, self._known), _without(self._known, known)))
            log.warning("the list of keys was read again: %d keys; new: %s; no longer: %s", len(known), _names(added), _names(removed))
            self._known, self._read, self._refused = known, found, ""


def _without(one: dict[bytes, Known], other: dict[bytes, Known]) -> dict[bytes, Known]:
    return {key: known for key, known in one.items() if other.get(key) != known}


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
