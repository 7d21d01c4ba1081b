"""A process that asks for weights and does not read them: replay's memory stays within a bound, and the others notice nothing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from configs.schema import Config
from replay.backlog import MOST_BYTES, MOST_WAITING, Backlog
from replay.handlers import Call
from tests.replay.test_pressure import memory
from tests.support.chaos import Chaos
from tests.support.replay import LightActor, LightLearner, make_config, make_core, stats
from wire.codec import decode, encode, split
from wire.digest import digest
from wire.keys import Known
from wire.manifest import FILE, version_path
from wire.messages import MAX_CHUNK, PROTOCOL, Chunk, Fetch, Hello, Refusal, Welcome
from wire.process import free_port

CHUNKS = 16
ASKED = 3000
BOUND = 96 << 20
"""What the peer may cost: 32 MiB under way, a chunk or two in the making, and as much again for what malloc does not give back."""


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return os.urandom(CHUNKS * MAX_CHUNK)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, replay={"endpoint": f"tcp://127.0.0.1:{free_port()}"})


@pytest.fixture
def pid(tmp_path: Path, config: Config, content: bytes) -> Iterator[int]:
    """A replay of its own, with a version 0 of 64 MiB."""
    chaos = Chaos(config, tmp_path, roles=("replay",))
    try:
        chaos.open()
        LightLearner(config.replay.endpoint, config).close()
        folder = chaos.run_dir / version_path(0)
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(content)
        found = chaos.children["replay"].pid
        assert found is not None
        yield found
    finally:
        chaos.end()


class Unread:
    """A socket that holds two messages for whoever reads it, and leaves the rest to the sender."""

    def __init__(self, config: Config, name: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(config.replay.endpoint)
        self.socket.send_multipart(encode(0, Hello("actor", name, PROTOCOL, config.shared())))
        _, welcome = self.read()
        assert isinstance(welcome, Welcome)
        self.epoch = welcome.epoch

    def ask(self, seq: int) -> None:
        self.socket.send_multipart(encode(seq, Fetch(self.epoch, 0, FILE, seq % CHUNKS * MAX_CHUNK, MAX_CHUNK)))

    def read(self) -> tuple[int, object]:
        assert self.socket.poll(20_000)
        seq, reply, data = decode(split(self.socket.recv(copy=False).buffer))
        if isinstance(reply, Chunk):
            assert digest(data) == reply.digest
        return seq, reply

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def download(actor: LightActor) -> bytes:
    parts = []
    for number in range(CHUNKS):
        reply, data = actor.client.call(Fetch(actor.epoch, 0, FILE, number * MAX_CHUNK, MAX_CHUNK))
        assert isinstance(reply, Chunk)
        parts.append(data)
    return b"".join(parts)


@pytest.mark.timeout(120)
def test_who_does_not_read_costs_little(config: Config, pid: int, content: bytes) -> None:
    honest = LightActor(config.replay.endpoint, config, "honest")
    assert download(honest) == content
    before = memory(pid)
    greedy = Unread(config, "greedy")
    for seq in range(1, ASKED + 1):
        greedy.ask(seq)
    largest, end = 0, time.monotonic() + 2.0
    while time.monotonic() < end:
        largest = max(largest, memory(pid))
        time.sleep(0.02)
    assert download(honest) == content  # one chunk after the other, each within the client's patience
    assert max(largest, memory(pid)) - before < BOUND
    given, refused = [], set()
    while greedy.socket.poll(1000):
        seq, reply = greedy.read()
        if isinstance(reply, Refusal):
            refused.add(reply.reason)
        else:
            given.append(seq)
    assert given[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert given == sorted(set(given))
    assert len(given) < 100
    assert refused == {"64 requests of 'greedy' wait for it to read what it was sent before: this one is not answered"}
    for seq in range(ASKED + 1, ASKED + 51):
        greedy.ask(seq)
        number, reply = greedy.read()
        assert (number, type(reply)) == (seq, Chunk)
    for seq in range(ASKED + 51, ASKED + 101):  # more at once than may be under way: they wait, and come
        greedy.ask(seq)
    assert [greedy.read()[0] for _ in range(50)] == list(range(ASKED + 51, ASKED + 101))
    assert stats(config.replay.endpoint)["imbalance"] == 0
    for client in (honest, greedy):
        client.close()


@pytest.mark.timeout(120)
def test_what_waits_for_a_peer_that_left_is_let_go(config: Config, pid: int, content: bytes) -> None:
    greedy = Unread(config, "actor")
    for seq in range(1, 200):
        greedy.ask(seq)
    greedy.close()
    again = LightActor(config.replay.endpoint, config, "actor")  # the same account
    assert download(again) == content
    again.close()


def test_processes_of_one_key_have_their_own_turn(tmp_path: Path) -> None:
    """Many actors may share a key, and ask for a new version at once: four chunks each."""
    core = make_core(make_config(tmp_path))
    backlog = Backlog(core, lambda account: MOST_BYTES)
    who = Known("actors", "actor")
    epochs = [core.sessions.open("actor", f"a{number}", 0, 0.0).epoch for number in range(40)]

    def ask(epoch: int, seq: int) -> bool | Refusal:
        return backlog.take(Call(b"%d" % epoch, seq, Fetch(epoch, 0, FILE, 0, MAX_CHUNK), b"", 0.0, 0.0, who))

    assert [ask(epoch, seq) for epoch in epochs for seq in range(4)] == [True] * 160
    assert [ask(epochs[0], seq) for seq in range(4, MOST_WAITING)] == [True] * (MOST_WAITING - 4)
    refused = ask(epochs[0], MOST_WAITING)
    assert isinstance(refused, Refusal) and "64 requests of 'actors' wait" in refused.reason
    assert ask(epochs[1], 4) is True
