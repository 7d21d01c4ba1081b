"""The processes of `scripts/bench/ingest.py`: replay, and clients that say when they began and ended (monotonic seconds)."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from configs.load import validate
from configs.schema import Config
from replay import rundir
from replay.client import BlockingClient
from replay.core import encode
from replay.daemon import Daemon
from replay.start import open_core, read_prompts
from tests.support.replay import LightActor, rollout
from wire.digest import digest
from wire.keys import ACTOR, ClientKeys, client_keys, server_keys
from wire.messages import Put, Stored
from wire.record import Sampling, WorkOrder, pack_payload
from wire.sockets import Router

GROUP, CLIENTS, BATCH = 16, 4, 64
"""Samples per group; rollouts per message."""
SHARE = 2048
"""Rollouts per client."""
PROMPT = 128


class Made(NamedTuple):
    rollout_id: str
    head: str
    payload: bytes
    digest: str


def blobs(random: np.random.Generator, tokens: int, count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield pack_payload(random.integers(0, 50_000, PROMPT), random.integers(0, 50_000, tokens), -random.random(tokens))


def rows_of(random: np.random.Generator, tokens: int, count: int) -> list[Made]:
    """The texts and blobs that replay stores of as many rollouts."""
    order, rows = WorkOrder("t0000000", 1, "train", "p", "1", {}, count, Sampling(1.0, tokens)), []
    for sample, payload in enumerate(blobs(random, tokens, count)):
        name = f"t{sample // GROUP:07d}"
        head, _ = rollout(order, sample % GROUP, 0, tokens=tokens, prompt_len=PROMPT, order_id=name,
                          rollout_id=f"{name}.1.{sample % GROUP}")
        rows.append(Made(head.rollout_id, encode(head), payload, digest(payload)))
    return rows


def client_of(endpoint: str, config: Config, key: str) -> BlockingClient:
    return BlockingClient(endpoint, client_keys(config.security, key))


def serve(tree: dict[str, Any], where: Any, stop: Any) -> None:
    """Replay until `stop`. Puts its address into `where`, and in the end the number of commits that held rollouts."""
    config = validate(tree)
    run_dir = Path(config.run.dir) / "bench"
    rundir.create(run_dir)
    rundir.save_config(run_dir, config)
    router = Router("tcp://127.0.0.1:*", server_keys(config.security))
    core = open_core(config, run_dir, read_prompts(config))
    daemon, commit = Daemon(core, router), core.store.commit
    daemon.may_end = stop.is_set  # type: ignore[method-assign]
    seen, commits = core.store.counters.get("produced", 0), 0

    def counted() -> None:
        nonlocal seen, commits
        commits += core.store.counters.get("produced", 0) != seen
        seen = core.store.counters.get("produced", 0)
        commit()

    core.store.commit = counted  # type: ignore[method-assign]
    where.put(router.endpoint)
    asyncio.run(daemon.run())
    daemon.close()
    where.put(commits)


def put_all(endpoint: str, tree: dict[str, Any], name: str, tokens: int, barrier: Any, out: Any) -> None:
    """SHARE rollouts, BATCH per message, one message under way."""
    random = np.random.default_rng(sum(name.encode()))
    config = validate(tree)
    actor = LightActor(client_of(endpoint, config, ACTOR), config, name)
    while actor.confirmed < 0:
        actor.pull(want=0, wait_s=1.0)
    orders: list[Any] = []
    while len(orders) < SHARE // GROUP:
        orders += actor.pull(want=SHARE // GROUP - len(orders), wait_s=1.0).orders
    messages = []
    for start in range(0, len(orders), BATCH // GROUP):
        rows = [rollout(order, sample, actor.confirmed, tokens=tokens, prompt_len=PROMPT)[0]
                for order in orders[start : start + BATCH // GROUP] for sample in range(GROUP)]
        payloads = list(blobs(random, tokens, len(rows)))
        messages.append((Put(actor.epoch, rows, [digest(payload) for payload in payloads], []), b"".join(payloads)))
    barrier.wait()
    began = time.monotonic()
    for request, bulk in messages:
        stored, _ = actor.client.call(request, bulk)
        assert isinstance(stored, Stored)
        assert stored.stored == BATCH, stored
    out.put((began, time.monotonic()))
    actor.close()


def zmq_all(port: int, size: int, count: int, keys: ClientKeys | None, out: Any) -> None:
    """`count` messages of `size` bytes, each answered before the next, after one to begin with."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"")
        dealer.recv()
        body, began = bytes(size), time.monotonic()
        for _ in range(count):
            dealer.send_multipart([b"header", body], copy=False)
            dealer.recv()
        out.put((began, time.monotonic()))
        dealer.close(0)
