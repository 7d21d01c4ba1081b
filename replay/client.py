"""How the other processes talk to replay: one call, one reply. A request without a reply is sent again, for ever, under the same number.

`AsyncClient` is the actor's; it may have several calls in flight. `BlockingClient` is the learner's and the tools'.
"""

import asyncio
import logging
import secrets
import time
from typing import Self

from wire.codec import decode, encode
from wire.errors import LeewayError, ProtocolError, RefusedError, TryAgainError
from wire.keys import ClientKeys
from wire.messages import Refusal, Reply, Request
from wire.sockets import Dealer

log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Beyond the wait that a request asks for itself; then it is sent again on a connection that seems well."""
RETRY_S = 0.05
FIRST_COMPLAINT_S, COMPLAIN_EVERY_S = 3.0, 30.0
UNWELCOME = ("no connection, as our keys and replay's do not match: is security.keys set at both ends, our key on the list, and server.key "
             "replay's?")
ERRORS: dict[str, type[LeewayError]] = {"refused": RefusedError, "again": TryAgainError}


class _Pending:
    """One request on its way."""

    def __init__(self, seq: int, request: Request, bulk: bytes, patience_s: float) -> None:
        self.frames = encode(seq, request, bulk)
        self.name = type(request).__name__
        self.allowed_s = getattr(request, "wait_s", 0.0) + patience_s
        self.sent_at: float | None = None
        self.retry_at = 0.0
        self.complain_at = time.monotonic() + getattr(request, "wait_s", 0.0) + FIRST_COMPLAINT_S

    def push(self, dealer: Dealer, endpoint: str) -> None:
        """Send it if it has to be sent, and say what is awaited when that takes long."""
        now = time.monotonic()
        if self.sent_at is not None and now - self.sent_at > self.allowed_s:
            self.sent_at = None
        if self.sent_at is None and now >= self.retry_at and dealer.send(self.frames):
            self.sent_at = now
        if now >= self.complain_at:
            log.warning("waiting for replay at %s: %s", endpoint, f"no reply to {self.name} yet" if self.sent_at else UNWELCOME
                        if dealer.unwelcome else "no connection")
            self.complain_at = now + COMPLAIN_EVERY_S

    def lost(self) -> None:
        """Its connection was lost. For a moment ZeroMQ still takes messages for the peer that is gone."""
        self.sent_at, self.retry_at = None, time.monotonic() + RETRY_S


def _opened(reply: Reply, bulk: bytes) -> tuple[Reply, bytes]:
    """The reply, or the error that a Refusal stands for."""
    if isinstance(reply, Refusal):
        raise ERRORS.get(reply.kind, ProtocolError)(reply.reason)
    return reply, bulk


def _first_seq() -> int:
    """Numbers of different clients do not meet, so replay can tell a repeated HELLO from another one."""
    return secrets.randbits(62)


class BlockingClient:
    def __init__(self, endpoint: str, keys: ClientKeys | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self.endpoint, self._patience_s = endpoint, patience_s
        self._dealer = Dealer(endpoint, keys)
        self._seq = _first_seq()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, request: Request, bulk: bytes = b"", *, timeout_s: float | None = None) -> tuple[Reply, bytes]:
        """Raises RefusedError, TryAgainError or ProtocolError for a Refusal; TimeoutError after `timeout_s` (default: never)."""
        self._seq += 1
        pending = _Pending(self._seq, request, bulk, self._patience_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while end is None or time.monotonic() < end:
            pending.push(self._dealer, self.endpoint)
            self._dealer.wait(RETRY_S if pending.sent_at is None else 1.0 if end is None else max(0.0, min(1.0, end - time.monotonic())))
            if self._dealer.dropped():
                pending.lost()
            while (frames := self._dealer.receive()) is not None:
                seq, reply, data = decode(frames)
                if seq == self._seq:
                    return _opened(reply, data)  # type: ignore[arg-type]
        raise TimeoutError(f"no reply from replay at {self.endpoint} within {timeout_s:g} s")

    def close(self) -> None:
        self._dealer.close()


class AsyncClient:
    """Use it inside one event loop; `close` when done."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self.endpoint, self._patience_s = endpoint, patience_s
        self._dealer = Dealer(endpoint, keys, asynchronous=True)
        self._seq = _first_seq()
        self._pending: dict[int, tuple[_Pending, asyncio.Future[tuple[Reply, bytes]]]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        """Raises RefusedError, TryAgainError or ProtocolError for a Refusal. May be cancelled: the request may have been carried out."""
        self._seq += 1
        seq, pending = self._seq, _Pending(self._seq, request, bulk, self._patience_s)
        future: asyncio.Future[tuple[Reply, bytes]] = asyncio.get_running_loop().create_future()
        self._pending[seq] = (pending, future)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        pending.push(self._dealer, self.endpoint)
        try:
            return _opened(*await future)
        finally:
            self._pending.pop(seq, None)

    async def _read(self) -> None:
        """Runs while calls are in flight. What goes wrong here is everyone's error."""
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 - handed to every caller
            for _, future in self._pending.values():
                if not future.done():
                    future.set_exception(error)

    async def _serve(self) -> None:
        while self._pending:
            unsent = any(pending.sent_at is None for pending, _ in self._pending.values())
            await self._dealer.wait_async(RETRY_S if unsent else 0.5)
            if self._dealer.dropped():
                for pending, _ in self._pending.values():
                    pending.lost()
            while (frames := self._dealer.receive()) is not None:
                self._take(frames)
            for pending, _ in list(self._pending.values()):
                pending.push(self._dealer, self.endpoint)

    def _take(self, frames: list[bytes]) -> None:
        try:
            seq, reply, data = decode(frames)
        except ProtocolError as error:
            if (future := self._waiting(error.seq)) is not None:
                future.set_exception(error)
            else:
                log.warning("a reply was not understood: %s", error)
            return
        if (future := self._waiting(seq)) is not None:
            future.set_result((reply, data))  # type: ignore[arg-type]

    def _waiting(self, seq: int | None) -> asyncio.Future[tuple[Reply, bytes]] | None:
        _, future = self._pending.get(-1 if seq is None else seq, (None, None))
        return None if future is None or future.done() else future

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for _, future in self._pending.values():
            future.cancel()
        self._dealer.close()
