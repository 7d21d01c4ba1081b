"""The actor: pull orders, keep the engine at the right version, generate, have the answers judged, put them. One coroutine per step.

    pull  ->  Agenda  ->  work: load | start | give back  ->  answer: generate  ->  judge  ->  Outbox: write  ->  send
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from actor.agenda import Agenda, Load, Return, Start
from actor.collect import RequestTimes, collect, fingerprint_of, request_for, to_verify
from actor.engine import Generated
from actor.fetch import Fetcher
from actor.outbox import Client, Outbox, open_file, outbox_folder
from actor.probe import ProbeCheck
from actor.requests import Requests, prepare
from actor.service import EngineHost, EngineService
from actor.tokenise import Tokeniser
from actor.weights import PrivateWeights
from configs.needs import greedy_baseline
from configs.schema import Config
from verifier.pool import VerifierPool
from wire.errors import EngineError, LeewayError, TryAgainError, WeightsError
from wire.messages import PROTOCOL, Applied, Baseline, Engine, GiveBack, Hello, Pull, Reply, Welcome, Work
from wire.record import VersionNotice, WorkOrder, fingerprint_id, group_id

log = logging.getLogger(__name__)
PULL_S, POLL_S = 1.0, 0.05
"""How long a Pull may wait for orders; and for notices alone, while enough is in flight."""
RETRY_S, RETRY_MAX_S, LOOK_S = 1.0, 60.0, 0.25
"""Pause after a refused version, doubled each time; files that change, looked at every LOOK_S, end it."""
GOODBYE_S = 2.0


class RunIsDone(Exception):
    """Replay needs no more: the way out of the tasks."""


class Actor:
    """`make_host` is called once the run directory is known, `make_tokeniser` in a thread of its own while the engine starts: both take
    seconds. The client and the pool belong to the caller, the engine to the actor."""

    def __init__(self, config: Config, name: str, client: Client, make_host: Callable[[Path], EngineHost],
                 make_tokeniser: Callable[[], Tokeniser], pool: VerifierPool) -> None:
        self._config, self._name, self._client = config, name, client
        self._make_host, self._make_tokeniser, self._pool = make_host, make_tokeniser, pool
        self._agenda = Agenda(config.actor.on_new_weights, config.sampling.n + greedy_baseline(config), config.actor.orders_per_request,
                              config.actor.requests_in_flight)
        self._changed = asyncio.Event()
        self._retry_s = RETRY_S
        self._over = False
        self._asked: asyncio.Future[tuple[Reply, bytes]] | None = None

    async def run(self) -> None:
        """Returns when the run is done. Raises the first error that ends the actor; orders are given back on every way out."""
        await self._hello()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for step in (self._pull(), self._work(), self._outbox.write(), self._send(), self._outbox.send_notes()):
                    self._tasks.create_task(step)
        except BaseExceptionGroup as errors:
            first, *others = errors.exceptions
            for other in others:
                log.error("besides: %r", other)
            if not isinstance(first, RunIsDone):
                raise first from None
        finally:
            await self._leave()

    async def _hello(self) -> None:
        hello = Hello("actor", self._name, PROTOCOL, self._config.shared())
        welcome, _ = await self._client.call(hello)
        assert isinstance(welcome, Welcome)
        self._epoch = welcome.epoch
        actor, model, run_dir = self._config.actor, self._config.model, Path(welcome.run_dir)
        file = await open_file(outbox_folder(actor.outbox, run_dir), self._name, welcome.run_id)
        self._outbox = Outbox(self._client, self._epoch, actor.max_quarantined, file, actor.outbox_mb << 20)
        for outcome in file.found.values():
            self._agenda.adopt(outcome.orders)
        host = self._make_host(run_dir)
        self._weights = PrivateWeights(run_dir, Path(model.path), actor.round_weights,
                                       fetcher=Fetcher(self._client, self._epoch, actor.fetch_weights))
        exact = (model.dtype, actor.dtype, actor.round_weights) == ("float32", "float32", "none")
        self._check = ProbeCheck(exact)
        self._service = EngineService(host, self._weights, actor.on_new_weights, self._check, self._outbox.note)
        self._requests = Requests(self._service)

    async def _start_engine(self) -> None:
        async with asyncio.TaskGroup() as both:
            engine = both.create_task(self._service.start())
            tokeniser = both.create_task(asyncio.to_thread(self._make_tokeniser))
        self._tokeniser, self._info = tokeniser.result(), await engine.result().info()
        log.info("%s is ready: %s, %s attention", self._info.engine_version, self._info.dtype, self._info.attention)
        fingerprint = fingerprint_of(self._info, self._config.actor.round_weights, self._tokeniser.digest)
        self._fingerprint = fingerprint_id(fingerprint)
        known, _ = await self._client.call(Engine(self._epoch, self._fingerprint, fingerprint))
        assert isinstance(known, Baseline)
        self._check.baseline = known.probe_mean

    async def _pull(self) -> None:
        """Orders and notices come in; also the heartbeat. Never waits for the engine."""
        while True:
            asked, held = time.monotonic(), self._service.held
            self._agenda.held_back = self._outbox.full
            want = 0 if self._service.in_doubt else self._agenda.want()
            wait_s = PULL_S if want else POLL_S
            pull = Pull(self._epoch, -1 if held is None else held, want, wait_s, self._agenda.holding())
            self._asked = asyncio.ensure_future(self._client.call(pull))
            work, _ = await asyncio.shield(self._asked)
            self._asked = None
            assert isinstance(work, Work)
            if work.done:
                self._over = True
                raise RunIsDone
            if refusal := self._agenda.take(work):
                self._outbox.note("weights_refused", refusal)
            self._changed.set()
            if not work.orders:  # a notice that cannot be taken yet comes back at once
                await asyncio.sleep(max(0.0, asked + POLL_S - time.monotonic()))

    async def _work(self) -> None:
        """Starts the engine, then does what the agenda says is next. Starting takes long: Pull is a sign of life meanwhile and may bring
        the end of the run."""
        await self._start_engine()
        while not self._over:
            await self._service.ready()
            self._changed.clear()
            self._agenda.held_back = self._outbox.full
            match self._agenda.next(self._service.held):
                case Load(notice):
                    await self._load(notice)
                case Start(orders):
                    self._tasks.create_task(self._answer(orders))
                case Return(orders):
                    await self._give_back(orders, "weights_refused")
                case None:
                    await self._changed.wait()

    async def _load(self, notice: VersionNotice) -> None:
        try:
            proved = await self._service.load(notice)
        except (WeightsError, EngineError) as error:
            if isinstance(error, WeightsError):  # the other kind was noted as the engine's
                self._outbox.note("weights_refused", str(error))
            self._agenda.refuse(notice.version)
            self._tasks.create_task(self._allow_later(notice))
            return
        self._retry_s = RETRY_S
        found = proved.difference
        log.info("version %d is loaded: the probe differs by %.2g on average, %.2g at most", proved.version, found.mean, found.max)
        if self._over:  # replay may be gone: nobody would answer
            return
        try:
            await self._client.call(Applied(self._epoch, proved.version, proved.weights_digest, found.mean, found.max))
        except TryAgainError as error:  # given up by a fork meanwhile: the next notice is on its way
            log.warning("version %d: %s", proved.version, error)

    async def _allow_later(self, notice: VersionNotice) -> None:
        """Look at a refused version again after a pause, or when its files have changed."""
        seen, looks = self._weights.signature(notice), round(self._retry_s / LOOK_S)
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)
        for _ in range(looks):
            await asyncio.sleep(LOOK_S)
            if self._weights.signature(notice) != seen:
                break
        self._agenda.allow(notice.version)
        self._changed.set()

    async def _answer(self, orders: list[WorkOrder]) -> None:
        """One engine request, from prompts to judged groups."""
        try:
            fit, prompts, failed = prepare(orders, self._tokeniser, self._info)
            if failed.orders:
                self._outbox.add(failed)
            if not fit:
                return
            answered = await self._requests.generate(request_for(fit, prompts))
        finally:
            self._agenda.left_engine(orders)
            self._changed.set()
        if answered is None:
            await self._give_back(fit, "engine_error")
            return
        rows, times = answered
        for order, prompt in zip(fit, prompts, strict=True):
            group, rows = rows[: order.rows], rows[order.rows :]
            self._tasks.create_task(self._judge(order, prompt, group, times))

    async def _judge(self, order: WorkOrder, prompt: list[int], rows: list[Generated], times: RequestTimes) -> None:
        vocabulary = self._info.vocab_size
        verdicts = await self._pool.verify(to_verify(order, rows, self._tokeniser.texts, vocabulary))
        self._outbox.add(collect(order, prompt, rows, verdicts, self._fingerprint, times, vocabulary))

    async def _send(self) -> None:
        while True:
            sent = await self._outbox.send_next()
            self._agenda.settled(sent.orders)
            self._changed.set()  # there may be room again

    async def _give_back(self, orders: list[WorkOrder], reason: str) -> None:
        await self._client.call(GiveBack(self._epoch, list(map(group_id, orders)), reason))
        self._agenda.settled(orders)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._end_pull()
                if held := [group for group in self._agenda.holding() if group not in self._outbox.on_disk]:
                    await self._client.call(GiveBack(self._epoch, held, "actor_stopped"))
        except (TimeoutError, LeewayError) as error:
            log.warning("orders could not be given back: %s", error)
        finally:
            await self._service.stop()
            self._weights.close()
            self._outbox.close(discard=self._over)

    async def _end_pull(self) -> None:
        """A Pull that still waits at replay would be answered with what is about to be given back: one for nothing takes its place. Orders
        of an answer that was under way are taken in, to be given back with the rest."""
        if self._asked is None or self._asked.cancelled() or (self._asked.done() and self._asked.exception()):
            return
        await self._client.call(Pull(self._epoch, -1, 0, 0.0, self._agenda.holding()))
        if self._asked.done():
            work, _ = self._asked.result()
            assert isinstance(work, Work)
            self._agenda.take(work)
        self._asked.cancel()
