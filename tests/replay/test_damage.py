"""The WAL cut, zeroed and flipped; the database and the version files flipped: the acknowledged prefix, or a named refusal."""

import shutil
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replay.start import open_core, read_prompts
from replay.verify import verify
from tests.support.run_builder import RunBuilder, small_run
from tests.support.torture import TORTURE
from wire.errors import LeewayError, StoreError
from wire.manifest import FILE

STEP = 1 if TORTURE >= 1 else 64
HEADER, FRAME = 32, 24
"""Bytes of the WAL's header, and of a frame's beside its page."""
SETTLED = "SELECT rollout_id, state, head, payload, payload_digest FROM rollouts ORDER BY 1"


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
        return State(wal.stat().st_size if wal.exists() else 0, store.ledger.seq, store.ledger.head, store.one("SELECT count(*) FROM rollouts"))

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


def places(wal: bytes) -> Iterable[int]:
    """Frame edges, the bytes beside them, and every STEP-th byte."""
    page, = struct.unpack(">I", wal[8:12])
    edges = range(HEADER, len(wal) + 1, FRAME + page)
    return sorted({at for edge in edges for at in (edge - 1, edge, edge + 1) if at <= len(wal)} | set(range(0, len(wal), STEP)))


def prefix(states: list[State], intact: int) -> tuple[int, str, int]:
    """What was acknowledged when the first `intact` bytes of the WAL had been written."""
    return next(state for state in reversed(states) if state.size <= intact)[1:]


def test_the_wal_holds_several_commits(crashed: Crashed) -> None:
    assert len({state.size for state in crashed.states}) >= 5
    assert crashed.states[-1].rollouts == crashed.states[0].rollouts + 4


@pytest.mark.timeout(3600)
def test_a_wal_cut_anywhere_gives_the_acknowledged_prefix(crashed: Crashed, tmp_path: Path) -> None:
    seen = set()
    for at in places(crashed.wal):
        found = reopened(tmp_path, crashed.database, crashed.wal[:at])
        assert found == prefix(crashed.states, at), at
        seen.add(found)
    assert len(seen) >= 5


@pytest.mark.timeout(3600)
def test_a_tail_of_zeros_is_no_record(crashed: Crashed, tmp_path: Path) -> None:
    for at in places(crashed.wal):
        found = reopened(tmp_path, crashed.database, crashed.wal[:at] + bytes(len(crashed.wal) - at))
        assert found == prefix(crashed.states, at) or crashed.wal[at:].strip(b"\0") == b"", at


@pytest.mark.timeout(3600)
def test_a_bit_flipped_in_the_wal_ends_it_there(crashed: Crashed, tmp_path: Path) -> None:
    page, = struct.unpack(">I", crashed.wal[8:12])
    for at in places(crashed.wal):
        if at >= len(crashed.wal):
            continue
        damaged = bytearray(crashed.wal)
        damaged[at] ^= 1 << at % 8
        frame = max(0, (at - HEADER) // (FRAME + page))
        intact = HEADER + frame * (FRAME + page) if at >= HEADER else 0
        try:
            found = reopened(tmp_path, crashed.database, bytes(damaged))
        except sqlite3.DatabaseError:  # a named refusal
            assert at < HEADER
            continue
        assert found in (prefix(crashed.states, intact), crashed.states[-1][1:] if _unused(at, page) else None), at


def _unused(at: int, page: int) -> bool:
    """Bytes that nothing reads: the salt's copy in the header is checked, the checkpoint counter is not."""
    return at < HEADER


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = small_run(tmp_path_factory.mktemp("flips") / "small")
    with closing(sqlite3.connect(run / "replay.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # no WAL beside it
    return run


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(0, len(data), STEP):
        yield at, data[:at] + bytes([data[at] ^ (1 << at // STEP % 8)]) + data[at + 1:]


@pytest.mark.timeout(7200)
def test_a_bit_flipped_in_the_database_never_passes_for_what_was_acknowledged(small: Path, tmp_path: Path) -> None:
    """Either every rollout reads as it was, or `verify` has findings."""
    run = Path(shutil.copytree(small, tmp_path / "run"))
    store, whole = run / "replay.sqlite", (small / "replay.sqlite").read_bytes()
    with closing(sqlite3.connect(store)) as db:
        expected = db.execute(SETTLED).fetchall()
    changed = 0
    for at, damaged in flips(whole):
        store.write_bytes(damaged)
        try:
            with closing(sqlite3.connect(store)) as db:
                same = db.execute(SETTLED).fetchall() == expected
        except (sqlite3.Error, UnicodeDecodeError):
            same = False
        if not same:
            changed += 1
            assert verify(run).findings, at
    assert changed > 100


def test_replay_refuses_a_damaged_store_by_name(small: Path, tmp_path: Path) -> None:
    """It opens it and every rollout is sound, or it says what is wrong; no other error escapes."""
    run = Path(shutil.copytree(small, tmp_path / "run"))
    store, whole = run / "replay.sqlite", (small / "replay.sqlite").read_bytes()
    build = Rebuilt(run)
    refused = 0
    for at in range(0, len(whole), max(STEP, len(whole) // 400)):
        store.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1:])
        try:
            build.open()
        except LeewayError:
            refused += 1
        for end in ("-wal", "-shm"):
            store.with_name(store.name + end).unlink(missing_ok=True)
    assert refused > 5


class Rebuilt:
    def __init__(self, run: Path) -> None:
        import json

        from configs.schema import Config

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


@pytest.mark.timeout(3600)
def test_a_bit_flipped_in_a_version_file_is_found(small: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small, tmp_path / "run"))
    for file in sorted(run.glob("weights/v*/*"))[:4]:
        whole = file.read_bytes()
        for at, damaged in flips(whole):
            file.write_bytes(damaged)
            assert verify(run).findings, (file.name, at)
        file.write_bytes(whole)
    assert FILE in {path.name for path in run.glob("weights/v*/*")}
