"""Asks replay how the run stands, without ever waiting for the answer: a supervisor must not hang because replay does."""

import logging
import time
from typing import Any

from wire import codec
from wire.errors import ProtocolError
from wire.keys import ClientKeys
from wire.messages import Stats, StatsReply
from wire.sockets import Dealer

log = logging.getLogger(__name__)
ASK_EVERY_S = 0.5
FORGET_S = 3.0
"""A question that got no answer for this long is asked again."""


class Feed:
    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._dealer = Dealer(endpoint, keys)
        self._seq = 0
        self._asked_at = float("-inf")
        self.waiting = False

    def poll(self) -> dict[str, Any] | None:
        """The newest answer that has arrived since the last call, None when there is none. Asks again when it is time."""
        newest = None
        if self._dealer.dropped():  # what was asked may not have been read
            self.waiting = False
        while frames := self._dealer.receive():
            try:
                seq, reply, _ = codec.decode(frames)
            except ProtocolError as error:
                log.warning("an answer that is not replay's: %s", error)
                continue
            if isinstance(reply, StatsReply):
                newest, self.waiting = reply.values, self.waiting and seq != self._seq
        since = time.monotonic() - self._asked_at
        if since >= (FORGET_S if self.waiting else ASK_EVERY_S):
            self._seq += 1
            self.waiting = self._dealer.send(codec.encode(self._seq, Stats()))
            self._asked_at = time.monotonic()
        return newest

    def close(self) -> None:
        self._dealer.close()
