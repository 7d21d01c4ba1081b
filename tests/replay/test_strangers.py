"""Who gets in: with keys, nothing that a stranger sends reaches the decoder, and an epoch counts with its own key alone."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from replay import daemon as daemon_module
from replay.client import BlockingClient
from tests.support.keys import KeyRing, for_another_server, unlisted
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, stats
from wire.codec import Limits, encode
from wire.errors import ConfigError, RefusedError, TryAgainError
from wire.keys import ALLOWED, ClientKeys, make_keys
from wire.messages import PROTOCOL, Hello, Leased, Note, Pull, Stats, Welcome
from wire.sockets import Dealer, Router

TRY_S = 0.6
ADDRESSES = ["tcp://127.0.0.1:*", "tcp://127.0.0.2:*"]


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys", "other")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every message that the daemon decodes."""
    sizes: list[int] = []
    real = daemon_module.decode

    def counting(frames: list[bytes], limits: Limits) -> object:
        sizes.append(sum(map(len, frames)))
        return real(frames, limits)

    monkeypatch.setattr(daemon_module, "decode", counting)
    return sizes


def keyed(tmp_path: Path, ring: KeyRing, address: str = ADDRESSES[0]) -> DaemonThread:
    return DaemonThread(make_config(tmp_path, replay={"endpoint": address}, security={"keys": str(ring.folder)}))


def knock(endpoint: str, set_up: Callable[[zmq.Socket], None]) -> bool:
    """Send for a while with a socket that `set_up` prepared. Whether anything came back."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    set_up(dealer)
    dealer.connect(endpoint)
    end, answered = time.monotonic() + TRY_S, False
    while time.monotonic() < end:
        try:
            dealer.send_multipart(encode(1, Stats()), zmq.NOBLOCK)
        except zmq.Again:
            pass
        answered = answered or bool(dealer.poll(20))
    dealer.close()
    context.term()
    return answered


def curve(keys: ClientKeys) -> Callable[[zmq.Socket], None]:
    def set_up(dealer: zmq.Socket) -> None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)

    return set_up


def plain(dealer: zmq.Socket) -> None:
    dealer.setsockopt_string(zmq.PLAIN_USERNAME, "actor")
    dealer.setsockopt_string(zmq.PLAIN_PASSWORD, "actor")


def shout(endpoint: str, data: bytes) -> None:
    """Bytes that are no handshake, on a bare connection."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        try:
            for _ in range(20):
                connection.sendall(data)
                time.sleep(0.01)
        except OSError:
            pass  # hung up on


STRANGERS: dict[str, Callable[[KeyRing], Callable[[zmq.Socket], None]]] = {
    "no security at all": lambda ring: lambda dealer: None,
    "a user name and a password": lambda ring: plain,
    "a key that is not on the list": lambda ring: curve(unlisted(ring)),
    "a listed key, for another server": lambda ring: curve(for_another_server(ring)),
    "replay's own public key": lambda ring: curve(ClientKeys(ring.server.public, ring.server.secret, ring.server.public)),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_nothing_of_a_stranger_reaches_the_decoder(tmp_path: Path, ring: KeyRing, decoded: list[int], stranger: str) -> None:
    with keyed(tmp_path, ring) as daemon:
        assert not knock(daemon.endpoint, STRANGERS[stranger](ring))
        assert decoded == []
        assert knock(daemon.endpoint, curve(ring.client("actor")))  # the same knock, with a key on the list
        assert decoded
        assert set(decoded) == {sum(map(len, encode(1, Stats())))}
        with BlockingClient(daemon.endpoint, ring.client("learner")) as client:
            counted = client.call(Stats())[0].values["counters"]["strangers_refused"]  # type: ignore[union-attr]
        assert counted >= 1


def test_noise_on_the_port_reaches_nobody(tmp_path: Path, ring: KeyRing, decoded: list[int]) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    with keyed(tmp_path, ring) as daemon:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(1000), greeting + b"\x00\x02hi"):
            shout(daemon.endpoint, noise)
        assert decoded == []
        assert knock(daemon.endpoint, curve(ring.client("actor")))


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_run_with_keys(tmp_path: Path, ring: KeyRing, address: str) -> None:
    with keyed(tmp_path, ring, address) as daemon:
        assert daemon.endpoint.startswith(address.removesuffix("*"))
        config = daemon.core.config
        learner = LightLearner(BlockingClient(daemon.endpoint, ring.client("learner")), config)
        actors = [LightActor(BlockingClient(daemon.endpoint, ring.client(key)), config, name)
                  for key, name in (("actor", "actor"), ("actor", "x"), ("other", "x"))]
        assert sorted(session.name for session in daemon.core.sessions.of("actor")) == ["actor", "actor.x", "other.x"]
        for actor in actors:
            actor.pull()
            actor.work()
        leased = learner.lease(wait_s=5.0)
        assert isinstance(leased, Leased)
        assert learner.commit(leased).version == 1
        for client in (learner, *actors):
            client.close()


