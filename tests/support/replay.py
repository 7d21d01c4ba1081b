"""A real replay daemon in a thread, on a random port, and light clients that stand in for an actor and the learner."""

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from configs.load import validate
from configs.schema import Config
from replay import rundir
from replay.client import ERRORS, BlockingClient
from replay.core import Core
from replay.daemon import Daemon
from replay.handlers import arrive, handle
from replay.start import open_core, read_prompts
from replay.store import Storage
from wire.codec import decode, encode
from wire.digest import digest
from wire.errors import ProtocolError
from wire.keys import server_keys
from wire.messages import (
    PROTOCOL,
    AnchorHead,
    Applied,
    Commit,
    Committed,
    Engine,
    Finished,
    Hello,
    Initial,
    Lease,
    Leased,
    Pull,
    Put,
    PutAnchors,
    Refusal,
    Reply,
    Request,
    Rows,
    SampleFailure,
    Stats,
    StatsReply,
    Stored,
    Unscored,
    UpdateRecord,
    Welcome,
    Work,
)
from wire.process import Clock
from wire.record import (
    Fingerprint,
    RolloutHead,
    Scored,
    ScoringPlan,
    Span,
    Verdict,
    VersionNotice,
    WorkOrder,
    fingerprint_id,
    group_id,
    pack_payload,
    rollout_id,
    unpack_payload,
)
from wire.sockets import Router

log = logging.getLogger(__name__)
PRINT = Fingerprint("fake", "1", "float32", "none", "none", 1, True, "full vocabulary", "0" * 64, 50_000)
ENGINE = fingerprint_id(PRINT)


