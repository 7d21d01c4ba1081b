"""Calls: repeated until answered, fenced, refused."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from replay.client import AsyncClient, BlockingClient
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, notice, stats
from wire.codec import decode, encode
from wire.errors import ProtocolError, RefusedError, TryAgainError
from wire.messages import PROTOCOL, Applied, Hello, Lease, NotYet, Ok, Pull, Refusal, Stats, StatsReply, Welcome, Work
from wire.sockets import Dealer, Router


class Scripted:
    """A server that does with each message what the next line of its script says: answer, forget, or both answer and close."""

    def __init__(self) -> None:
        self.router = Router("tcp://127.0.0.1:*")
        self.endpoint = self.router.endpoint
        self.seen: list[tuple[int, Any]] = []

    async def take(self) -> tuple[bytes, int, Any]:
        while True:
            await self.router.wait(0.05)
            if (found := self.router.receive()) is not None:
                seq, message, _ = decode(found[1])
                self.seen.append((seq, message))
                return found[0], seq, message

    async def answer(self, reply: Any) -> None:
        peer, seq, _ = await self.take()
        self.router.send(peer, encode(seq, reply))

    def restart(self) -> None:
        self.router.close()
        self.router = Router(self.endpoint)


async def test_a_request_without_a_reply_is_sent_again_under_its_number() -> None:
    server = Scripted()
    async with AsyncClient(server.endpoint, patience_s=0.3) as client:
        call = asyncio.create_task(client.call(Stats()))
        await server.take()
        await server.answer(StatsReply({"a": 1}))
        assert await call == (StatsReply({"a": 1}), b"")
    assert server.seen[0] == server.seen[1]
    server.router.close()


async def test_a_lost_connection_repeats_what_was_on_its_way_at_once() -> None:
    server = Scripted()
    async with AsyncClient(server.endpoint, patience_s=60.0) as client, asyncio.timeout(10):
        calls = [asyncio.create_task(client.call(request)) for request in (Stats(), Lease(1, 0, 30.0))]
        await server.take()
        await server.take()
        server.restart()
        found = [(peer, seq, type(message)) for peer, seq, message in (await server.take(), await server.take())]
        for peer, seq, kind in found:
            server.router.send(peer, encode(seq, StatsReply({}) if kind is Stats else NotYet("x")))
        assert [reply for reply, _ in await asyncio.gather(*calls)] == [StatsReply({}), NotYet("x")]
    assert len(server.seen) == 4
    server.router.close()


async def test_replies_to_others_and_old_replies_are_passed_over() -> None:
    server = Scripted()
    async with AsyncClient(server.endpoint) as client:
        call = asyncio.create_task(client.call(Stats()))
        peer, seq, _ = await server.take()
        server.router.send(peer, encode(seq + 100, Ok()))
        server.router.send(peer, [b"\xc1", b""])
        server.router.send(peer, encode(seq, StatsReply({"mine": 1})))
        assert await call == (StatsReply({"mine": 1}), b"")
    server.router.close()


@pytest.mark.parametrize(
    ("kind", "error"), [("refused", RefusedError), ("again", TryAgainError), ("protocol", ProtocolError), ("else", ProtocolError)]
)
async def test_refusals_are_errors(kind: str, error: type[Exception]) -> None:
    server = Scripted()
    async with AsyncClient(server.endpoint) as client:
        call = asyncio.create_task(client.call(Stats()))
        await server.answer(Refusal(kind, "why"))
        with pytest.raises(error, match="why"):
            await call
    server.router.close()


async def test_a_cancelled_call_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    server = Scripted()
    async with AsyncClient(server.endpoint) as client:
        cancelled, kept = asyncio.create_task(client.call(Lease(1, 0, 9.0))), asyncio.create_task(client.call(Stats()))
        first, second = await server.take(), await server.take()
        cancelled.cancel()
        await asyncio.sleep(0)
        for peer, seq, message in (first, second):
            server.router.send(peer, encode(seq, StatsReply({}) if isinstance(message, Stats) else NotYet("x")))
        assert await kept == (StatsReply({}), b"")
    server.router.close()


def test_waiting_for_a_replay_that_is_not_there_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.client.FIRST_COMPLAINT_S", 0.1)
    with (
        BlockingClient("tcp://127.0.0.1:9") as client,
        caplog.at_level(logging.WARNING),
        pytest.raises(TimeoutError, match="no reply from replay"),
    ):
        client.call(Stats(), timeout_s=0.4)
    assert [record.getMessage() for record in caplog.records] == ["waiting for replay at tcp://127.0.0.1:9: no connection"]


# ---------------------------------------------------------------- with the daemon
def test_the_other_config_is_refused_naming_the_key(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon, BlockingClient(daemon.endpoint) as client:
        other = config.shared()
        other["sampling"] = {**other["sampling"], "temperature": 0.7}
        with pytest.raises(RefusedError, match=r"another config than this run's: sampling.temperature is 1.0 here and 0.7 there"):
            client.call(Hello("actor", "a0", PROTOCOL, other))
        with pytest.raises(RefusedError, match="use one version of Leeway"):
            client.call(Hello("actor", "a0", PROTOCOL + 1, config.shared()))
        with pytest.raises(RefusedError, match="a role is one of"):
            client.call(Hello("god", "a0", PROTOCOL, config.shared()))
        with pytest.raises(RefusedError, match="a name"):
            client.call(Hello("actor", "../a0", PROTOCOL, config.shared()))


def test_an_older_life_of_an_actor_is_refused_and_its_orders_go_to_the_new_one(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, old = LightLearner(daemon.endpoint, config), LightActor(daemon.endpoint, config)
        old.pull()
        orders = old.pull().orders
        new = LightActor(daemon.endpoint, config)
        with pytest.raises(TryAgainError, match="replaced by a later one"):
            old.pull()
        assert new.pull() == Work(orders, notice(0), False)
        assert new.answer().stored == 8
        for client in (learner, old, new):
            client.close()


def test_a_repeated_hello_or_pull_gets_the_same_answer(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, dealer = LightLearner(daemon.endpoint, config), Dealer(daemon.endpoint)

        def ask(seq: int, request: Any) -> Any:
            while not dealer.send(encode(seq, request)):
                dealer.wait(0.05)
            dealer.wait(5.0)
            frames = dealer.receive()
            assert frames is not None
            return decode(frames)[1]

        hello = Hello("actor", "a0", PROTOCOL, config.shared())
        welcome = ask(1, hello)
        assert isinstance(welcome, Welcome)
        assert ask(1, hello) == welcome
        ask(2, Applied(welcome.epoch, 0, notice(0).weights_digest, 0.0, 0.0))
        work = ask(3, Pull(welcome.epoch, 0, 2, 0.0, []))
        assert isinstance(work, Work)
        assert len(work.orders) == 2
        assert ask(3, Pull(welcome.epoch, 0, 2, 0.0, [])) == work
        assert len(ask(4, Pull(welcome.epoch, 0, 9, 0.0, [])).orders) == 2  # the two that are left of the budget: nothing was granted twice
        assert ask(5, hello).epoch > welcome.epoch
        dealer.close()
        learner.close()


def test_what_is_not_understood_is_refused_and_the_daemon_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        dealer = Dealer(daemon.endpoint)
        while not dealer.send([b"\x92\x07\x81\xa4type\xa4exec", b""]):
            dealer.wait(0.05)
        dealer.wait(5.0)
        seq, reply, _ = decode(dealer.receive() or [])
        assert (seq, reply.kind) == (7, "protocol")  # type: ignore[union-attr]
        dealer.send([b"\x00"])
        dealer.close()
        learner = LightLearner(daemon.endpoint, config)
        with pytest.raises(ProtocolError, match="not for a process of role learner"):
            learner.client.call(Pull(learner.epoch, 0, 1, 0.0, []))
        learner.close()
        assert stats(daemon.endpoint)["counters"]["messages_refused"] == 2


def test_a_pull_waits_for_orders_and_is_woken_by_them(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    async def scene(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            welcome, _ = await client.call(Hello("actor", "a0", PROTOCOL, config.shared()))
            waiting = asyncio.create_task(client.call(Pull(welcome.epoch, -1, 1, 9.0, [])))  # type: ignore[union-attr]
            await asyncio.sleep(0.2)
            assert not waiting.done()
            learner = await asyncio.to_thread(LightLearner, endpoint, config)
            work, _ = await waiting
            assert work == Work([], notice(0), False)
            learner.close()

    with DaemonThread(config) as daemon:
        asyncio.run(scene(daemon.endpoint))
