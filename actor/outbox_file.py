"""The outbox's file: one entry per finished group, flushed to disk before it is sent, gone only when replay has acknowledged it.

An SQLite file per actor name and run, locked by its process. What a killed actor left is found by the next one of its name. An entry
whose digest does not match is left out; a file that SQLite cannot read is set aside, and the entries before the damage are kept. Replay
grants the orders of lost entries again, since they were never acknowledged.
"""

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from actor.collect import Outcome
from wire.digest import digest
from wire.errors import ConfigError, StoreError
from wire.messages import SampleFailure
from wire.record import RolloutHead, WorkOrder, payload_size

PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "journal_size_limit = 16777216")
CREATE = "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, digest TEXT NOT NULL, body BLOB NOT NULL, payload BLOB NOT NULL)"
SIDE_FILES = ("", "-wal", "-shm")
DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError)
"""What a damaged file may raise. The second: SQLite's message repeats the bytes that it does not understand."""


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Outcome without its payloads."""

    orders: list[WorkOrder]
    heads: list[RolloutHead]
    digests: list[str]
    failures: list[SampleFailure]


class OutboxFile:
    """`found`: what an earlier life left, by entry id. `damage`: what was wrong with the file, for people; None when nothing was."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        """Raises ConfigError when another process holds it, StoreError when it cannot be opened or written."""
        self.path = folder / f"{name}-{run_id}.sqlite"
        self._mutex = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path.with_suffix(".lock"), name)
        except OSError as error:
            raise StoreError(f"the outbox {self.path} cannot be made: {error.strerror}") from None
        try:
            self.found, self.damage = self._open()
        except sqlite3.Error as error:
            self._lock.close()
            raise StoreError(f"the outbox {self.path} cannot be opened: {error}") from None

    def _open(self) -> tuple[dict[int, Outcome], str | None]:
        try:
            self._db = _connect(self.path)
            found, odd = _read(self._db)
        except DAMAGED as error:
            if isinstance(error, sqlite3.OperationalError):  # full, read-only, an I/O error: nothing is wrong with what is there
                raise
            found, odd = self._start_anew(), str(error)
        return found, odd

    def _start_anew(self) -> dict[int, Outcome]:
        """Set the damaged file aside; keep the entries before the damage."""
        aside = self.path.with_suffix(".damaged")
        for end in SIDE_FILES:
            if (file := Path(f"{self.path}{end}")).exists():
                os.replace(file, f"{aside}{end}")
        sound = _sound_prefix(aside)
        self._db = _connect(self.path)
        return dict(zip(self.write(sound), sound, strict=True))

    def write(self, outcomes: Iterable[Outcome]) -> list[int]:
        """Ids of the new entries, which are on disk when this returns. Raises StoreError."""
        rows = []
        for outcome in outcomes:
            body = msgspec.msgpack.encode(Body(outcome.orders, outcome.heads, outcome.digests, outcome.failures))
            payload = b"".join(outcome.payloads)
            rows.append((digest(body, payload), body, payload))
        with self._transaction() as db:
            return [int(db.execute("INSERT INTO entries (digest, body, payload) VALUES (?, ?, ?)", row).lastrowid or 0) for row in rows]

    def remove(self, ids: Iterable[int]) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in ids])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"the outbox {self.path} failed: {error}; what it held before is kept for the next start") from error

    def close(self, *, discard: bool = False) -> None:
        """`discard`: the run is over, nobody wants what is left."""
        with self._mutex:
            self._db.close()
            if discard:
                for end in SIDE_FILES:
                    Path(f"{self.path}{end}").unlink(missing_ok=True)
            self._lock.close()


def size_of(outcome: Outcome) -> int:
    return sum(map(len, outcome.payloads))


def _locked(path: Path, name: str) -> IO[str]:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another actor named {name} is running with the outbox {path.with_suffix('.sqlite')}: "
                          "give this one a name of its own (--set actor.name=NAME)") from None
    return file


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        db.execute(CREATE)
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
    except DAMAGED:
        db.close()
        raise
    return db


def _read(db: sqlite3.Connection) -> tuple[dict[int, Outcome], str | None]:
    """Sound entries by id; entries whose digest does not match are deleted, and counted in the text."""
    found, bad = {}, []
    for number, *row in db.execute("SELECT id, digest, body, payload FROM entries ORDER BY id"):
        outcome = _decode(*row)
        if outcome is None:
            bad.append((number,))
        else:
            found[number] = outcome
    db.executemany("DELETE FROM entries WHERE id = ?", bad)
    return found, f"{len(bad)} of {len(bad) + len(found)} entries do not match their digests" if bad else None


def _sound_prefix(path: Path) -> list[Outcome]:
    """Entries that can be read and match their digests, up to the first that cannot."""
    sound: list[Outcome] = []
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            for row in db.execute("SELECT digest, body, payload FROM entries ORDER BY id"):
                if (outcome := _decode(*row)) is None:
                    break
                sound.append(outcome)
    except DAMAGED:  # here the sound part ends; the caller says so
        pass
    return sound


def _decode(told: Any, body: Any, payload: Any) -> Outcome | None:
    """None when it is not what was written."""
    if not isinstance(body, bytes) or not isinstance(payload, bytes) or digest(body, payload) != told:
        return None
    try:
        found = msgspec.msgpack.decode(body, type=Body)
    except msgspec.MsgspecError:  # of another version of Leeway
        return None
    payloads, start = [], 0
    for head in found.heads:
        payloads.append(payload[start:start + payload_size(head)])
        start += len(payloads[-1])
    return Outcome(found.orders, found.heads, payloads, found.digests, found.failures) if start == len(payload) else None
