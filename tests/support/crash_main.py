"""Replay, a light actor with a real outbox and a light learner with real version files, each in a process that kills itself with SIGKILL
at a named point. Started by `tests/support/chaos.py` through a fork server, so that a start costs milliseconds."""

import asyncio
import itertools
import os
import resource
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq

from actor.collect import Outcome
from actor.outbox import Outbox, open_file, outbox_folder
from configs.schema import Config
from replay import rundir
from replay.client import AsyncClient, BlockingClient
from replay.daemon import Daemon
from replay.reader import RunReader
from replay.start import open_core, read_prompts
from replay.store import Storage
from tests.support.replay import ENGINE, PRINT, rollout
from tests.support.run_builder import PROBE, TRAINER, RunBuilder
from wire.digest import digest
from wire.errors import ConfigError
from wire.manifest import seal_version, staged_path
from wire.messages import (
    PROTOCOL,
    AnchorHead,
    Applied,
    Done,
    Engine,
    Hello,
    Initial,
    Lease,
    Leased,
    Pull,
    Put,
    PutAnchors,
    Reply,
    Request,
    Rows,
    Stored,
    Unscored,
    Welcome,
    Work,
)
from wire.record import RolloutHead, ScoringPlan, VersionNotice, WorkOrder, group_id, pack_payload
from wire.sockets import Router

Crash = Callable[[str], None]
REPLAY_POINTS = ("before_commit", "after_commit", "after_replies", *(f"{side}:{kind}" for kind in (
    "hello", "grant", "put", "groups", "anchors", "lease", "commit", "applied", "eval_done") for side in ("before", "after")))
ACTOR_POINTS = ("before_write", "after_write", "after_ack", "after_remove")
FILE_SIZE = "file_size"
"""Not a point: no file may grow beyond so many bytes, as on a full disk."""
LEARNER_POINTS = ("scored", "leased", "weight_files", "before_commit", "after_commit")


def crash_at(point: str | None, count: int) -> Crash:
    """Kills this process the `count`-th time that it comes to `point`."""
    left = itertools.count(count, -1)

    def reached(name: str) -> None:
        if name == point and next(left) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


# ---------------------------------------------------------------- replay
def replay(config: Config, run_dir: Path, crash: Crash) -> None:
    class Watched(Storage):
        """A crash point on both sides of every ledger row, in mid-transaction."""

        def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
            row = sql.startswith("INSERT INTO ledger")
            if row:
                crash(f"before:{values[1]}")
            found = super().execute(sql, values)
            if row:
                crash(f"after:{values[1]}")
            return found

    router = _router(config.replay.endpoint)
    rundir.create(run_dir)
    rundir.save_config(run_dir, config)
    core = open_core(config, run_dir, read_prompts(config), storage=Watched)
    asyncio.run(Daemon(core, router, crash).run())


def _router(endpoint: str) -> Router:
    for _ in range(100):
        try:
            return Router(endpoint)
        except (ConfigError, zmq.ZMQError):  # the one that was killed is not quite gone
            time.sleep(0.05)
    return Router(endpoint)


# ---------------------------------------------------------------- actor
class Journal:
    """A client that notes every rollout that was acknowledged: `id digest`, one a line."""

    def __init__(self, client: AsyncClient, path: Path) -> None:
        self._client, self._file = client, path.open("a")

    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        reply, data = await self._client.call(request, bulk)
        if isinstance(request, Put) and isinstance(reply, Stored):
            gone = {name for name, _ in reply.refused + reply.quarantined}
            for head, told in zip(request.heads, request.digests, strict=True):
                if head.rollout_id not in gone:
                    self._file.write(f"{head.rollout_id} {told}\n")
            self._file.flush()
        return reply, data


async def actor(config: Config, run_dir: Path, name: str, crash: Crash) -> None:
    client = Journal(AsyncClient(config.replay.endpoint), run_dir.parent / f"{name}.journal")
    welcome, _ = await client.call(Hello("actor", name, PROTOCOL, config.shared()))
    assert isinstance(welcome, Welcome)
    file = await open_file(outbox_folder(None, Path(welcome.run_dir)), name, welcome.run_id)
    box = Outbox(client, welcome.epoch, 20, file, 1 << 20, crash)
    holding = box.on_disk
    await client.call(Engine(welcome.epoch, ENGINE, PRINT))

    async def send() -> None:
        while True:
            holding.difference_update(map(group_id, (await box.send_next()).orders))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(box.write())
        tasks.create_task(send())
        confirmed = -1
        while True:
            want = 0 if box.full else 3
            work, _ = await client.call(Pull(welcome.epoch, confirmed, want, 0.2, list(holding)))
            assert isinstance(work, Work)
            if work.notice is not None:
                await client.call(Applied(welcome.epoch, work.notice.version, work.notice.weights_digest, 1e-6, 1e-5))
                confirmed = work.notice.version
            for order in work.orders:
                holding.add(group_id(order))
                box.add(_answer(order, confirmed))