def test_the_list_is_read_again_when_changed(tmp_path: Path, ring: KeyRing, decoded: list[int], caplog: pytest.LogCaptureFixture) -> None:
    listed = ring.folder / ALLOWED
    with keyed(tmp_path, ring) as daemon:
        staying = LightActor(BlockingClient(daemon.endpoint, ring.client("actor")), daemon.core.config, "a")
        leaving = LightActor(BlockingClient(daemon.endpoint, ring.client("other")), daemon.core.config, "b")
        before, other = listed.read_text(), curve(ring.client("other"))
        assert make_keys(ring.folder, ["late"]) == ["late"]
        LightActor(BlockingClient(daemon.endpoint, ring.client("late")), daemon.core.config, "c").close()  # at once: the handshake looks

        write(listed, before[:before.index("[other]")])
        wait_for("no longer: late, other", caplog)
        decoded.clear()
        with pytest.raises(TimeoutError):  # its open connection is of no use any more
            leaving.client.call(Note(leaving.epoch, "x", "y"), timeout_s=0.5)
        assert not knock(daemon.endpoint, other)
        assert decoded == []
        wait_until(lambda: daemon.core.store.counters.get("strangers_refused", 0) >= 2)

        write(listed, before + "\n[broken]\n")  # nothing changes, and one line says why
        wait_for("[broken] must be", caplog)
        write(listed, before)
        listed.chmod(0o644)
        wait_for(f"others have access to {listed}", caplog)
        assert not knock(daemon.endpoint, other)
        staying.client.call(Note(staying.epoch, "x", "still here"))
        listed.chmod(0o600)
        wait_for("new: other; no longer: none", caplog)
        leaving.client.call(Note(leaving.epoch, "x", "back"))
        assert sum("is not used, the one before it still holds" in line for line in caplog.messages) == 2
        for client in (staying, leaving):
            client.close()


def write(file: Path, text: str) -> None:
    """As an editor does, whose file is the owner's alone."""
    new = file.with_suffix(".edited")
    new.touch(0o600)
    new.write_text(text)
    new.replace(file)


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for(line: str, caplog: pytest.LogCaptureFixture) -> None:
    wait_until(lambda: any(line in message for message in caplog.messages))


def test_a_key_counts_for_its_role_alone(tmp_path: Path, ring: KeyRing) -> None:
    with keyed(tmp_path, ring) as daemon, BlockingClient(daemon.endpoint, ring.client("actor")) as client:
        shared = daemon.core.config.shared()
        for role in ("learner", "rank"):
            with pytest.raises(RefusedError, match=f"the key 'actor' is for role actor, not {role}"):
                client.call(Hello(role, "actor", PROTOCOL, shared))
        with BlockingClient(daemon.endpoint, ring.client("learner")) as learner, pytest.raises(RefusedError, match="not actor"):
            learner.call(Hello("actor", "a", PROTOCOL, shared))
        assert daemon.core.sessions.saved() == []


def test_anothers_epoch_is_of_no_use(tmp_path: Path, ring: KeyRing) -> None:
    with keyed(tmp_path, ring) as daemon:
        victim = LightActor(BlockingClient(daemon.endpoint, ring.client("actor")), daemon.core.config, "a")
        with BlockingClient(daemon.endpoint, ring.client("other")) as thief:
            for request in (Note(victim.epoch, "x", "forged"), Pull(victim.epoch, -1, 5, 0.0, [])):
                with pytest.raises(TryAgainError, match="replaced by a later one of its name, or never said HELLO"):
                    thief.call(request)
            welcome, _ = thief.call(Hello("actor", "a", PROTOCOL, daemon.core.config.shared()))  # the same name is another process
            assert isinstance(welcome, Welcome)
        victim.client.call(Note(victim.epoch, "x", "mine"))
        assert [body for body, in daemon.core.store.rows("SELECT body FROM ledger WHERE kind = 'note'")] == [
            '{"process":"actor.a","kind":"x","detail":"mine"}']
        victim.close()


def test_epochs_keep_their_keys_over_a_restart(tmp_path: Path, ring: KeyRing) -> None:
    with keyed(tmp_path, ring) as daemon:
        victim = LightActor(BlockingClient(daemon.endpoint, ring.client("actor")), daemon.core.config, "a")
        victim.close()
    with keyed(tmp_path, ring) as daemon:
        with BlockingClient(daemon.endpoint, ring.client("other")) as thief, pytest.raises(TryAgainError):
            thief.call(Note(victim.epoch, "x", "forged"))
        with BlockingClient(daemon.endpoint, ring.client("actor")) as again:
            again.call(Note(victim.epoch, "x", "mine"))


def test_a_client_is_told_that_the_keys_do_not_match(tmp_path: Path, ring: KeyRing) -> None:
    with keyed(tmp_path, ring) as daemon:
        for keys in (None, unlisted(ring), for_another_server(ring)):
            dealer, end = Dealer(daemon.endpoint, keys), time.monotonic() + 10
            while not dealer.unwelcome and time.monotonic() < end:
                dealer.wait(0.1)
                dealer.dropped()
            assert dealer.unwelcome
            assert dealer.send([b"", b""]) is False
            dealer.close()


def test_with_keys_any_address_will_do_and_without_only_loopback(ring: KeyRing) -> None:
    for endpoint in ("tcp://0.0.0.0:*", "tcp://10.255.255.1:5757", "tcp://learner-node.example.org:5757"):
        with pytest.raises(ConfigError, match="`leeway keys FOLDER`"):
            Dealer(endpoint)
        Dealer(endpoint.replace("*", "5757"), ring.client("actor")).close()
    Router("tcp://0.0.0.0:*", ring.server).close()
    for endpoint in ("tcp://*:5757", "ipc:///tmp/x", "tcp://10.0.0.1", "udp://10.0.0.1:5757"):
        with pytest.raises(ConfigError, match="write it as tcp://ADDRESS:PORT"):
            Router(endpoint, ring.server)


def test_without_keys_nothing_has_changed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        actor = LightActor(daemon.endpoint, config, "a.b")
        assert [(session.name, session.key) for session in daemon.core.sessions.of("actor")] == [("a.b", "")]
        assert "strangers_refused" not in stats(daemon.endpoint)["counters"]
        actor.close()
