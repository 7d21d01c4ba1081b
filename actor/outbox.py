"""Finished groups on their way to replay: put together, sent one Put at a time, forgotten only when acknowledged."""

import asyncio
import logging
from typing import Protocol

from actor.collect import Outcome
from wire.errors import RunError
from wire.messages import Note, Put, Reply, Request, Stored

log = logging.getLogger(__name__)
MAX_PUT_BYTES = 8 << 20
"""Payload after which a Put takes no further group."""


class Client(Protocol):
    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        """The reply; the request is repeated until there is one. Raises the error that a Refusal stands for."""


class Outbox:
    def __init__(self, client: Client, epoch: int, max_quarantined: int) -> None:
        self._client, self._epoch, self._max_quarantined = client, epoch, max_quarantined
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._notes: asyncio.Queue[Note] = asyncio.Queue()
        self._quarantined_in_a_row = 0

    def add(self, outcome: Outcome) -> None:
        self._outcomes.put_nowait(outcome)

    def note(self, kind: str, detail: str) -> None:
        log.warning("%s: %s", kind, detail)
        self._notes.put_nowait(Note(self._epoch, kind, detail))

    async def send_notes(self) -> None:
        while True:
            await self._client.call(await self._notes.get())

    async def send_next(self) -> Outcome:
        """Wait for finished groups, put what has gathered, and return it once it is durable. Raises RunError when the engine makes nothing
        but poison."""
        batch, size = Outcome(), 0
        while not batch.orders or (size < MAX_PUT_BYTES and not self._outcomes.empty()):
            outcome = await self._outcomes.get()
            batch.extend(outcome)
            size += sum(map(len, outcome.payloads))
        reply, _ = await self._client.call(Put(self._epoch, batch.heads, batch.digests, batch.failures), b"".join(batch.payloads))
        assert isinstance(reply, Stored)
        self._watch_quarantine(batch, reply)
        return batch

    def _watch_quarantine(self, batch: Outcome, stored: Stored) -> None:
        reasons = dict(stored.quarantined)
        for rollout, reason in stored.quarantined + stored.refused:
            log.warning("rollout %s was not stored: %s", rollout, reason)
        for head in batch.heads:
            self._quarantined_in_a_row = self._quarantined_in_a_row + 1 if head.rollout_id in reasons else 0
            if self._quarantined_in_a_row >= self._max_quarantined:
                raise RunError(f"{self._quarantined_in_a_row} rollouts in a row from this engine were quarantined, the last because "
                               f"{reasons[head.rollout_id]}: look at the engine")
