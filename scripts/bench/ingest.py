"""How fast replay takes rollouts in durably and hands a lease out, beside what its parts can do alone.

Four client processes put groups of 16 rollouts into a real replay daemon and wait for each acknowledgement, which follows the commit. Their
messages are made beforehand. In the same run: `sqlite3.executemany` of the same texts and blobs (a table of four columns, one index) with
the same pragmas and rows per transaction, raw ZeroMQ with the same frames, raw append + fdatasync of the same bytes. Each REPEATS times in
turn; medians, since the machines are shared.
"""

import json
import multiprocessing
import os
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from configs.load import validate
from configs.schema import Config
from replay.store import PRAGMAS
from scripts.bench.ingest_clients import BATCH, CLIENTS, GROUP, SHARE, Made, client_of, put_all, rows_of, serve, zmq_all
from scripts.bench.ingest_fill import fill
from scripts.bench.machine import markdown
from tests.support.replay import LightLearner
from wire.keys import LEARNER, ClientKeys, make_keys
from wire.messages import Leased

TOKENS, SHORT = 1024, 32
FEW, MANY = 10_000, 1_000_000
MODES = ("clear", "CURVE")
"""Of the sockets."""
REPEATS = 3


class Ingest(NamedTuple):
    """Rollouts per second of all clients together; seconds of the first and of a repeated lease of 64 groups; rollouts per commit."""

    per_s: float
    lease_s: float
    again_s: float
    per_commit: float


class Round(NamedTuple):
    """Rollouts per second: replay's, and what executemany does with as many rows per transaction as replay had; raw ZeroMQ."""

    replay: Ingest
    plain: float
    wire: float


def make_config(folder: Path, *, keyed: bool = False) -> Config:
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(1000)))
    if keyed:
        make_keys(folder / "keys", [])
    return validate({
        "security": {"keys": str(folder / "keys")} if keyed else {},
        "model": {"path": "none"}, "run": {"dir": str(folder / "runs")}, "task": {"train": str(folder / "train.jsonl")},
        "sampling": {"n": GROUP, "max_new_tokens": TOKENS},
        "replay": {"endpoint": "tcp://127.0.0.1:*", "max_staleness": 7, "order_lease_s": 600.0, "max_rollouts": 2 * MANY},
        "learner": {"groups_per_update": 64, "updates": 1000}, "eval": {"samples": 0, "greedy": False}})  # fmt: skip


