"""The outbox: on disk before it is sent, resent by the next life, bounded, locked, and sound when its file is damaged."""

import asyncio
import contextlib
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.collect import Outcome
from actor.outbox import Outbox, open_file, outbox_folder
from actor.outbox_file import OutboxFile
from tests.actor.conftest import Stage
from tests.actor.orders import evaluation, train
from tests.support.replay import DirectClient, LightActor, LightLearner, make_config, make_core, rollout
from wire.digest import digest
from wire.errors import ConfigError, StoreError
from wire.messages import GiveBack, Put, Reply, Request, SampleFailure, Stored
from wire.record import WorkOrder, pack_payload


def outcome(order: WorkOrder, version: int = 0, tokens: int = 3) -> Outcome:
    rows = [rollout(order, sample, version, tokens=tokens) for sample in range(order.n)]
    payloads = [payload for _, payload in rows]
    return Outcome([order], [head for head, _ in rows], payloads, [digest(payload) for payload in payloads],
                   [SampleFailure(order.order_id, order.attempt, order.n, "no_token")])


def write(folder: Path, *numbers: int) -> OutboxFile:
    file = OutboxFile(folder, "a0", "r1")
    for number in numbers:
        file.write([outcome(train(number))])
    return file


def kill(file: OutboxFile) -> None:
    """What a kill leaves: the files as they are, and no lock."""
    file._lock.close()


def peek(folder: Path, name: str = "a0", run: str = "r1") -> dict[int, Outcome]:
    file = OutboxFile(folder, name, run)
    file.close()
    return file.found


