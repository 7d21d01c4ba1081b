"""Version files by way of replay: real sockets, real chunks, dropped and damaged ones; and a whole actor that sees no run directory."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from actor.__main__ import log_home
from actor.fetch import TRIES, Fetcher
from actor.loop import Actor
from actor.weights import PrivateWeights
from configs.schema import Config
from replay.client import AsyncClient
from tests.actor.conftest import Host, Pool
from tests.actor.fake_engine import FakeEngine
from tests.support.replay import DaemonThread, LightLearner, make_config
from tests.support.versions import make_model, publish, publish_bad, tensors
from wire.errors import ProtocolError, TryAgainError, WeightsError
from wire.manifest import FILE, MANIFEST, version_path
from wire.messages import MAX_CHUNK, PROTOCOL, Chunk, Fetch, Hello, Leased, Reply, Request, Welcome
from wire.record import VersionNotice

CHUNK = 64


class FarClient:
    """A client on another host: the run directory that replay names is not there. `spoil` sees the reply to each Fetch and its number."""

    def __init__(self, endpoint: str) -> None:
        self.client = AsyncClient(endpoint)
        self.fetches: list[Fetch] = []
        self.spoil: Callable[[int, Reply, bytes], tuple[Reply, bytes]] = lambda number, reply, data: (reply, data)

    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        reply, data = await self.client.call(request, bulk)
        if isinstance(reply, Welcome):
            reply = msgspec.structs.replace(reply, run_dir=f"/nowhere{reply.run_dir}")
        if isinstance(request, Fetch):
            self.fetches.append(request)
            reply, data = self.spoil(len(self.fetches), reply, data)
        return reply, data


class Far:
    """A daemon with version 0, and an actor's files on what might be another host."""

    def __init__(self, folder: Path, daemon: DaemonThread, config: Config, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.daemon, self.config = folder, daemon, config
        self.published: dict[int, VersionNotice] = {}
        patch.setattr("tests.support.replay.notice", self.notice)  # the light learner publishes real files
        patch.setattr("actor.weights.TMPFS", folder / "tmpfs")
        (folder / "tmpfs").mkdir()
        patch.chdir(folder)  # where an actor that does not see the run directory keeps its outbox
        self.client = FarClient(daemon.endpoint)

    def notice(self, version: int) -> VersionNotice:
        if version not in self.published:
            self.published[version] = publish(self.daemon.run_dir, version)
        return self.published[version]

    def learn(self) -> LightLearner:
        return LightLearner(self.daemon.endpoint, self.config)

    async def weights(self, **changes: Any) -> PrivateWeights:
        welcome, _ = await self.client.call(Hello("actor", "a", PROTOCOL, self.config.shared()))
        assert isinstance(welcome, Welcome)
        self.epoch = welcome.epoch
        return PrivateWeights(Path(welcome.run_dir), Path(self.config.model.path), "none",
                              fetcher=Fetcher(self.client, welcome.epoch, **{"always": False, "chunk": CHUNK, **changes}))

    def left(self) -> list[str]:
        """What lies in the actor's folder."""
        return sorted(str(path.relative_to(scratch)) for scratch in (self.folder / "tmpfs").iterdir() for path in scratch.rglob("*")
                      if path.is_file() and path.name != "lock")


@pytest_asyncio.fixture
async def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Far]:
    config = make_config(tmp_path, model={"path": str(make_model(tmp_path / "model"))}, learner={"updates": 2}, replay={"max_staleness": 0})
    with DaemonThread(config) as daemon:
        far = Far(tmp_path, daemon, config, monkeypatch)
        yield far
        await far.client.client.close()


@pytest_asyncio.fixture
async def weights(far: Far) -> AsyncIterator[PrivateWeights]:
    far.learn().close()
    made = await far.weights()
    yield made
    made.close()


async def test_files_come_in_chunks_and_are_what_was_published(far: Far, weights: PrivateWeights) -> None:
    notice = far.notice(0)
    await weights.bring(notice)
    taken = weights.take(notice)
    source = far.daemon.run_dir / notice.path
    for name in (MANIFEST, FILE):
        assert (taken.folder / name).read_bytes() == (source / name).read_bytes()
        size = (source / name).stat().st_size
        assert [fetch.offset for fetch in far.client.fetches if fetch.file == name] == list(range(0, size, CHUNK))
    np.testing.assert_array_equal(load_file(taken.folder / FILE)["model.norm.weight"], tensors(0)["model.norm.weight"])
    weights.keep_only(None)
    assert far.left() == []


