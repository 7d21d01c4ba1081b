"""The WAL cut, zeroed and flipped; the database and the version files flipped: the acknowledged prefix, or a named refusal."""

import json
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from configs.schema import Config
from replay.reader import RunReader
from replay.start import open_core, read_prompts
from replay.verify import verify
from tests.support.run_builder import RunBuilder, small_run
from tests.support.torture import IN_MEMORY, TORTURE, mine, tell
from wire.errors import ConfigError, LeewayError, StoreError
from wire.manifest import FILE, MANIFEST

STEP = 1 if TORTURE >= 1 else 64
HEADER, FRAME = 32, 24
"""Bytes of the WAL's header, and of a frame's beside its page."""
SETTLED = "SELECT rollout_id, state, head, payload, payload_digest FROM rollouts ORDER BY 1"


@pytest.fixture
def ram() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="leeway-") as folder:
        yield Path(folder)


class State(NamedTuple):
    """What a commit left: the size of the WAL, the ledger's end, the number of rollouts."""

    size: int
    seq: int
    head: str
    rollouts: int


class Crashed(NamedTuple):
    database: bytes
    wal: bytes
    states: list[State]


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    """A database and its WAL as a kill leaves them, and what each commit in the WAL had acknowledged."""
    build = RunBuilder(tmp_path_factory.mktemp("damage") / "run")
    build.update()
    store, path = build.core.store, build.run_dir / "replay.sqlite"
    store.db.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def state() -> State:
        size = wal.stat().st_size if wal.exists() else 0
        return State(size, store.ledger.seq, store.ledger.head, store.one("SELECT count(*) FROM rollouts"))

    wal = path.with_name(path.name + "-wal")
    states = [state()]
    ask = build.ask

    def noting(*request: Any) -> Any:
        answer = ask(*request)
        states.append(state())
        return answer

    build.ask = noting  # type: ignore[method-assign]
    build.generate(1)
    build.generate(1)
    found = Crashed(path.read_bytes(), wal.read_bytes(), states)
    store.close()
    return found


def reopened(folder: Path, database: bytes, wal: bytes) -> tuple[int, str, int]:
    """What SQLite finds: the ledger's end and the number of rollouts."""
    path = folder / "x.sqlite"
    path.write_bytes(database)
    path.with_name("x.sqlite-wal").write_bytes(wal)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        seq, head = db.execute("SELECT seq, hash FROM ledger ORDER BY seq DESC LIMIT 1").fetchone()
        return seq, head, db.execute("SELECT count(*) FROM rollouts").fetchone()[0]


def places(wal: bytes) -> Sequence[int]:
    """Frame edges, the bytes beside them, and every STEP-th byte."""
    page, = struct.unpack(">I", wal[8:12])
    edges = range(HEADER, len(wal) + 1, FRAME + page)
    return mine(sorted({at for edge in edges for at in (edge - 1, edge, edge + 1) if at <= len(wal)} | set(range(0, len(wal), STEP))))


def prefix(states: list[State], intact: int) -> tuple[int, str, int]:
    """What was acknowledged when the first `intact` bytes of the WAL had been written."""
    return next(state for state in reversed(states) if state.size <= intact)[1:]


def test_the_wal_holds_several_commits(crashed: Crashed) -> None:
    assert len({state.size for state in crashed.states}) >= 5
    assert crashed.states[-1].rollouts == crashed.states[0].rollouts + 4


@pytest.mark.timeout(3600)
def test_a_wal_cut_anywhere_gives_the_acknowledged_prefix(crashed: Crashed, ram: Path) -> None:
    seen = set()
    for at in places(crashed.wal):
        found = reopened(ram, crashed.database, crashed.wal[:at])
        assert found == prefix(crashed.states, at), at
        seen.add(found)
    assert len(seen) >= 5
    tell(WALs_cut=len(places(crashed.wal)))


@pytest.mark.timeout(3600)
def test_a_tail_of_zeros_is_no_record(crashed: Crashed, ram: Path) -> None:
    for at in places(crashed.wal):
        found = reopened(ram, crashed.database, crashed.wal[:at] + bytes(len(crashed.wal) - at))
        assert found == prefix(crashed.states, at) or crashed.wal[at:].strip(b"\0") == b"", at
    tell(WALs_zeroed=len(places(crashed.wal)))


