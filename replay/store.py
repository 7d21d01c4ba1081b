"""One SQLite file, one writer. What happens within a few milliseconds is one transaction; nobody hears of it before it is on disk.

A statement or commit that fails raises StoreError and ends the daemon: a later success would prove nothing about what was lost.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from replay.ledger import FIRST, Ledger
from wire.errors import StoreError

SCHEMA_VERSION = 2
"""Of `schema.sql` and of the ledger's bodies. A store of another is refused: docs/store.md has the rule."""
PRAGMAS = ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000", "foreign_keys = ON",
           "wal_autocheckpoint = 4000")
MAX_PENDING_BYTES = 1 << 20


class Storage:
    """sqlite3 behind three methods: the seam where tests put faults."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise StoreError(f"the store failed: {error}; nothing unacknowledged was kept, start replay again with --resume") from error

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        try:
            return self._db.executemany(sql, rows)
        except sqlite3.Error as error:
            raise StoreError(f"the store failed: {error}; nothing unacknowledged was kept, start replay again with --resume") from error

    def close(self) -> None:
        self._db.close()


def check_schema(path: Path, found: int) -> None:
    """StoreError, with what to do, for a store that another Leeway made. `found`: its PRAGMA user_version."""
    if found != SCHEMA_VERSION:
        raise StoreError(f"{path} has schema version {found}, this Leeway reads {SCHEMA_VERSION}: go on with this run, or look into it, "
                         "with the Leeway that began it; or begin another run (docs/store.md, Schema versions)")


def check_store(path: Path) -> None:
    """`check_schema` before anything is written beside the store. What is damaged, or not there, is named where it is opened."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:  # a start that was killed may have left an empty file
            check_schema(path, db.execute("PRAGMA user_version").fetchone()[0])


class Store:
    """Group commit, counters, meta values and the ledger over a Storage."""

    def __init__(self, path: Path, *, commit_s: float = 0.005, storage: type[Storage] = Storage) -> None:
        """Creates the tables in a new file. Raises StoreError when the file is of another schema version or damaged."""
        self.db = storage(path)
        self.commit_s = commit_s
        self._began: float | None = None
        self._bytes = 0
        self._dirty: set[str] = set()
        self.last: dict[str, int] = {}
        """By kind: the number of the last ledger row that this process wrote."""
        try:
            self._prepare(path)
        except BaseException:
            self.db.close()
            raise

    def _prepare(self, path: Path) -> None:
        for pragma in PRAGMAS:
            self.db.execute(f"PRAGMA {pragma}")
        if self.one("SELECT count(*) FROM sqlite_schema") == self.one("PRAGMA user_version") == 0:
            self._create()
        check_schema(path, self.one("PRAGMA user_version"))
        self.counters: dict[str, float] = dict(self.db.execute("SELECT name, value FROM counters").fetchall())
        last = self.db.execute("SELECT seq, hash FROM ledger ORDER BY seq DESC LIMIT 1").fetchone()
        self.ledger = Ledger(*(last or (0, FIRST)))

    def _create(self) -> None:
        schema = files("replay").joinpath("schema.sql").read_text()
        self.db.execute("BEGIN IMMEDIATE")
        for statement in _statements(schema):
            self.db.execute(statement)
        self.db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.db.execute("COMMIT")

    # ------------------------------------------------------------ transaction
    @property
    def pending(self) -> bool:
        return self._began is not None

    def begin(self, now: float) -> None:
        """Open the transaction, unless one is open."""
        if self._began is None:
            self.db.execute("BEGIN IMMEDIATE")
            self._began = now

    def due_in(self, now: float) -> float | None:
        """Seconds until the open transaction has to be committed; None when there is none."""
        if self._began is None:
            return None
        return 0.0 if self._bytes >= MAX_PENDING_BYTES else max(0.0, self._began + self.commit_s - now)

    def commit(self) -> None:
        if self._began is None:
            return
        self.db.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", [(name, self.counters[name]) for name in self._dirty])
        self.db.execute("COMMIT")
        self._began, self._bytes = None, 0
        self._dirty.clear()

    def close(self) -> None:
        self.db.close()

    # ------------------------------------------------------------ inside it
    def record(self, kind: str, body: dict[str, Any]) -> None:
        """Append a ledger row."""
        row = self.ledger.next(kind, body)
        self.last[kind] = row[0]
        self._bytes += len(row[2])
        self.db.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?)", row)

    def wrote(self, size: int) -> None:
        """Payload bytes written in this transaction: a megabyte of them is committed at once."""
        self._bytes += size

    def count(self, name: str, by: float = 1) -> None:
        if by or name not in self.counters:
            self.counters[name] = self.counters.get(name, 0) + by
            self._dirty.add(name)

    def set_meta(self, key: str, value: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # ------------------------------------------------------------ reading
    def meta(self, key: str) -> str | None:
        return self.one("SELECT value FROM meta WHERE key = ?", key)

    def one(self, sql: str, *values: Any) -> Any:
        """First column of the first row, None when there is none."""
        row = self._read(self.db.execute(sql, values).fetchone)
        return row[0] if row else None

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._read(self.db.execute(sql, values).fetchall)

    @staticmethod
    def _read(fetch: Callable[[], Any]) -> Any:
        try:
            return fetch()
        except sqlite3.Error as error:  # a damaged page, a text that is no UTF-8
            raise StoreError(f"the store cannot be read: {error}: see what is damaged, with `leeway replay --verify RUN`, and bring back a "
                             "copy of the file") from error


def _statements(script: str) -> list[str]:
    """Split a script at its statements' ends; sqlite3 tells where a statement is complete."""
    found, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            found.append(current)
            current = ""
    return found
