"""Finished groups on their way to replay: written to disk, sent one Put at a time, forgotten only when acknowledged.

    add  ->  write: flushed to the outbox's file  ->  send_next: Put  ->  acknowledged  ->  removed from the file
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from actor.collect import Outcome
from actor.outbox_file import OutboxFile, size_of
from wire.errors import ConfigError, RunError
from wire.messages import Note, Put, Reply, Request, Stored
from wire.record import group_id

log = logging.getLogger(__name__)
MAX_PUT_BYTES, MAX_PUT_SAMPLES = 8 << 20, 1024
"""Payload, and rollouts and failures, after which a Put takes no further group: a header has its limits too."""
LOCK_S, LOCK_RETRY_S = 15.0, 0.25
"""How long an actor waits for the one before it, of the same name, to let go of the outbox."""


class Client(Protocol):
    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]:
        """The reply; the request is repeated until there is one. Raises the error that a Refusal stands for."""


class Outbox:
    """`max_bytes`: payload at which it is full; what is in the engine then still finds room."""

    def __init__(self, client: Client, epoch: int, max_quarantined: int, file: OutboxFile, max_bytes: int,
                 crash_point: Callable[[str], None] = lambda name: None) -> None:
        self._client, self._epoch, self._max_quarantined, self._file, self._max_bytes = client, epoch, max_quarantined, file, max_bytes
        self._crash_point = crash_point
        self._new: asyncio.Queue[Outcome] = asyncio.Queue()
        self._ready: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        self._notes: asyncio.Queue[Note] = asyncio.Queue()
        self._on_disk: set[str] = set()
        self._quarantined_in_a_row = 0
        self.bytes = 0
        for entry, outcome in file.found.items():
            self.bytes += size_of(outcome)
            self._take(entry, outcome)
        if file.found:
            log.info("%d groups from before are in the outbox %s and will be sent again", len(file.found), file.path)
        if file.damage:
            self.note("outbox_damaged", f"{file.path}: {file.damage}; {len(file.found)} groups are sound, replay grants the others again")

    @property
    def full(self) -> bool:
        return self.bytes >= self._max_bytes

    @property
    def on_disk(self) -> set[str]:
        """Ids of the groups that a next life of this actor would find."""
        return set(self._on_disk)

    def add(self, outcome: Outcome) -> None:
        self.bytes += size_of(outcome)
        self._new.put_nowait(outcome)

    def note(self, kind: str, detail: str) -> None:
        log.warning("%s: %s", kind, detail)
        self._notes.put_nowait(Note(self._epoch, kind, detail))

    async def send_notes(self) -> None:
        while True:
            await self._client.call(await self._notes.get())

    async def write(self) -> None:
        """What has gathered is one transaction. Raises StoreError: then nothing more can be promised."""
        while True:
            outcomes = [await self._new.get()]
            while not self._new.empty():
                outcomes.append(self._new.get_nowait())
            self._crash_point("before_write")
            entries = await asyncio.to_thread(self._file.write, outcomes)
            self._crash_point("after_write")
            for entry, outcome in zip(entries, outcomes, strict=True):
                self._take(entry, outcome)

    def _take(self, entry: int, outcome: Outcome) -> None:
        self._on_disk.update(map(group_id, outcome.orders))
        self._ready.put_nowait((entry, outcome))

    async def send_next(self) -> Outcome:
        """Wait for written groups, put what has gathered, and return it once it is durable at replay. Raises RunError when the engine makes
        nothing but poison."""
        batch, entries, size = Outcome(), [], 0
        while not batch.orders or not (size >= MAX_PUT_BYTES or len(batch.heads) + len(batch.failures) >= MAX_PUT_SAMPLES
                                       or self._ready.empty()):
            entry, outcome = await self._ready.get()
            entries.append(entry)
            batch.extend(outcome)
            size += size_of(outcome)
        reply, _ = await self._client.call(Put(self._epoch, batch.heads, batch.digests, batch.failures), b"".join(batch.payloads))
        assert isinstance(reply, Stored)
        self._crash_point("after_ack")
        await asyncio.to_thread(self._file.remove, entries)
        self._crash_point("after_remove")
        self._on_disk.difference_update(map(group_id, batch.orders))
        self.bytes -= size
        self._watch_quarantine(batch, reply)
        return batch

    def close(self, *, discard: bool = False) -> None:
        self._file.close(discard=discard)

    def _watch_quarantine(self, batch: Outcome, stored: Stored) -> None:
        reasons = dict(stored.quarantined)
        for rollout, reason in stored.quarantined + stored.refused:
            log.warning("rollout %s was not stored: %s", rollout, reason)
        for head in batch.heads:
            self._quarantined_in_a_row = self._quarantined_in_a_row + 1 if head.rollout_id in reasons else 0
            if self._quarantined_in_a_row >= self._max_quarantined:
                raise RunError(f"{self._quarantined_in_a_row} rollouts in a row from this engine were quarantined, the last because "
                               f"{reasons[head.rollout_id]}: look at the engine")


def outbox_folder(setting: str | None, run_dir: Path) -> Path:
    """Of the config; else in the run's folder; on a host that does not have that, a folder of the run's name where the actor runs."""
    if setting is not None:
        return Path(setting)
    return run_dir / "outbox" if run_dir.is_dir() else Path("outbox") / run_dir.name


async def open_file(folder: Path, name: str, run_id: str) -> OutboxFile:
    """Waits for an actor of the same name that is about to end: replay has just refused it. Raises ConfigError when it does not."""
    for _ in range(round(LOCK_S / LOCK_RETRY_S)):
        try:
            return OutboxFile(folder, name, run_id)
        except ConfigError:
            await asyncio.sleep(LOCK_RETRY_S)
    return OutboxFile(folder, name, run_id)
