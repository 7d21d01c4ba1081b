"""A real daemon over real ZeroMQ, with light clients."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgpack

from replay.client import AsyncClient
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, stats
from wire.messages import Done, GiveBack, Leased, Pull
from wire.record import group_id
from wire.sockets import Dealer


def test_a_whole_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, actors = LightLearner(daemon.endpoint, config), [LightActor(daemon.endpoint, config, name) for name in ("a0", "a1")]
        for _ in range(4):
            for actor in actors:
                actor.work()
                actor.work()
            learner.score()
            leased = learner.lease(wait_s=5.0)
            assert isinstance(leased, Leased)
            assert len(leased.group_ids) == 2
            assert len(leased.heads) == len(leased.anchors) == 4
            learner.commit(leased)
        assert isinstance(learner.lease(), Done)
        found = stats(daemon.endpoint)
        assert found["imbalance"] == 0
        assert found["rollouts"]["trained"] == 16
        learner.finish()
        for actor in actors:
            assert actor.pull().done
        daemon.thread.join(10)
        assert daemon.error is None
        for client in (learner, *actors):
            client.close()


async def test_what_is_given_back_does_not_go_to_a_pull_whose_place_was_taken(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, actor = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        actor.pull(want=0)
        held = [group_id(order) for order in actor.pull().orders]
        async with AsyncClient(daemon.endpoint) as client:
            waits = asyncio.create_task(client.call(Pull(actor.epoch, actor.confirmed, 8, 5.0, held)))
            await asyncio.sleep(0.2)
            assert not waits.done()  # there is no room for more
            await client.call(Pull(actor.epoch, actor.confirmed, 0, 0.0, held))
            await client.call(GiveBack(actor.epoch, held, "actor_stopped"))
            await asyncio.sleep(0.2)
            assert not waits.done()
            waits.cancel()
        with closing(sqlite3.connect(daemon.run_dir / "replay.sqlite")) as db:
            found = db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
            assert found == [("dropped", len(held)), ("queued", len(held))]  # the next attempts
        learner.close()
        actor.close()


def test_a_header_that_would_cost_memory_is_refused_and_counted(tmp_path: Path) -> None:
    """1,100,000 empty lists where a message may hold anything: fewer than a reply may have, more than a request may."""
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        dealer = Dealer(daemon.endpoint)
        header = msgpack.packb([7, {"type": "hello", "role": "actor", "name": "a0", "protocol": 1, "shared": {"a": [[]] * 1_100_000}}])
        while not dealer.send([header, b""]):
            dealer.wait(0.05)
        deadline = time.monotonic() + 10
        while not stats(daemon.endpoint)["counters"].get("messages_refused"):
            assert time.monotonic() < deadline
        dealer.wait(0.2)
        assert dealer.receive() is None  # its number was not read
        dealer.close()
