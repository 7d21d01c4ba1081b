"""ZeroMQ as Leeway uses it: DEALER to ROUTER, mandatory routing, poll then receive, limits on frames and bytes.

Without keys a socket is loopback only. With keys (`wire/keys.py`) both ends speak CURVE and nothing else: who is not on replay's list fails
in the handshake, and nothing that it sent comes out of `Router.receive`.

A receive is never awaited: a cancelled receive loses its message. One polls, and then takes what is there without waiting.
"""

import math
import re
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from configs.rules import ENDPOINT
from wire.allow_list import AllowList
from wire.codec import MAX_BULK, REPLY, join, split
from wire.errors import ConfigError
from wire.keys import ClientKeys, Known, ServerKeys

LOOPBACK = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d+|\*)")
ZAP_DOMAIN = "leeway"
"""Naming a domain makes libzmq refuse everyone when nobody answers for it; without one it would let everyone in."""
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MOST_DROPPED = 1000
"""Messages dropped unread in one go."""
LARGE = zmq.COPY_THRESHOLD
"""Bytes from which on a message is not copied into ZeroMQ's memory, so that its end can be seen."""
FRAMES_KEPT = 4
"""A message has two frames; a few more are kept so that the decoder can say what is wrong, the rest are dropped unread."""


def check_endpoint(endpoint: str, *, keyed: bool = False) -> str:
    """Raises ConfigError unless the endpoint is on this machine's loopback, or keys are in use."""
    if not ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"replay.endpoint = {endpoint!r}: write it as tcp://ADDRESS:PORT")
    if not keyed and not LOOPBACK.fullmatch(endpoint):
        raise ConfigError(f"replay.endpoint = {endpoint!r}: an address beyond loopback needs keys (`leeway keys FOLDER`, then "
                          "security.keys = \"FOLDER\"); without them use tcp://127.0.0.1:PORT")
    return endpoint.replace("localhost", "127.0.0.1")


def in_use(endpoint: str) -> str:
    """What is said of an endpoint where somebody listens already."""
    return (f"replay.endpoint = {endpoint!r} is in use: is this run's replay already running? Stop it, or choose another port with "
            "--set replay.endpoint=tcp://127.0.0.1:PORT (port 0 in `leeway run`: a free one)")


def check_libzmq() -> None:
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigError(f"libzmq {zmq.zmq_version()} has known holes: install pyzmq with libzmq 4.3.5 or newer")


def _set_up(socket: zmq.Socket | zmq.asyncio.Socket, address: str) -> None:
    socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))  # with it a name would be looked up as one of IPv6 too
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REPLY.header + MAX_BULK + 4)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)


class Received(NamedTuple):
    """`peer` is where a reply goes. `who` is whose key this connection was opened with; None when replay has no keys."""

    peer: bytes
    frames: list[bytes]
    who: Known | None = None


class _Guard:
    """Answers ZeroMQ's question whether a public key may come in, in a thread of its own (pyzmq's)."""

    def __init__(self, context: zmq.Context, allowed: AllowList) -> None:
        self._allowed = allowed
        self._thread = ThreadAuthenticator(context)
        self._thread.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)
        self._thread.start()

    def callback(self, domain: str, key: bytes) -> bool:
        self._allowed.look()
        return self._allowed.get(key) is not None

    def stop(self) -> None:
        self._thread.stop()


