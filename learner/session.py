"""The learner's conversation with replay: rank 0 asks, every rank hears the same reply or the same error.

So all ranks run the same steps on the same data, and collectives always meet. Other ranks pass no request. (`docs/decisions/0002`)
"""

import logging
from typing import Any, Protocol

from learner.ranks import Ranks
from learner.stop import Stop
from wire import errors
from wire.codec import decode, encode
from wire.errors import LeewayError
from wire.messages import PROTOCOL, AnyMessage, Hello, Refusal, Reply, Request, Welcome

log = logging.getLogger(__name__)

FAREWELL_S = 3.0


class Client(Protocol):
    """What we need of `replay.client.BlockingClient`. Raises the error that a Refusal names, TimeoutError without a reply."""

    def call(self, request: Request, bulk: bytes = b"", *, timeout_s: float | None = None) -> tuple[Reply, bytes]: ...

    def close(self) -> None: ...


class Session:
    def __init__(self, ranks: Ranks, client: Client | None, stop: Stop) -> None:
        """`client` is None on every rank but the first."""
        self.ranks, self.client, self.stop = ranks, client, stop
        self.epoch = -1

    def hello(self, shared: dict[str, Any]) -> Welcome:
        """Join the run. RefusedError when this process was started with another config."""
        reply, _ = self.call(Hello("learner", "learner", PROTOCOL, shared))
        assert isinstance(reply, Welcome)
        self.epoch = reply.epoch
        return reply

    def call(self, request: Request | None, bulk: bytes = b"") -> tuple[Reply, bytes]:
        """Rank 0's reply, on every rank. An error of rank 0 is raised on every rank, too."""
        if self.ranks.world == 1:
            return self._ask(request, bulk)
        if not self.ranks.is_first:
            return self._hear()
        try:
            reply, data = self._ask(request, bulk)
        except LeewayError as error:
            self._tell(Refusal(type(error).__name__, str(error)), b"")
            raise
        self._tell(reply, data)
        return reply, data

    def farewell(self, request: Request) -> None:
        """The last word, from rank 0. Replay may end as soon as it has heard it, so a missing reply is no error."""
        if self.client is None:
            return
        try:
            self.client.call(request, timeout_s=FAREWELL_S)
        except TimeoutError as error:
            log.warning("replay ended before it answered our last message: %s", error)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    def _ask(self, request: Request | None, bulk: bytes) -> tuple[Reply, bytes]:
        assert self.client is not None
        assert request is not None
        with self.stop.waiting():
            return self.client.call(request, bulk)

    def _tell(self, message: AnyMessage, bulk: bytes) -> None:
        for frame in encode(0, message, bulk):
            self.ranks.broadcast(frame)

    def _hear(self) -> tuple[Reply, bytes]:
        _, message, bulk = decode([self.ranks.broadcast(None), self.ranks.broadcast(None)])
        if isinstance(message, Refusal):
            raise getattr(errors, message.kind)(message.reason)
        return message, bulk  # type: ignore[return-value]