async def test_a_file_of_exactly_whole_chunks(far: Far, weights: PrivateWeights) -> None:
    file = far.daemon.run_dir / far.notice(0).path / FILE
    exact = PrivateWeights(Path("/nowhere"), Path(far.config.model.path), "none",
                           fetcher=Fetcher(far.client, far.epoch, False, file.stat().st_size // 2))
    assert file.stat().st_size % 2 == 0
    await exact.bring(far.notice(0))
    exact.take(far.notice(0))
    exact.close()


async def test_a_visible_run_directory_is_read_and_not_fetched_unless_asked(far: Far) -> None:
    far.learn().close()
    for always in (False, True):
        weights = PrivateWeights(far.daemon.run_dir, Path(far.config.model.path), "none", fetcher=Fetcher(far.client, 1, always))
        if always:
            welcome, _ = await far.client.call(Hello("actor", "a", PROTOCOL, far.config.shared()))
            weights._fetcher._epoch = welcome.epoch  # type: ignore[union-attr]
        await weights.bring(far.notice(0))
        assert bool(far.client.fetches) is always
        weights.take(far.notice(0))
        weights.close()


async def test_another_runs_files_at_the_same_place_are_not_taken_for_it(far: Far, tmp_path: Path) -> None:
    far.learn().close()
    (tmp_path / "other").mkdir()
    publish(tmp_path / "other", 0, tensors(9))
    welcome, _ = await far.client.call(Hello("actor", "a", PROTOCOL, far.config.shared()))
    weights = PrivateWeights(tmp_path / "other", Path(far.config.model.path), "none",
                             fetcher=Fetcher(far.client, welcome.epoch, False))  # type: ignore[union-attr]
    await weights.bring(far.notice(0))
    assert weights.take(far.notice(0)).weights_digest == far.notice(0).weights_digest
    weights.close()


async def test_a_dropped_chunk_costs_only_the_rest(far: Far, weights: PrivateWeights) -> None:
    notice = far.notice(0)
    size = (far.daemon.run_dir / notice.path / FILE).stat().st_size
    manifest = -(-(far.daemon.run_dir / notice.path / MANIFEST).stat().st_size // CHUNK)

    def lose(number: int, reply: Reply, data: bytes) -> tuple[Reply, bytes]:
        if number == manifest + 8:  # in the second round of four, after one chunk alone
            raise TryAgainError("replay went away")
        return reply, data

    far.client.spoil = lose
    with pytest.raises(WeightsError, match="model.safetensors cannot be fetched: replay went away"):
        await weights.bring(notice)
    assert far.left() == [f"fetched/0/{MANIFEST}", f"fetched/0/{FILE}.part"]
    await asyncio.sleep(0.2)  # the others of that round are answered too, and forgotten
    before = len(far.client.fetches)
    await weights.bring(notice)
    assert [fetch.offset for fetch in far.client.fetches[before:]] == list(range(5 * CHUNK, size, CHUNK))
    weights.take(notice)


async def test_a_damaged_chunk_is_asked_for_again_and_not_for_ever(far: Far, weights: PrivateWeights) -> None:
    bad = {3}

    def damage(number: int, reply: Reply, data: bytes) -> tuple[Reply, bytes]:
        return (reply, bytes([data[0] ^ 1]) + data[1:]) if number in bad else (reply, data)

    far.client.spoil = damage
    await weights.bring(far.notice(0))
    weights.take(far.notice(0))
    bad = set(range(1000))
    far.client.fetches.clear()
    with pytest.raises(WeightsError, match=f"manifest.json: the chunk at byte 0 does not match its digest, {TRIES} times"):
        await weights.bring(far.notice(0))
    assert len(far.client.fetches) == TRIES
    assert [name for name in far.left() if name.startswith("fetched")] == [f"fetched/0/{MANIFEST}.part"]


@pytest.mark.parametrize("kind", ["truncated", "wrong_digest", "wrong_shape"])
async def test_bad_files_are_refused_as_from_a_shared_folder_and_fetched_anew(far: Far, kind: str) -> None:
    far.published[0] = publish_bad(far.daemon.run_dir, 0, kind)
    far.learn().close()
    weights = await far.weights()
    for _ in range(2):
        far.client.fetches.clear()
        await weights.bring(far.published[0])
        with pytest.raises(WeightsError):
            weights.take(far.published[0])
        assert far.client.fetches[0].offset == 0
        assert far.left() == []
    weights.close()


async def test_a_wrong_manifest_ends_it_before_the_weights_are_fetched(far: Far, weights: PrivateWeights) -> None:
    notice = far.notice(0)
    with pytest.raises(WeightsError, match="digest is not the one committed"):
        await weights.bring(msgspec.structs.replace(notice, manifest_digest="0" * 64))
    assert {fetch.file for fetch in far.client.fetches} == {MANIFEST}
    assert far.left() == []


async def test_a_file_that_would_fill_the_memory_is_not_fetched(far: Far, weights: PrivateWeights) -> None:
    huge = 1 << 40

    def lie(number: int, reply: Reply, data: bytes) -> tuple[Reply, bytes]:
        return (msgspec.structs.replace(reply, size=huge), data) if far.client.fetches[-1].file == FILE else (reply, data)

    far.client.spoil = lie
    with pytest.raises(WeightsError, match=f"{FILE} has {huge} bytes; 0 to [0-9]+ were expected"):
        await weights.bring(far.notice(0))
    assert far.left() == [f"fetched/0/{MANIFEST}"]


@pytest.mark.parametrize("change", [-CHUNK, 1])
async def test_a_file_that_changes_on_the_way_is_fetched_anew(far: Far, weights: PrivateWeights, change: int) -> None:
    true = (far.daemon.run_dir / far.notice(0).path / FILE).stat().st_size
    lies = [True]

    def lie(number: int, reply: Reply, data: bytes) -> tuple[Reply, bytes]:
        if lies and far.client.fetches[-1].file == FILE and far.client.fetches[-1].offset == 3 * CHUNK:
            lies.pop()
            return msgspec.structs.replace(reply, size=true + change), data
        return reply, data

    far.client.spoil = lie
    with pytest.raises(WeightsError, match="changed while it was fetched"):
        await weights.bring(far.notice(0))
    assert far.left() == [f"fetched/0/{MANIFEST}"]
    await weights.bring(far.notice(0))
    weights.take(far.notice(0))


async def test_a_full_disk_is_a_version_refused(far: Far, weights: PrivateWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, mode: str = "r") -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(WeightsError, match="what was fetched cannot be kept: No space left on device"):
            await weights.bring(far.notice(0))
    await weights.bring(far.notice(0))
    weights.take(far.notice(0))


async def test_only_files_of_known_versions_can_be_asked_for(far: Far, weights: PrivateWeights) -> None:
    (far.daemon.run_dir / "weights" / "v000007").mkdir()
    (far.daemon.run_dir / "weights" / "v000007" / FILE).write_bytes(b"not committed")

    async def ask(version: int = 0, file: str = FILE, offset: int = 0, count: int = 8) -> Chunk:
        reply, _ = await far.client.call(Fetch(far.epoch, version, file, offset, count))
        assert isinstance(reply, Chunk)
        return reply

    size = (await ask()).size
    assert (await ask(offset=size, count=8)).count == 0
    assert (await ask(offset=10**15, count=MAX_CHUNK)).count == 0
    for file in ("../../config.json", "/etc/passwd", "config.json", "", ".", "manifest.json/", f"../v000000/{FILE}"):
        with pytest.raises(ProtocolError, match="a chunk is"):
            await ask(file=file)
    for changes in ({"offset": -1}, {"count": 0}, {"count": MAX_CHUNK + 1}, {"count": -5}):
        with pytest.raises(ProtocolError, match="a chunk is"):
            await ask(**changes)
    for version in (7, -1, 10**12):
        with pytest.raises(TryAgainError, match="was never committed, or is no longer kept"):
            await ask(version=version)
    shutil.rmtree(far.daemon.run_dir / version_path(0))
    with pytest.raises(TryAgainError, match="version 0: model.safetensors cannot be read: No such file"):
        await ask()


class Words:
    digest = "words"

    def prompt_ids(self, prompt: Any) -> list[int]:
        return [3, 4, 5]

    def texts(self, responses: list[list[int]]) -> list[str]:
        return [""] * len(responses)


async def test_a_whole_actor_that_sees_no_run_directory(far: Far) -> None:
    """It has its own folder and a socket, and gets version after version, also while the learner is gone."""
    engine = FakeEngine()
    learner = await asyncio.to_thread(far.learn)
    actor = Actor(far.config, "a1", far.client, lambda run_dir: Host(engine), Words, Pool())  # type: ignore[arg-type]
    task = asyncio.create_task(actor.run())
    for version in (0, 1):
        leased = await asyncio.to_thread(learner.lease, 20.0)
        assert isinstance(leased, Leased)
        assert {span.version for head in leased.heads for span in head.spans} == {version}  # the budget is 0
        await asyncio.to_thread(learner.commit, leased)
        await asyncio.to_thread(learner.close)
        if version == 0:
            async with asyncio.timeout(20):
                while 1 not in [argument[1] for name, argument in engine.calls if name == "load_weights"]:
                    await asyncio.sleep(0.02)
            learner = await asyncio.to_thread(far.learn)
    async with asyncio.timeout(20):
        await task
    assert {fetch.version for fetch in far.client.fetches} >= {0, 1}
    loaded = [argument for name, argument in engine.calls if name == "load_weights"]
    assert loaded
    assert all(str(far.folder / "tmpfs") in str(argument) for argument in loaded)
    assert list((far.folder / "tmpfs").iterdir()) == []


def test_logs_go_to_a_folder_of_this_machine_when_the_runs_is_not_here(tmp_path: Path) -> None:
    assert log_home(tmp_path / "elsewhere", tmp_path / "local") == tmp_path / "local"
    assert (tmp_path / "local" / "logs").is_dir()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert log_home(tmp_path / "run", tmp_path / "local") == tmp_path / "run"
