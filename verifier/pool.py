"""Verdicts on untrusted text: a fixed number of killable child processes, each judging one call at a time.

One call of `verify` is one message to one worker, and one call of the reward function. When that call fails as a whole (deadline, crash,
exception, wrong length) its items are judged again one by one, each with its own deadline, so that only the guilty fail.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from verifier.process import Worker, WorkerDied
from verifier.protocol import VerifyItem
from verifier.resolve import SpecError, target_of
from wire.record import Failed, Verdict

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class VerifierPool:
    """`slots` workers for the verifier `spec`; `arguments` are further keywords of its function.

    Concurrent calls of `verify` are judged in parallel up to `slots`, the rest wait their turn; the deadline starts when a worker has the
    call. A worker may use `memory_mb` MiB of address space and is replaced after `recycle_after` calls. Use it from one event loop, in the
    main thread (a worker dies with the thread that started it).
    """

    def __init__(
        self,
        spec: str,
        *,
        deadline_s: float,
        slots: int = 1,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        memory_mb: int = 2048,
        recycle_after: int = 1000,
    ) -> None:
        self.name = spec
        self._spec, self._arguments, self._memory_mb = spec, dict(arguments), memory_mb
        self._deadline_s, self._recycle_after = deadline_s, recycle_after
        self._closed = False
        self._workers: set[Worker] = set()
        self._slots: asyncio.Queue[Worker | None] = asyncio.Queue()
        for _ in range(slots):
            self._slots.put_nowait(None)

    async def start(self) -> None:
        """Start every worker. Raises SpecError, one line, when the verifier cannot be imported."""
        target_of(self._spec)
        try:
            for _ in range(self._slots.qsize()):
                self._slots.put_nowait(self._slots.get_nowait() or await self._start_worker())
        except BaseException:
            await self.close()
            raise

    async def verify(self, items: list[VerifyItem]) -> list[Verdict]:
        """A verdict for each item, in order. Fails only by cancellation, or with RuntimeError once the pool is closed."""
        if not items:
            return []
        outcome = await self._judge(items)
        if isinstance(outcome, list):
            return outcome
        if len(items) == 1:
            return [outcome]
        alone = await asyncio.gather(*(self._judge([item]) for item in items))
        return [outcome if isinstance(outcome, Failed) else outcome[0] for outcome in alone]

    async def close(self) -> None:
        """End every worker and everything it started. Calls in flight raise RuntimeError."""
        self._closed = True
        for worker in list(self._workers):
            await self._end(worker)

    async def _judge(self, items: list[VerifyItem]) -> list[Verdict] | Failed:
        """The verdicts of one call, or the failure of the call as a whole."""
        worker = await self._slots.get()
        reusable = False
        try:
            self._refuse_if_closed()
            worker = worker or await self._start_worker()
            reply = await worker.call(items, self._deadline_s)
            reusable = worker.calls < self._recycle_after
            if reply.failure:
                return msgspec.structs.replace(reply.failure, verifier=self.name)
            return [msgspec.structs.replace(verdict, verifier=self.name) for verdict in reply.verdicts]
        except SpecError as error:  # the module was fine at the start and is not any more
            return Failed("start", str(error), self.name)
        except WorkerDied as death:
            self._refuse_if_closed()
            return Failed(death.reason, verifier=self.name, seconds=self._deadline_s if death.reason == "timeout" else 0.0)
        finally:
            self._slots.put_nowait(worker if reusable else None)
            if worker and not reusable:
                await self._end(worker)

    async def _start_worker(self) -> Worker:
        worker = await Worker.start(self._spec, self._arguments, self._memory_mb)
        self._workers.add(worker)
        if self._closed:  # while it was starting
            await self._end(worker)
            self._refuse_if_closed()
        self.name = worker.name
        return worker

    async def _end(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            await worker.kill()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed")


def check_spec(spec: str, arguments: Mapping[str, Any] = NO_ARGUMENTS, memory_mb: int = 2048) -> None:
    """Import `spec` in a child process, so that the caller imports nothing of the user's. Raises SpecError (a ValueError), one line.

    For use outside an event loop; inside one, `VerifierPool.start` checks the same.
    """

    async def start_one() -> None:
        pool = VerifierPool(spec, deadline_s=1.0, arguments=arguments, memory_mb=memory_mb)
        await pool.start()
        await pool.close()

    asyncio.run(start_one())
