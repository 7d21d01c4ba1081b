"""Asks replay how the run stands, without ever waiting for the answer: a supervisor must not hang because replay does."""

import time
from typing import Any

from wire import codec
from wire.messages import Stats, StatsReply
from wire.sockets import Dealer

ASK_EVERY_S = 0.5
FORGET_S = 3.0
"""A question that got no answer for this long is asked again."""


class Feed:
    def __init__(self, endpoint: str) -> None:
        self._dealer = Dealer(endpoint)
        self._seq = 0
        self._asked_at = float("-inf")
        self._answered = True

    def poll(self) -> dict[str, Any] | None:
        """The newest answer that has arrived since the last call, None when there is none. Asks again when it is time."""
        newest = None
        while frames := self._dealer.receive():
            seq, reply, _ = codec.decode(frames)
            if isinstance(reply, StatsReply):
                newest, self._answered = reply.values, self._answered or seq == self._seq
        since = time.monotonic() - self._asked_at
        if since >= (ASK_EVERY_S if self._answered else FORGET_S):
            self._seq += 1
            self._answered = not self._dealer.send(codec.encode(self._seq, Stats()))
            self._asked_at = time.monotonic()
        return newest

    def close(self) -> None:
        self._dealer.close()