def _answer(order: WorkOrder, version: int) -> Outcome:
    """Never twice the same: an answer made again shows."""
    found = Outcome([order])
    for sample in range(order.rows):
        head, _ = rollout(order, sample, version)
        payload = pack_payload(np.arange(1, 5), np.frombuffer(secrets.token_bytes(3), np.uint8), np.full(3, -0.5))
        found.heads.append(head)
        found.payloads.append(payload)
        found.digests.append(digest(payload))
    return found


# ---------------------------------------------------------------- learner
class Learner(RunBuilder):
    """RunBuilder's commits, over a socket."""

    def __init__(self, config: Config, run_dir: Path, crash: Crash) -> None:
        self.client, self.run_dir, self.crash = BlockingClient(config.replay.endpoint), run_dir, crash
        self.random = np.random.default_rng(os.getpid())
        welcome, _ = self.client.call(Hello("learner", "rank0", PROTOCOL, config.shared()))
        assert isinstance(welcome, Welcome)
        self.learner = welcome.epoch
        with RunReader(run_dir) as run:
            rows = run.sql("SELECT version, path, manifest_digest, weights_digest FROM versions")
        self.versions = {row[0]: VersionNotice(*row) for row in rows}
        committed = max(self.versions, default=-1)
        self.core: Any = SimpleNamespace(committed=committed, next_version=committed + 1, versions=self.versions)
        if committed < 0:
            self.client.call(Initial(self.learner, self._know(self._publish(0, None))))

    def _publish(self, version: int, parent: int | None) -> VersionNotice:
        staged = self.run_dir / staged_path(version, self.learner)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        self.write_weights(staged, version)
        found = seal_version(staged, version, parent, PROBE)
        self.crash("weight_files")
        return found

    def _know(self, notice: VersionNotice) -> VersionNotice:
        self.versions[notice.version] = notice
        self.core.committed, self.core.next_version = notice.version, notice.version + 1
        return notice

    def score(self, heads: Sequence[RolloutHead], known: set[tuple[str, int]], only: int | None = None) -> int:
        """Anchor the spans that are not `known`; `only` those of one version."""
        anchors, parts = [], []
        for row, head in enumerate(heads):
            for index, span in enumerate(head.spans):
                if (head.rollout_id, index) in known or only not in (None, span.version):
                    continue
                old = -self.random.random(span.end - span.start).astype("<f4")
                source: Any = "resident" if span.version == self.core.committed else "snapshot"
                anchors.append(AnchorHead(head.rollout_id, index, span.version, source, self.versions[span.version].weights_digest, TRAINER,
                                          ScoringPlan(64, 64, row % 64), len(old)))
                parts.append(old.tobytes())
        if anchors:
            self.client.call(PutAnchors(self.learner, anchors), b"".join(parts))
        return len(anchors)

    def run(self) -> None:
        while True:
            version = self.core.committed
            arrived, _ = self.client.call(Unscored(self.learner, version, 1000))
            assert isinstance(arrived, Rows)
            self.score(arrived.heads, set(), version)
            self.crash("scored")
            lease, bulk = self.client.call(Lease(self.learner, version, 1.0))
            if isinstance(lease, Done):
                return
            if not isinstance(lease, Leased):
                continue
            self.crash("leased")
            if self.score(lease.heads, {(anchor.rollout_id, anchor.span) for anchor in lease.anchors}):
                continue
            request, columns = self._commit(lease, bulk, False)
            self.crash("before_commit")
            self.client.call(request, columns)
            self.crash("after_commit")
            assert request.notice is not None
            self._know(request.notice)


def start(role: str, config: bytes, run_dir: Path, point: str | None, count: int) -> None:
    """The entry of a child: `role` is replay, learner, or an actor's name."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if point == FILE_SIZE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
    tree, crash = Config.model_validate(msgspec.json.decode(config)), crash_at(point, count)
    if role == "replay":
        replay(tree, run_dir, crash)
    elif role == "learner":
        Learner(tree, run_dir, crash).run()
    else:
        asyncio.run(actor(tree, run_dir, role, crash))
