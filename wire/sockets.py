"""ZeroMQ as Leeway uses it: DEALER to ROUTER, mandatory routing, poll then receive, limits on frames and bytes, loopback only.

A receive is never awaited: a cancelled receive loses its message. One polls, and then takes what is there without waiting.
"""

import math
import re

import zmq
import zmq.asyncio

from wire.codec import MAX_BULK, MAX_HEADER
from wire.errors import ConfigError

LOOPBACK = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d+|\*)")
FRAMES_KEPT = 4
"""A message has two frames; a few more are kept so that the decoder can say what is wrong, the rest are dropped unread."""


def check_endpoint(endpoint: str) -> str:
    """Raises ConfigError unless the endpoint is on this machine's loopback."""
    if not LOOPBACK.fullmatch(endpoint):
        raise ConfigError(f"replay.endpoint = {endpoint!r}: an address beyond loopback needs keys; use tcp://127.0.0.1:PORT")
    return endpoint.replace("localhost", "127.0.0.1")


def check_libzmq() -> None:
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigError(f"libzmq {zmq.zmq_version()} has known holes: install pyzmq with libzmq 4.3.5 or newer")


def _limits(socket: zmq.Socket | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEADER, MAX_BULK))
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)


class Router:
    """The server's socket. A reply to a peer that is gone is dropped and said so: the peer asks again."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError when the address is not loopback or already in use."""
        check_libzmq()
        address = check_endpoint(endpoint)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _limits(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._plain: zmq.Socket = zmq.Socket.shadow(self._socket.underlying)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(f"replay.endpoint = {endpoint!r} is in use: is this run's replay already running? "
                                  "Stop it, or choose another port with --set replay.endpoint=tcp://127.0.0.1:PORT") from None
            raise ConfigError(f"replay.endpoint = {endpoint!r}: {error.strerror}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def wait(self, seconds: float) -> None:
        """Returns when a message is there, at the latest after `seconds`."""
        await self._poller.poll(_milliseconds(seconds))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(peer, frames) of a message that has arrived, None when there is none."""
        frames = _take(self._plain)
        return (frames[0], frames[1:]) if frames else None

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        """False when the peer is gone or does not read."""
        try:
            self._plain.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """What was sent last may be lost: whoever must hear it is given time before."""
        self._socket.close(0)
        self._context.term()


class Dealer:
    """The client's socket: ZeroMQ reconnects for ever. Nothing is queued for a peer that is not there, and a lost connection shows in
    `dropped`, so that the caller can send again exactly what the lost peer may not have read."""

    def __init__(self, endpoint: str, *, asynchronous: bool = False) -> None:
        check_libzmq()
        address = check_endpoint(endpoint)
        self._context: zmq.Context = zmq.asyncio.Context() if asynchronous else zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _limits(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
        return _take(self._plain) or None

    def dropped(self) -> bool:
        """Whether the connection was lost since this was last asked."""
        lost = False
        while _take(self._plain_monitor):
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


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def _take(socket: zmq.Socket) -> list[bytes]:
    frames: list[bytes] = []
    try:
        frames.append(socket.recv(zmq.NOBLOCK))
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            if len(frames) < FRAMES_KEPT:
                frames.append(frame)
    except zmq.Again:
        pass
    return frames