def peek_rows(path: Path) -> list[int]:
    """What another connection finds in the file."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [number for number, in db.execute("SELECT id FROM entries ORDER BY id")]


def test_a_write_is_flushed_before_it_counts(tmp_path: Path) -> None:
    """As read back on the connection that writes; the file is opened anew after damage too."""
    file = write(tmp_path, 1)
    file.close()
    file.path.write_bytes(b"damaged" * 1000)
    for opened in (OutboxFile(tmp_path / "other", "a0", "r1"), OutboxFile(tmp_path, "a0", "r1")):
        assert opened._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert opened._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        opened.close()


async def test_a_group_stays_in_the_file_until_it_is_acknowledged_and_no_longer(tmp_path: Path) -> None:
    file = write(tmp_path, 1, 2)
    file.close()
    in_the_file: list[list[int]] = []

    class Looking:
        async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
            in_the_file.append(peek_rows(file.path))
            return Stored(4, 0, [], []), b""

    outbox = Outbox(Looking(), 1, 20, OutboxFile(tmp_path, "a0", "r1"), 1 << 20)
    await outbox.send_next()
    in_the_file.append(peek_rows(file.path))
    assert in_the_file == [[1, 2], []]
    outbox.close()


def test_what_was_written_is_found_by_the_next_life_and_what_was_removed_is_not(tmp_path: Path) -> None:
    file = write(tmp_path, 1, 2, 3)
    file.remove([2])
    kill(file)
    again = OutboxFile(tmp_path, "a0", "r1")
    assert again.damage is None
    assert again.found == {1: outcome(train(1)), 3: outcome(train(3))}
    again.close()
    assert peek(tmp_path, "a0", "r2") == {}  # a run of the same name is another run
    assert peek(tmp_path, "a1") == {}


def test_one_outbox_per_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OutboxFile(tmp_path, "a0", "r1")
    with pytest.raises(ConfigError, match="another actor named a0 is running"):
        OutboxFile(tmp_path, "a0", "r1")
    monkeypatch.setattr("actor.outbox.LOCK_RETRY_S", 0.01)

    async def scene() -> OutboxFile:
        waiting = asyncio.create_task(open_file(tmp_path, "a0", "r1"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        file.close()  # the one before it has ended
        return await waiting

    asyncio.run(scene()).close()


def test_where_it_lives(tmp_path: Path) -> None:
    assert outbox_folder("box", tmp_path) == Path("box")
    assert outbox_folder(None, tmp_path) == tmp_path / "outbox"
    assert outbox_folder(None, tmp_path / "not-here") == Path("outbox/not-here")


def test_nothing_is_left_of_it_when_the_run_is_over(tmp_path: Path) -> None:
    write(tmp_path, 1).close(discard=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a0-r1.lock"]


def test_a_full_disk_is_one_clear_line_and_what_was_there_stays(tmp_path: Path) -> None:
    file = write(tmp_path, 1)
    file._db.execute(f"PRAGMA max_page_count = {file._db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreError, match=r"the outbox .*a0-r1.sqlite failed: database or disk is full; what it held before is kept"):
        file.write([outcome(train(2, n=64), tokens=100)])
    kill(file)
    assert list(peek(tmp_path)) == [1]


@pytest.mark.parametrize("which", ["a0-r1.sqlite", "a0-r1.sqlite-wal"])
def test_a_damaged_file_gives_its_sound_entries_or_a_named_error(tmp_path: Path, which: str) -> None:
    """Bits flipped, tails cut and zeroed: what comes out was put in, byte for byte."""
    clean = tmp_path / "clean"
    file = write(clean, 1, 2, 3)
    if which == "a0-r1.sqlite":
        file.close()  # SQLite moves the WAL into the database
    else:
        kill(file)
    expected, source = [outcome(train(number)) for number in (1, 2, 3)], random.Random(0)
    whole, kept = (clean / which).read_bytes(), set()
    for trial in range(150):
        folder = tmp_path / str(trial)
        shutil.copytree(clean, folder)
        damaged, at = bytearray(whole), source.randrange(len(whole))
        match trial % 3:
            case 0:
                damaged[at] ^= 1 << source.randrange(8)
            case 1:
                del damaged[at:]
            case 2:
                damaged[at:] = bytes(len(damaged) - at)
        (folder / which).write_bytes(damaged)
        try:
            found = OutboxFile(folder, "a0", "r1")
        except StoreError:
            continue
        assert all(entry in expected for entry in found.found.values())
        kept.add(len(found.found))
        assert list(found.write([outcome(train(9))])) == [max(found.found, default=0) + 1] or found.damage
        found.close()
        shutil.rmtree(folder)
    assert len(kept) > 1


def test_an_entry_that_was_changed_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path, 1, 2).close()
    db = sqlite3.connect(tmp_path / "a0-r1.sqlite")
    db.execute("UPDATE entries SET payload = zeroblob(length(payload)) WHERE id = 1")
    db.commit()
    db.close()
    file = OutboxFile(tmp_path, "a0", "r1")
    assert (list(file.found), file.damage) == ([2], "1 of 2 entries do not match their digests")
    file.close()


class CoreClient:
    """Speaks to replay's core. `silent`: Puts are carried out, and nobody hears of it."""

    def __init__(self, core: Any) -> None:
        self.direct, self.silent = DirectClient(core), False

    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        answer = self.direct.call(request, bulk)
        if self.silent and isinstance(request, Put):
            await asyncio.Future()
        return answer


