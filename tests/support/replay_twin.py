"""The in-memory twin of the replay daemon, as an actor sees it: grants what a test queued, parks Pulls, keeps what was put."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

from wire.digest import digest
from wire.errors import TryAgainError
from wire.manifest import version_path
from wire.messages import (
    Applied,
    Baseline,
    Chunk,
    Engine,
    Fetch,
    GiveBack,
    Hello,
    Note,
    Ok,
    Pull,
    Put,
    Reply,
    Request,
    SampleFailure,
    Stored,
    Welcome,
    Work,
)
from wire.record import Payload, RolloutHead, VersionNotice, WorkOrder, group_id, payload_size, rollout_id, unpack_payload


class ReplayTwin:
    """`commit` announces a version, `queue` training orders, `evaluate` eval orders. `poison(head)` names rollouts that are quarantined;
    `served` is where its weight files are; `done` ends the run; clearing `answering` makes it silent, like a daemon that is down; requests
    of type `deaf_to` get no answer. An Event in `stored` is set by each Put."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = self.served = run_dir
        self.versions: dict[int, VersionNotice] = {}
        self.committed = -1
        self.replayed: VersionNotice | None = None
        self.queue: deque[WorkOrder] = deque()
        self.evals: deque[WorkOrder] = deque()
        self.eval_held: set[str] = set()
        self.poison: Any = lambda head: False
        self.done = False
        self.answering = asyncio.Event()
        self.answering.set()
        self.deaf_to: type[Request] | None = None
        self.changed = asyncio.Condition()
        self.heads: dict[str, RolloutHead] = {}
        self.payloads: dict[str, Payload] = {}
        self.failures: list[SampleFailure] = []
        self.requests: list[Request] = []
        self.holding: list[str] = []
        self.pulls = 0
        self.baseline: float | None = None
        self.epoch = 0

    # What a test does and asks.
    async def commit(self, notice: VersionNotice) -> None:
        self.versions[notice.version] = notice
        self.committed = max(self.committed, notice.version)
        await self._wake()

    async def grant(self, *orders: WorkOrder) -> None:
        for order in orders:
            (self.queue if order.version is None else self.evals).append(order)
        await self._wake()

    async def finish(self) -> None:
        self.done = True
        await self._wake()

    def of(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    @property
    def notes(self) -> list[str]:
        return [note.kind for note in self.of(Note)]

    @property
    def applied(self) -> list[int]:
        return [applied.version for applied in self.of(Applied)]

    async def until(self, condition: Any, seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    # The client's side.
    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        await self.answering.wait()
        while self.deaf_to is not None and isinstance(request, self.deaf_to):
            await asyncio.sleep(0.01)
        if not isinstance(request, Pull):
            self.requests.append(request)
        match request:
            case Hello():
                self.epoch += 1
                return Welcome(self.epoch, str(self.run_dir), self.versions.get(self.committed), 0, "run1"), b""
            case Pull():
                return await self._pull(request), b""
            case Put():
                return await self._put(request, bulk), b""
            case GiveBack(group_ids=ids):
                self.eval_held -= set(ids)
            case Engine():
                return Baseline(self.baseline), b""
            case Fetch():
                return self._chunk(request)
        assert isinstance(request, Applied | Note | GiveBack)
        await self._wake()
        return Ok(), b""

    def _chunk(self, request: Fetch) -> tuple[Reply, bytes]:
        file = self.served / version_path(request.version) / request.file
        if not file.is_file():
            raise TryAgainError("cannot be read")
        data = file.read_bytes()
        part = data[request.offset:request.offset + request.count]
        return Chunk(len(data), len(part), digest(part)), part

    async def _pull(self, request: Pull) -> Work:
        self.pulls += 1
        mine, self.holding = self.pulls, request.holding
        try:
            async with asyncio.timeout(request.wait_s), self.changed:
                while True:
                    if mine == self.pulls and (work := self._work(request)):
                        return work
                    await self.changed.wait()
        except TimeoutError:
            if mine != self.pulls:  # a later one took its place: no answer
                await asyncio.Event().wait()
            return self._work(request) or Work([], None, self.done)

    def _work(self, request: Pull) -> Work | None:
        if self.done:
            return Work([], None, True)
        if self.replayed:
            replayed, self.replayed = self.replayed, None
            return Work([], replayed, False)
        evals = [self.evals.popleft() for _ in range(min(request.want, len(self.evals)))]
        self.eval_held |= {group_id(order) for order in evals}
        orders = evals
        if not self.eval_held and request.confirmed >= 0:
            orders = [self.queue.popleft() for _ in range(min(request.want, len(self.queue)))]
        wanted = (evals[0].version if evals else request.confirmed) if self.eval_held else self.committed
        notice = self.versions.get(wanted) if wanted is not None and wanted != request.confirmed else None
        return Work(orders, notice, False) if orders or notice else None

    async def _put(self, request: Put, bulk: bytes) -> Stored:
        start, stored, quarantined = 0, 0, []
        for head, claimed in zip(request.heads, request.digests, strict=True):
            payload = bulk[start:start + payload_size(head)]
            start += len(payload)
            assert digest(payload) == claimed
            assert head.rollout_id == rollout_id(head.order_id, head.attempt, head.sample)
            assert head.rollout_id not in self.heads
            if self.poison(head):
                quarantined.append((head.rollout_id, "poison"))
                continue
            stored += 1
            self.heads[head.rollout_id], self.payloads[head.rollout_id] = head, unpack_payload(head, payload)
        assert start == len(bulk)
        self.failures += request.failures
        self.eval_held -= {group_id(part) for part in (*request.heads, *request.failures)}
        await self._wake()
        return Stored(stored, 0, quarantined, [])

    async def _wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()