class Router:
    """The server's socket. A reply to a peer that is gone is dropped and said so: the peer asks again."""

    def __init__(self, endpoint: str, keys: ServerKeys | None = None) -> None:
        """Raises ConfigError when the address is neither loopback nor guarded by keys, or already in use."""
        check_libzmq()
        address = check_endpoint(endpoint, keyed=keys is not None)
        self._allowed = None if keys is None else AllowList(keys)
        self._dropped = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_up(self._socket, address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._guard = None if self._allowed is None else _Guard(self._context, self._allowed)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._failures = _unbounded_monitor(self._context, self._socket, HANDSHAKE_FAILED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._plain: zmq.Socket = zmq.Socket.shadow(self._socket.underlying)
        self._large: dict[str, list[tuple[int, zmq.MessageTracker]]] = {}
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(in_use(endpoint)) from None
            raise ConfigError(f"replay.endpoint = {endpoint!r}: {error.strerror}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def wait(self, seconds: float) -> None:
        """Returns when a message is there, at the latest after `seconds`."""
        await self._poller.poll(_milliseconds(seconds))

    def receive(self) -> Received | None:
        """A message that has arrived, None when there is none. What comes on a connection whose key was taken off the list is dropped
        unread, and counted with the strangers; after many of them the caller has its turn."""
        for _ in range(MOST_DROPPED):
            if not (frames := _take(self._plain)):
                break
            who = None if self._allowed is None else self._allowed.get(str(frames[0].get("User-Id")).encode())
            if who is not None or self._allowed is None:
                return Received(frames[0].bytes, [frame.bytes for frame in frames[1:]], who)
            self._dropped += 1
        return None

    def strangers(self) -> int:
        """How many handshakes failed since this was last asked: no key, one that is not on the list, another server's key, no CURVE.
        Messages of keys that were taken off the list count, too. Looks at the list first."""
        if self._allowed is not None:
            self._allowed.look()
        failed, self._dropped = self._dropped, 0
        while _take(self._failures):
            failed += 1
        return failed

    def send(self, peer: bytes, frames: list[bytes], account: str = "") -> bool:
        """False when the peer is gone or does not read. A large message that is put on an account counts in `under_way`."""
        message = join(frames)
        watched = bool(account) and len(message) >= LARGE
        try:
            tracker = self._plain.send_multipart([peer, message], zmq.NOBLOCK, copy=not watched, track=watched)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        if tracker is not None:
            self._large.setdefault(account, []).append((len(message), tracker))
        return True

    def under_way(self, account: str) -> int:
        """Bytes of large messages of this account that ZeroMQ still holds: neither given to the network nor dropped with a connection."""
        left = [one for one in self._large.pop(account, []) if not one[1].done]
        if left:
            self._large[account] = left
        return sum(size for size, _ in left)

    def close(self) -> None:
        """What was sent last may be lost: whoever must hear it is given time before."""
        if self._context.closed:
            return
        self._socket.disable_monitor()
        self._failures.close(0)
        self._socket.close(0)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


class Dealer:
    """The client's socket: ZeroMQ reconnects for ever. Nothing is queued for a peer that is not there, and a lost connection shows in
    `dropped`, so that the caller can send again exactly what the lost peer may not have read.

    A reply is one frame. With ZMQ_IMMEDIATE libzmq drops what is unread when a connection is lost; should it do so between two frames of a
    message, the next receive aborts the process (`Assertion failed: !_more (src/fq.cpp:80)`, libzmq 4.3.5)."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None, *, asynchronous: bool = False) -> None:
        """Raises ConfigError when the address is beyond loopback and there are no keys."""
        check_libzmq()
        address = check_endpoint(endpoint, keyed=keys is not None)
        self._context: zmq.Context = zmq.asyncio.Context() if asynchronous else zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_up(self._socket, address)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self.unwelcome = False
        """Whether a handshake failed: the two ends do not agree about keys."""
        self._poller = zmq.asyncio.Poller() if asynchronous else zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._plain: zmq.Socket = zmq.Socket.shadow(self._socket.underlying)
        self._plain_monitor: zmq.Socket = zmq.Socket.shadow(self._monitor.underlying)
        self._socket.connect(address)

    def wait(self, seconds: float) -> None:
        self._poller.poll(_milliseconds(seconds))

    async def wait_async(self, seconds: float) -> None:
        await self._poller.poll(_milliseconds(seconds))  # type: ignore[misc]

    def receive(self) -> list[bytes] | None:
        frames = _take(self._plain)
        return split(frames[0].buffer) if len(frames) == 1 else [frame.bytes for frame in frames] or None

    def dropped(self) -> bool:
        """Whether the connection was lost since this was last asked."""
        lost = False
        while event := _take(self._plain_monitor):
            if parse_monitor_message([frame.bytes for frame in event])["event"] & HANDSHAKE_FAILED:
                self.unwelcome = True
            else:
                lost = True
        return lost

    def send(self, frames: list[bytes]) -> bool:
        """False when there is no connection now."""
        try:
            self._plain.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()


def _unbounded_monitor(context: zmq.Context, socket: zmq.Socket, events: int) -> zmq.Socket:
    """Of what happens to `socket`. A full monitor would hold up ZeroMQ's own thread, and with it the closing of the socket."""
    monitor: zmq.Socket = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    monitor.setsockopt(zmq.RCVHWM, 0)
    socket.monitor("inproc://monitor", events)
    monitor.connect("inproc://monitor")
    return monitor


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def _take(socket: zmq.Socket) -> list[zmq.Frame]:
    frames: list[zmq.Frame] = []
    try:
        frames.append(socket.recv(zmq.NOBLOCK, copy=False))
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < FRAMES_KEPT:
                frames.append(frame)
    except zmq.Again:
        pass
    return frames
