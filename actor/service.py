"""The engine in and out of service: every swap proved, every doubt ended by a full, checked reload or by a restart.

Rows reach the caller only if the engine was in no doubt from the request's first token to its last: a response that ends between a swap
and its proof waits for the proof.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from actor.busy import BusyClock
from actor.collect import RequestTimes
from actor.engine import Engine, Generated, GenerateRequest
from actor.probe import Difference, ProbeCheck
from actor.swap import SwapMode, swap
from actor.weights import Loadable, PrivateWeights
from wire.errors import EngineError, RunError, WeightsError
from wire.record import Span, VersionNotice

log = logging.getLogger(__name__)
RESTARTS = 5
"""Restarts without one answered request in between, after which the actor gives up."""
BACKOFF_S = 1.0
"""Before the second restart; doubled before each further one."""

Note = Callable[[str, str], None]
"""Kind and detail of something that a person should see; does not wait for anyone."""


class EngineHost(Protocol):
    """Whoever starts the engine, or knows where it runs."""

    async def start(self) -> Engine:
        """A ready engine; called again, a fresh one in place of the last (for an attached one: the same, once it answers). EngineError."""

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class Proved:
    """The engine holds this version, and its log-probs say so."""

    version: int
    weights_digest: str
    difference: Difference


class EngineService:
    def __init__(self, host: EngineHost, weights: PrivateWeights, mode: SwapMode, check: ProbeCheck, note: Note) -> None:
        self._host, self._weights, self._mode, self._check, self._note = host, weights, mode, check, note
        self._good: Loadable | None = None
        self._lock = asyncio.Lock()
        self._in_service, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._busy = BusyClock()
        self.in_doubt = False
        self._doubts = 0
        self._restarts = 0
        self._cache_stale = False
        self._kept_caches = 0

    @property
    def held(self) -> int | None:
        """The version that the engine proved last; None when there is none, or while its weights are in doubt."""
        return self._good.version if self._good and not self.in_doubt else None

    async def start(self) -> Engine:
        self.engine = await self._host.start()
        self._in_service.set()
        return self.engine

    async def ready(self) -> None:
        """Returns when the engine is in service."""
        await self._in_service.wait()

    async def stop(self) -> None:
        await self._host.stop()

    async def load(self, notice: VersionNotice) -> Proved:
        """Swap to a version. Raises WeightsError or EngineError when it is not taken: the engine then serves what it did before, or nothing
        if that was nothing; RunError when it cannot be brought back."""
        await self._weights.bring(notice)  # may take long: the engine is served meanwhile
        async with self._lock:
            loadable = await asyncio.to_thread(self._weights.take, notice)
            try:
                found = await self._swap_and_prove(loadable, self._mode)
            except (WeightsError, EngineError) as error:
                await self._end_doubt(str(error))
                raise
            self._good = loadable
            self._weights.keep_only(loadable)
            self._in_service.set()
            return Proved(loadable.version, loadable.weights_digest, found)

    async def generate(self, request: GenerateRequest) -> tuple[list[Generated], RequestTimes]:
        """The rows, made under proved weights alone. Raises EngineError, after the engine was brought back if it had to be."""
        await self._in_service.wait()
        if self._cache_stale and not self._busy.in_flight:
            await self.engine.flush_cache()
            self._cache_stale = False
        doubts, kept, clean = self._doubts, self._kept_caches, None if self._cache_stale else self.held
        try:
            rows, times = await self._send(request)
        except EngineError as error:
            await self._examine(error, doubts)
            raise
        await self._in_service.wait()
        if doubts != self._doubts:
            raise EngineError("these rows were made while the engine's weights were in doubt")
        self._restarts = 0
        if kept != self._kept_caches or clean is None:
            rows = [_mark(row, clean) for row in rows]
        return rows, times

    async def _send(self, request: GenerateRequest) -> tuple[list[Generated], RequestTimes]:
        if self._good is None:
            raise EngineError("no version is loaded")
        started, began = time.time(), self._busy.begin(time.monotonic())
        self._idle.clear()
        try:
            rows = await self.engine.generate(request)
        finally:
            seconds = self._busy.end(began, time.monotonic())
            if not self._busy.in_flight:
                self._idle.set()
        return rows, RequestTimes(started, max(started, time.time()), seconds / len(rows))

    async def _wait_idle(self) -> None:
        await self._idle.wait()

    async def _swap_and_prove(self, loadable: Loadable, mode: SwapMode) -> Difference:
        self._in_service.clear()
        keeps_cache = mode == "in_place" and self._busy.in_flight > 0
        self._kept_caches += keeps_cache
        self._cache_stale = keeps_cache
        mode = "retract" if mode == "in_place" and not keeps_cache else mode
        try:
            await swap(self.engine, mode, str(loadable.folder), loadable.version, self._wait_idle)
            scored = await self.engine.score(loadable.probe.token_ids)
        except ValueError as error:
            raise EngineError(f"version {loadable.version} or its probe cannot be sent to this engine: {error}") from error
        return self._check.check(loadable.version, scored, loadable.probe)

    async def _examine(self, error: EngineError, doubts: int) -> None:
        """After a failed request: bring the engine back, unless that was done for another request, or the engine is well."""
        async with self._lock:
            if doubts == self._doubts and (error.suspect or not await self.engine.health()):
                await self._end_doubt(str(error))

    async def _end_doubt(self, reason: str) -> None:
        """Back to the last good version, in this engine or a fresh one. Everything in flight is lost."""
        self._in_service.clear()
        self.in_doubt = True
        self._doubts += 1
        self._note("engine_suspect", reason)
        try:
            await self._reload()
        except (EngineError, WeightsError) as error:
            await self._restart(error)
        self._weights.keep_only(self._good)
        self.in_doubt = False
        self._in_service.set()

    async def _reload(self) -> None:
        if self._good is None:  # nothing is sent to it before a version is loaded and proved: it need only be alive
            await self.engine.weight_version()
            return
        await asyncio.to_thread(self._weights.check_again, self._good)
        await self._swap_and_prove(self._good, "abort")

    async def _restart(self, error: Exception) -> None:
        while self._restarts < RESTARTS:
            await asyncio.sleep(BACKOFF_S * (2 ** self._restarts - 1))
            self._restarts += 1
            try:
                self.engine = await self._host.start()
                self._note("engine_restarted", str(error))
                await self._load_good_again()
                return
            except (EngineError, WeightsError) as again:
                log.warning("engine restart %d of %d: %s", self._restarts, RESTARTS, again)
                error = again
        raise RunError(f"the engine could not be brought back after {RESTARTS} restarts: {error}")

    async def _load_good_again(self) -> None:
        """A copy that was spoilt is forgotten: the version is then fetched and checked anew, like any other."""
        if self._good is None:
            return
        try:
            await asyncio.to_thread(self._weights.check_again, self._good)
        except WeightsError as error:
            log.warning("%s: it will be fetched again", error)
            self._good = None
            return
        await self._swap_and_prove(self._good, "abort")


def _mark(row: Generated, clean: int | None) -> Generated:
    """Weights were swapped under the KV cache: only tokens of the version that the request began with, on a fresh cache, are clean."""
    return replace(row, spans=tuple(Span(span.version, span.start, span.end, span.version == clean) for span in row.spans))