async def test_an_acknowledgement_that_got_lost_makes_a_duplicate_not_a_second_row(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    core = make_core(config)
    LightLearner(core, config)
    first = LightActor(core, config)
    first.pull()
    order, other = first.pull(want=2).orders
    client = CoreClient(core)
    outbox = Outbox(client, first.epoch, 20, OutboxFile(tmp_path / "box", "a0", core.run_id), 1 << 20)
    client.silent = True
    outbox.add(Outcome([order], *parts(order)))
    tasks = [asyncio.create_task(outbox.write()), asyncio.create_task(outbox.send_next())]
    await asyncio.sleep(0.2)
    outbox.add(Outcome([other], *parts(other)))  # written, and not even sent
    await asyncio.sleep(0.2)
    assert outbox.on_disk == {f"{order.order_id}.1", f"{other.order_id}.1"}
    for task in tasks:
        task.cancel()
    kill(outbox._file)

    second = LightActor(core, config)  # the next life, of another epoch
    assert second.epoch == first.epoch + 1
    client.silent = False
    again = Outbox(client, second.epoch, 20, OutboxFile(tmp_path / "box", "a0", core.run_id), 1 << 20)
    sent = await again.send_next()
    assert [o.order_id for o in sent.orders] == [order.order_id, other.order_id]
    assert (again.bytes, again.on_disk) == (0, set())
    assert core.store.counters["duplicates_refused"] == 2
    assert core.store.one("SELECT count(*) FROM rollouts") == 4
    assert peek_rows(again._file.path) == []  # acknowledged, so gone from the disk
    again.close()
    core.store.close()


async def test_a_put_takes_groups_up_to_1024_samples(tmp_path: Path) -> None:
    sent: list[Put] = []

    class Listener:
        async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
            assert isinstance(request, Put)
            sent.append(request)
            return Stored(len(request.heads), 0, [], []), b""

    file = OutboxFile(tmp_path, "a0", "r1")
    file.write([outcome(train(number, n=299)) for number in range(5)])  # and one failure each
    file.close()
    outbox = Outbox(Listener(), 1, 20, OutboxFile(tmp_path, "a0", "r1"), 1 << 20)
    await outbox.send_next()
    await outbox.send_next()
    assert [(len(put.heads), len(put.failures)) for put in sent] == [(1196, 4), (299, 1)]
    outbox.close()


def parts(order: WorkOrder) -> tuple[Any, Any, Any]:
    whole = outcome(order)
    return whole.heads, whole.payloads, whole.digests


async def test_a_killed_actor_sends_what_it_had_and_does_not_make_it_again(stage: Stage) -> None:
    await stage.start()
    stage.replay.deaf_to = Put  # nothing is acknowledged
    await stage.replay.grant(train(1), train(2))
    await stage.until(lambda: stage.actor._outbox.on_disk == {"t1.1", "t2.1"})
    made = stage.engine.tokens_made
    assert stage.task is not None
    stage.task.cancel()
    await asyncio.gather(stage.task, return_exceptions=True)
    stage.replay.deaf_to = None
    assert stage.replay.heads == {}
    assert not stage.replay.of(GiveBack)  # they are kept for the next life, not given back
    await stage.start(None)
    await stage.until(lambda: len(stage.replay.heads) == 4)
    assert stage.engine.tokens_made == made
    await stage.finish()


async def test_a_full_outbox_holds_the_engine_back_until_there_is_room(stage: Stage) -> None:
    await stage.start(orders_per_request=1, requests_in_flight=1)
    real, release = stage.replay.call, asyncio.Event()

    async def slow_store(request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        if isinstance(request, Put):
            await release.wait()
        return await real(request, bulk)

    stage.replay.call = stage.actor._outbox._client.call = slow_store  # type: ignore[method-assign]
    stage.actor._outbox._max_bytes = 1
    await stage.replay.grant(*(train(number) for number in range(1, 9)))
    await stage.until(lambda: stage.actor._outbox.full)
    await asyncio.sleep(0.2)
    assert stage.actor._agenda.want() == 0
    made = stage.engine.tokens_made
    await asyncio.sleep(0.2)
    assert stage.engine.tokens_made == made < 16 * 4
    release.set()
    await stage.until(lambda: len(stage.replay.heads) == 16)
    await stage.finish()


async def test_answers_of_an_evaluation_survive_too(stage: Stage) -> None:
    file = OutboxFile(stage.run_dir / "outbox", "a1", "run1")
    order = evaluation(1, 0)
    payload = pack_payload(np.arange(4), np.full(3, 7), np.full(3, -0.5))
    file.write([Outcome([order], [rollout(order, 0, 0)[0]], [payload], [digest(payload)])])
    file.close()
    await stage.start()
    await stage.until(lambda: "e1.1.0" in stage.replay.heads)
    await stage.finish()
    assert not list((stage.run_dir / "outbox").glob("*.sqlite"))
