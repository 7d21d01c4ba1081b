"""The feed never waits: not for a replay that is absent, nor for one that answers late. A real ROUTER plays replay."""

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from leeway import feed as feeds
from leeway.feed import Feed
from wire.codec import decode, encode
from wire.messages import Stats, StatsReply
from wire.sockets import Router


@pytest.fixture
async def replay() -> AsyncIterator[Router]:
    router = Router("tcp://127.0.0.1:*")
    yield router
    router.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(feeds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def question(router: Router) -> tuple[bytes, int]:
    await router.wait(5.0)
    received = router.receive()
    assert received is not None, "nothing was asked"
    seq, message, _ = decode(received[1])
    assert isinstance(message, Stats)
    return received[0], seq


async def first_question(router: Router, feed: Feed, clock: list[float]) -> tuple[bytes, int]:
    """Asked as soon as there is a connection; until then each attempt fails and is made again half a second later."""
    for _ in range(500):
        feed.poll()
        await router.wait(0.01)
        if received := router.receive():
            return received[0], decode(received[1])[0]
        clock[0] += 0.0 if feed.waiting else 0.5
    raise AssertionError("nothing was asked")


def answer_within(feed: Feed, polls: int = 200) -> dict[str, Any] | None:
    for _ in range(polls):
        if (values := feed.poll()) is not None:
            return values
        time.sleep(0.01)
    return None


async def test_asks_and_takes_the_answer_when_it_is_there(replay: Router, clock: list[float]) -> None:
    feed = Feed(replay.endpoint)
    peer, seq = await first_question(replay, feed, clock)
    assert feed.poll() is None
    replay.send(peer, encode(seq, StatsReply({"updates": 7})))
    assert answer_within(feed) == {"updates": 7}
    clock[0] += 0.4
    assert feed.poll() is None
    await replay.wait(0.1)
    assert replay.receive() is None, "it asked again within half a second"
    clock[0] += 0.2
    feed.poll()
    assert (await question(replay))[1] == seq + 1
    feed.close()


async def test_asks_again_when_the_question_was_lost(replay: Router, clock: list[float]) -> None:
    feed = Feed(replay.endpoint)
    _, first = await first_question(replay, feed, clock)
    clock[0] += 2.9
    feed.poll()
    await replay.wait(0.1)
    assert replay.receive() is None
    clock[0] += 0.2
    feed.poll()
    peer, seq = await question(replay)
    assert seq == first + 1
    replay.send(peer, encode(seq, StatsReply({"updates": 8})))
    assert answer_within(feed) == {"updates": 8}
    feed.close()


def test_an_absent_replay_is_no_obstacle() -> None:
    feed = Feed("tcp://127.0.0.1:1")
    assert [feed.poll() for _ in range(5)] == [None] * 5
    feed.close()
