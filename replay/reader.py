"""Read-only access to a run, live or finished: one snapshot of its store, its config and its metrics. For the tools."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from configs.load import load_resolved
from configs.schema import Config
from replay.rows import COMPUTED, TABLES, UpdateRow, key_of
from replay.store import check_schema
from wire.errors import ConfigError, StoreError

STORE, RUNS = "replay.sqlite", "runs"
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged store may raise. The second: SQLite's message repeats the bytes that it does not understand."""
Row = TypeVar("Row", bound=NamedTuple)


class RunReader:
    """One consistent snapshot: rows committed after it was opened are not seen, and writers are never blocked."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError, naming the runs that exist, when there is no run at `run_dir`; StoreError when another Leeway made it."""
        self.run_dir = Path(run_dir)
        store = self.run_dir / STORE
        if not store.is_file():
            raise ConfigError(_missing(self.run_dir))
        try:
            self.db = _snapshot(store)
        except UNREADABLE as error:
            raise ConfigError(f"{store} cannot be read as a run's store: {error}") from None
        try:
            check_schema(store, self.one("PRAGMA user_version"))
        except StoreError:
            self.db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.db.close()

    def read(self, row: type[Row], where: str = "1", *values: Any) -> Iterator[Row]:
        """Rows of one table as `row`s, in the order of their key."""
        table = TABLES[row]
        columns = ", ".join(COMPUTED.get(name, {}).get(table, f'"{name}"') for name in row._fields)
        return map(row._make, self.db.execute(f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {key_of(row)}", values))

    def sql(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(query, values).fetchall()

    def one(self, query: str, *values: Any) -> Any:
        """First column of the first row, None when there is no row."""
        found = self.db.execute(query, values).fetchone()
        return found[0] if found else None

    def payload(self, rollout_id: str) -> bytes | None:
        return self.one("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout_id)

    def counters(self) -> dict[str, float]:
        return dict(self.sql("SELECT name, value FROM counters ORDER BY name"))

    def ledger_head(self) -> str | None:
        return self.one("SELECT hash FROM ledger ORDER BY seq DESC LIMIT 1")

    def config(self) -> Config:
        """The config the run was started with. Raises ConfigError when it cannot be read."""
        path = self.run_dir / "config.json"
        try:
            return load_resolved(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None

    def records(self) -> Iterator[tuple[UpdateRow, dict[str, Any]]]:
        """Committed updates with their record, in order."""
        for row in self.read(UpdateRow, "state = 'committed'"):
            yield row, json.loads(row.record)


def find_run(text: str) -> Path:
    """The folder `text`, or `runs/<text>` when only that exists."""
    named = Path(RUNS) / text
    return named if named.is_dir() and not Path(text).exists() else Path(text)


def _missing(run_dir: Path) -> str:
    """A bare name may have meant a folder here or one in runs/, as `find_run` reads it."""
    bare = run_dir.parent == Path()
    parents = [run_dir.parent] + ([Path(RUNS)] if bare else [])
    for parent in parents:
        if known := sorted(path.parent.name for path in parent.glob(f"*/{STORE}")):
            return f"no run at {run_dir}: {parent} holds {', '.join(known)}"
    return f"no run at {run_dir}: there are no runs in {' or '.join(map(str, parents))}"


def _snapshot(store: Path) -> sqlite3.Connection:
    try:
        return _begin(store, "mode=ro")
    except sqlite3.OperationalError:
        if store.with_name(f"{store.name}-wal").exists():
            raise
    return _begin(store, "immutable=1")  # a finished run where nothing may be written, not even SQLite's shared index


def _begin(store: Path, how: str) -> sqlite3.Connection:
    """A read-only connection in a transaction that has begun to read."""
    db = sqlite3.connect(f"{store.resolve().as_uri()}?{how}", uri=True, isolation_level=None)
    try:
        db.execute("BEGIN")
        db.execute("SELECT count(*) FROM meta").fetchone()
    except UNREADABLE:
        db.close()
        raise
    return db