@pytest.mark.timeout(3600)
def test_a_bit_flipped_in_the_wal_ends_it_there(crashed: Crashed, ram: Path) -> None:
    page, = struct.unpack(">I", crashed.wal[8:12])
    flipped = [at for at in places(crashed.wal) if at < len(crashed.wal)]
    refused = 0
    for at in flipped:
        damaged = bytearray(crashed.wal)
        damaged[at] ^= 1 << at // STEP % 8
        frame = max(0, (at - HEADER) // (FRAME + page))
        intact = HEADER + frame * (FRAME + page) if at >= HEADER else 0
        try:
            found = reopened(ram, crashed.database, bytes(damaged))
        except sqlite3.DatabaseError:  # a named refusal
            assert at < HEADER
            refused += 1
            continue
        assert found == prefix(crashed.states, intact) or at < HEADER and found == crashed.states[-1][1:], at  # its counter is not read
    tell(WALs_flipped=len(flipped), of_them_refused=refused)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = small_run(tmp_path_factory.mktemp("flips") / "small")
    with closing(sqlite3.connect(run / "replay.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # no WAL beside it
    return run


@contextmanager
def flipped(file: Path, at: int, byte: int) -> Iterator[None]:
    """One bit of the file is another, for as long."""
    handle = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(handle, bytes([byte ^ 1 << at // STEP % 8]), at)
        yield
        os.pwrite(handle, bytes([byte]), at)
    finally:
        os.close(handle)


def read(store: Path) -> list[Any]:
    with closing(sqlite3.connect(store)) as db:
        return db.execute(SETTLED).fetchall()


@pytest.mark.timeout(7200)
def test_a_bit_flipped_in_the_database_never_passes_for_what_was_acknowledged(small: Path, ram: Path) -> None:
    """Either every rollout reads as it was, or `verify` has findings."""
    run = Path(shutil.copytree(small, ram / "run"))
    store, whole, expected = run / "replay.sqlite", (small / "replay.sqlite").read_bytes(), read(small / "replay.sqlite")
    assert len(expected) == 21
    places, changed, missed = mine(range(0, len(whole), STEP)), 0, []
    for at in places:
        with flipped(store, at, whole[at]):
            try:
                same = read(store) == expected
            except (sqlite3.Error, UnicodeDecodeError):
                same = False
            if not same:
                changed += 1
                missed += [] if verify(run).findings else [at]
    assert store.read_bytes() == whole  # nothing that was looked at is still damaged
    assert missed == []
    assert changed > 100
    tell(databases_flipped=len(places), of_them_with_another_rollout=changed, not_found_by_verify=len(missed))


@pytest.mark.timeout(7200)
def test_replay_refuses_a_damaged_store_by_name(small: Path, ram: Path) -> None:
    """It opens it, or it says what is wrong; no other error escapes. (What it hands out it checks: the test below.)"""
    run = Path(shutil.copytree(small, ram / "run"))
    store, whole = run / "replay.sqlite", (small / "replay.sqlite").read_bytes()
    build = Rebuilt(run)
    places, refused = mine(range(0, len(whole), 1 if STEP == 1 else len(whole) // 400)), 0
    for at in places:
        store.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1:])
        try:
            build.open()
        except LeewayError:
            refused += 1
        for end in ("-wal", "-shm"):
            store.with_name(store.name + end).unlink(missing_ok=True)
    assert refused > 5
    tell(stores_opened_by_replay=len(places), refused_by_name=refused)


class Rebuilt:
    def __init__(self, run: Path) -> None:
        tree = json.loads((run / "config.json").read_text())
        for name in ("train", "heldout"):
            tree["task"][name] = str(run / f"{name}.jsonl")
        self.run, self.config = run, Config.model_validate(tree)
        self.prompts = read_prompts(self.config)

    def open(self) -> None:
        open_core(self.config, self.run, self.prompts).store.close()


def test_a_payload_that_rotted_is_not_handed_to_the_learner(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run")
    build.generate(2)
    build.core.begin().db.execute("UPDATE rollouts SET payload = zeroblob(length(payload)) WHERE sample = 1")
    with pytest.raises(StoreError, match=r"the payload of rollout t0000000.1.1 in the store is not what was acknowledged"):
        build.update()
    build.core.store.close()


def test_a_schema_that_is_no_text_is_named(small: Path, tmp_path: Path) -> None:
    """SQLite's own message then has bytes in it that are no text."""
    run = Path(shutil.copytree(small, tmp_path / "run"))
    with closing(sqlite3.connect(run / "replay.sqlite")) as db, db:
        db.execute("PRAGMA writable_schema = ON").fetchall()
        db.execute("UPDATE sqlite_master SET sql = CAST(x'4352454154452054d9ff' AS TEXT) WHERE name = 'meta'")
    with pytest.raises(ConfigError, match="cannot be read as a run's store: 'utf-8' codec"):
        RunReader(run)
    with pytest.raises(StoreError, match="is damaged"):
        Rebuilt(run).open()


@pytest.mark.timeout(3600)
def test_a_bit_flipped_in_a_version_file_is_found(small: Path, ram: Path) -> None:
    run, looked, missed = Path(shutil.copytree(small, ram / "run")), 0, []
    files = sorted(run.glob("weights/v*/*"))[:4]
    assert {file.name for file in files} == {FILE, MANIFEST}
    for file in files:
        whole = file.read_bytes()
        for at in mine(range(0, len(whole), STEP)):
            with flipped(file, at, whole[at]):
                missed += [] if verify(run).findings else [(file.name, at)]
            looked += 1
        assert file.read_bytes() == whole
    assert missed == []
    tell(version_files_flipped=looked, not_found_by_verify=len(missed))