def measure(tokens: int, rows: int = 0, *, keyed: bool = False) -> Ingest:
    """A fresh store, `rows` short rollouts in it from before."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as name:
        folder = Path(name)
        config = make_config(folder, keyed=keyed)
        if rows:
            fill(config, Path(config.run.dir) / "bench", rows)
        where, stop = processes.SimpleQueue(), processes.Event()
        daemon = processes.Process(target=serve, args=(config.model_dump(mode="json"), where, stop))
        daemon.start()
        endpoint = where.get()
        learner = LightLearner(client_of(endpoint, config, LEARNER), config)
        barrier, out = processes.Barrier(CLIENTS), processes.SimpleQueue()
        clients = [processes.Process(target=put_all, args=(endpoint, config.model_dump(mode="json"), f"a{i}", tokens, barrier, out))
                   for i in range(CLIENTS)]
        for client in clients:
            client.start()
        times = [out.get() for _ in clients]
        seconds = max(end for _, end in times) - min(begin for begin, _ in times)
        while learner.score():
            pass
        lease_s, leased = timed(learner)
        again_s, again = timed(learner)
        assert isinstance(leased, Leased)
        assert len(leased.heads) == 64 * GROUP
        assert again == leased
        for client in clients:
            client.join()
        stop.set()
        commits = where.get()
        daemon.join()
        learner.close()
        return Ingest(CLIENTS * SHARE / seconds, lease_s, again_s, CLIENTS * SHARE / commits)


def timed(learner: LightLearner) -> tuple[float, Any]:
    began = time.perf_counter()
    leased = learner.lease()
    return time.perf_counter() - began, leased


def plain_sqlite(rows: list[Made], per_commit: int) -> float:
    """Rollouts per second."""
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as name, \
            closing(sqlite3.connect(f"{name}/x.sqlite", isolation_level=None)) as db:
        for pragma in PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        db.execute("CREATE TABLE rollouts (rollout_id TEXT PRIMARY KEY, head TEXT, payload BLOB, payload_digest TEXT)")
        began = time.perf_counter()
        for start in range(0, len(rows), per_commit):
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO rollouts VALUES (?, ?, ?, ?)", rows[start : start + per_commit])
            db.execute("COMMIT")
        return len(rows) / (time.perf_counter() - began)


def raw_append(rows: list[Made], per_commit: int) -> float:
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as name, open(f"{name}/x.log", "wb", buffering=0) as file:
        began = time.perf_counter()
        for start in range(0, len(rows), per_commit):
            file.write(b"".join(row[2] for row in rows[start : start + per_commit]))
            os.fdatasync(file.fileno())
        return len(rows) / (time.perf_counter() - began)


def raw_zeromq(rows: list[Made], *, keyed: bool) -> float:
    """The same bytes per message, one message of BATCH rollouts under way per client, an empty answer to each."""
    processes = multiprocessing.get_context("spawn")
    size = sum(len(row.payload) for row in rows[:BATCH])
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        keys = None
        if keyed:
            (public, secret), router.curve_server = zmq.curve_keypair(), True
            router.curve_secretkey, keys = secret, ClientKeys(*zmq.curve_keypair(), public)
        port, out = router.bind_to_random_port("tcp://127.0.0.1"), processes.SimpleQueue()
        clients = [processes.Process(target=zmq_all, args=(port, size, SHARE // BATCH, keys, out)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for _ in range(CLIENTS * (SHARE // BATCH) + CLIENTS):
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, b""])
        times = [out.get() for _ in clients]
        for client in clients:
            client.join()
        router.close(0)
    return CLIENTS * SHARE / (max(end for _, end in times) - min(begin for begin, _ in times))


def one_round(rows: list[Made], mode: str) -> Round:
    keyed = mode == "CURVE"
    replay = measure(TOKENS, keyed=keyed)
    return Round(replay, plain_sqlite(rows, round(replay.per_commit)), raw_zeromq(rows, keyed=keyed))


def table() -> str:
    rows = rows_of(np.random.default_rng(0), TOKENS, CLIENTS * SHARE)
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
    for _ in range(REPEATS):
        for mode in MODES:
            rounds[mode].append(one_round(rows, mode))
    append = raw_append(rows, round(rounds["clear"][0].replay.per_commit))
    few, many = measure(SHORT, FEW), measure(SHORT, MANY)
    rates = [line for mode, found in rounds.items() for line in _rates(mode, found)]
    rates.append(("raw append + fdatasync, as often as in the first", append))
    megabytes = len(rows[0].payload) / 1e6
    first = markdown(["rollouts of 1,024 tokens, 4 clients", "rollouts/s", "MB/s"],
                     [[name, f"{rate:,.0f}", f"{rate * megabytes:.0f}"] for name, rate in rates])
    long = {mode: _median([one.replay for one in found]) for mode, found in rounds.items()}
    columns = {f"{TOKENS:,} tokens": long["clear"], "the same, CURVE": long["CURVE"], f"{SHORT} tokens, {FEW:,} rows before": few,
               f"{SHORT} tokens, {MANY:,} rows before": many}
    second = markdown(["", *columns], [
        ["ingest, rollouts/s", *(f"{found.per_s:,.0f}" for found in columns.values())],
        ["lease of 64 x 16, s", *(f"{found.lease_s:.3f}" for found in columns.values())],
        ["the same again, s", *(f"{found.again_s:.3f}" for found in columns.values())]])  # fmt: skip
    shares = "; ".join(f"{mode} {statistics.median(each):.2f} ({', '.join(f'{share:.2f}' for share in each)})" for mode, each in (
        (mode, [one.replay.per_s / one.plain for one in found]) for mode, found in rounds.items()))
    return (f"{first}\n\n{second}\n\nMedians of {REPEATS}. Share of executemany: {shares}. Cost at {MANY:,} rows against {FEW:,}: ingest x "
            f"{few.per_s / many.per_s:.2f}, lease x {many.lease_s / few.lease_s:.2f}.")


def _rates(mode: str, rounds: list[Round]) -> list[tuple[str, float]]:
    return [(f"replay, {mode}: checked, stored, acknowledged after the commit", _median([one.replay for one in rounds]).per_s),
            (f"sqlite3.executemany, same pragmas, {_median([one.replay for one in rounds]).per_commit:.0f} rows per transaction",
             statistics.median(one.plain for one in rounds)),
            (f"raw ZeroMQ, {mode}, same bytes, answered", statistics.median(one.wire for one in rounds))]


def _median(found: list[Ingest]) -> Ingest:
    """Of each figure."""
    return Ingest(*(statistics.median(values) for values in zip(*found, strict=True)))