class FakeClock(Clock):
    """Moves only when told to. `set_ahead`: how far somebody has set the wall clock since."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at, self.set_ahead = at, 0.0

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return 1_700_000_000.0 + self.at + self.set_ahead


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(count)))
    return path


def make_config(folder: Path, *, prompts: int = 40, heldout: int = 0, **tables: dict[str, Any]) -> Config:
    """A small run in `folder`: 2 groups of 2 samples per update, budget 1, unless `tables` says otherwise."""
    tree: dict[str, Any] = {
        "model": {"path": "model"}, "run": {"dir": str(folder / "runs")},
        "task": {"train": str(write_prompts(folder / "train.jsonl", prompts))},
        "sampling": {"n": 2, "max_new_tokens": 8}, "replay": {"max_staleness": 1, "endpoint": "tcp://127.0.0.1:*", "order_lease_s": 30.0},
        "learner": {"groups_per_update": 2, "updates": 4}, "eval": {"samples": 2},
    }
    if heldout:
        tree["task"]["heldout"] = str(write_prompts(folder / "heldout.jsonl", heldout))
    for table, values in tables.items():
        tree[table] = {**tree.get(table, {}), **values}
    return validate(tree)


def make_core(config: Config, name: str = "test", *, clock: Clock | None = None, storage: type[Storage] = Storage) -> Core:
    run_dir = Path(config.run.dir) / name
    rundir.create(run_dir)
    rundir.save_config(run_dir, config)
    return open_core(config, run_dir, read_prompts(config), clock=clock or FakeClock(), storage=storage)


class DaemonThread:
    """`with DaemonThread(config) as daemon: BlockingClient(daemon.endpoint)`. `error` holds what ended it."""

    def __init__(self, config: Config, name: str = "test", *, clock: Clock | None = None, storage: type[Storage] = Storage,
                 crash_point: Callable[[str], None] = lambda name: None) -> None:
        self.router = Router(config.replay.endpoint, server_keys(config.security))
        self.endpoint = self.router.endpoint
        self.core = make_core(config, name, clock=clock or Clock(), storage=storage)
        self.run_dir = self.core.run_dir
        self.daemon = Daemon(self.core, self.router, crash_point)
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._started.set()
            await self.daemon.run()

        try:
            asyncio.run(serve())
        except (asyncio.CancelledError, Exception) as error:
            self.error = error
            log.exception("the daemon ended")
            self.router.close()

    def stop(self) -> None:
        """Ends it like Ctrl-C: what is open is committed."""
        if self.thread.is_alive() and self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.thread.join(20)
        if self.error is None or isinstance(self.error, asyncio.CancelledError):
            self.daemon.close()
        else:
            self.core.store.close()


class DirectClient:
    """A client without a socket: every call is decoded, handled and committed at once. A call that would wait gets its last chance."""

    def __init__(self, core: Core) -> None:
        self.core, self.seq = core, secrets.randbits(60)

    def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        self.seq += 1
        return self.repeat(request, bulk)

    def repeat(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        """The request under the number of the last one, as after a lost reply."""
        seq, message, data = decode(encode(self.seq, request, bulk))
        answer = handle(self.core, arrive(self.core, b"peer", seq, message, data)._replace(deadline=0.0))
        self.core.expire_orders()
        self.core.store.commit()
        assert answer is not None
        reply, more = answer if isinstance(answer, tuple) else (answer, b"")
        _, reply, more = decode(encode(seq, reply, more))
        if isinstance(reply, Refusal):
            raise ERRORS.get(reply.kind, ProtocolError)(reply.reason)
        return reply, more

    def close(self) -> None:
        pass


Client = BlockingClient | DirectClient


def client_of(where: str | Core | BlockingClient) -> Client:
    if isinstance(where, Core):
        return DirectClient(where)
    return BlockingClient(where) if isinstance(where, str) else where


def notice(version: int) -> VersionNotice:
    return VersionNotice(version, f"weights/v{version:06d}", digest(b"manifest%d" % version), digest(b"weights%d" % version))


def rollout(order: WorkOrder, sample: int, version: int, *, verdict: Verdict | None = None, tokens: int = 3, fingerprint: str = ENGINE,
            spans: tuple[Span, ...] | None = None, **changes: Any) -> tuple[RolloutHead, bytes]:
    """A sound response of `tokens` tokens, all under `version` unless `spans` says otherwise; `changes` are put into the head."""
    payload = pack_payload(np.arange(1, 5), np.full(tokens, 7), np.full(tokens, -0.5 - sample))
    fields: dict[str, Any] = {
        "rollout_id": rollout_id(order.order_id, order.attempt, sample),
        "order_id": order.order_id,
        "attempt": order.attempt,
        "sample": sample,
        "prompt_len": 4,
        "response_len": tokens,
        "spans": spans or (Span(version, 0, tokens),),
        "finish_reason": "stop",
        "sampling": order.sampling_of(sample),
        "fingerprint": fingerprint,
        "verdict": verdict or Scored(float(sample % 2)),
        "started": 1.0,
        "finished": 2.0,
        "engine_seconds": 0.1,
    }
    return RolloutHead(**{**fields, **changes}), payload


class LightActor:
    """Answers orders at once, without an engine."""

    def __init__(self, where: str | Core | BlockingClient, config: Config, name: str = "a0") -> None:
        self.client = client_of(where)
        self.config, self.name, self.confirmed, self.done = config, name, -1, False
        self.holding: dict[str, WorkOrder] = {}
        self.evaluated: list[tuple[str, int]] = []
        welcome, _ = self.client.call(Hello("actor", name, PROTOCOL, config.shared()))
        assert isinstance(welcome, Welcome)
        self.epoch = welcome.epoch
        self.client.call(Engine(self.epoch, ENGINE, PRINT))

    def pull(self, want: int = 64, wait_s: float = 0.0) -> Work:
        """Ask, load what is to be loaded, keep the orders."""
        work, _ = self.client.call(Pull(self.epoch, self.confirmed, want, wait_s, list(self.holding)))
        assert isinstance(work, Work)
        self.take(work)
        return work

    def take(self, work: Work) -> None:
        if work.notice is not None:
            self.apply(work.notice)
        self.holding |= {group_id(order): order for order in work.orders}
        self.done = self.done or work.done

    def apply(self, new: VersionNotice) -> None:
        self.client.call(Applied(self.epoch, new.version, new.weights_digest, 1e-6, 1e-5))
        self.confirmed = new.version

    def put(self, rows: Sequence[tuple[RolloutHead, bytes]], failures: Sequence[SampleFailure] = ()) -> Stored:
        heads, payloads = [head for head, _ in rows], [payload for _, payload in rows]
        stored, _ = self.client.call(Put(self.epoch, heads, [digest(payload) for payload in payloads], list(failures)), b"".join(payloads))
        assert isinstance(stored, Stored)
        return stored

    def answer(self, orders: Sequence[WorkOrder] | None = None, **changes: Any) -> Stored:
        """Put every sample of these orders (default: all held)."""
        orders = list(self.holding.values()) if orders is None else orders
        rows = []
        for order in orders:
            if order.version is not None:
                assert order.version == self.confirmed, "an eval order came without its notice"
                self.evaluated.append((order.order_id, order.version))
            rows += [rollout(order, sample, self.confirmed, **changes) for sample in range(order.rows)]
            self.holding.pop(group_id(order), None)
        return self.put(rows)

    def work(self, wait_s: float = 0.0) -> int:
        """One round: pull and answer all. How many orders it was."""
        orders = self.pull(wait_s=wait_s).orders
        if orders:
            self.answer(orders)
        return len(orders)

    def close(self) -> None:
        self.client.close()


class LightLearner:
    """Leases, scores and commits without a model."""

    def __init__(self, where: str | Core | BlockingClient, config: Config) -> None:
        self.client, self.config = client_of(where), config
        welcome, _ = self.client.call(Hello("learner", "rank0", PROTOCOL, config.shared()))
        assert isinstance(welcome, Welcome)
        self.epoch = welcome.epoch
        self.committed = -1 if welcome.committed is None else welcome.committed.version
        if welcome.committed is None:
            self.client.call(Initial(self.epoch, notice(0)))
            self.committed = 0

    def score(self, limit: int = 1000) -> int:
        """Anchor what has arrived of the committed version; `old` is mu + 0.01."""
        rows, bulk = self.client.call(Unscored(self.epoch, self.committed, limit))
        assert isinstance(rows, Rows)
        heads, olds, start = [], [], 0
        for row, head in enumerate(rows.heads):
            size = 4 * (head.prompt_len + 2 * head.response_len)
            mu = unpack_payload(head, bulk[start:start + size]).mu
            start += size
            for index, span in enumerate(head.spans):
                if span.version == self.committed:
                    olds.append((mu[span.start:span.end] + 0.01).astype("<f4").tobytes())
                    heads.append(AnchorHead(head.rollout_id, index, span.version, "resident", notice(span.version).weights_digest, "{}",
                                            ScoringPlan(64, 64, row), span.end - span.start))
        if heads:
            self.client.call(PutAnchors(self.epoch, heads), b"".join(olds))
        return len(heads)

    def lease(self, wait_s: float = 0.0) -> Any:
        reply, self.bulk = self.client.call(Lease(self.epoch, self.committed, wait_s))
        return reply

    def commit(self, leased: Leased, *, skipped: bool = False, **changes: Any) -> Committed:
        record, bulk, new = self.record(leased, skipped=skipped, **changes)
        committed, _ = self.client.call(Commit(self.epoch, record, new), bulk)
        assert isinstance(committed, Committed)
        self.committed = committed.version
        return committed

    def record(self, leased: Leased, *, skipped: bool = False, **changes: Any) -> tuple[UpdateRecord, bytes, VersionNotice | None]:
        out = self.committed if skipped else self.committed + 1
        lens = [head.response_len for head in leased.heads]
        fields: dict[str, Any] = {
            "update": leased.update,
            "version_in": self.committed,
            "version_out": out,
            "skipped": skipped,
            "group_ids": leased.group_ids,
            "rollout_ids": [head.rollout_id for head in leased.heads],
            "response_lens": lens,
            "columns": [("old", "f4"), ("keep", "u1")],
            "steps": [],
            "state": {},
            "prox_source": "version_in",
            "weights_digest_out": notice(out).weights_digest,
            "metrics": {"loss": 0.5},
            "seconds": {"update": 0.01, "wait": 0.0},
            "greedy_rewards": [getattr(head.verdict, "reward", None) for head in leased.baselines],
        }
        return UpdateRecord(**{**fields, **changes}), b"\0" * (5 * sum(lens)), None if skipped else notice(out)

    def finish(self) -> None:
        self.client.call(Finished(self.epoch, {}))

    def close(self) -> None:
        self.client.close()


def stats(endpoint: str) -> dict[str, Any]:
    with BlockingClient(endpoint) as client:
        reply, _ = client.call(Stats())
    assert isinstance(reply, StatsReply)
    return reply.values
