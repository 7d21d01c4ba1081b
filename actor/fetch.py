"""Gets a version's files from replay, in chunks: for an actor that does not see the run directory.

What has arrived stays in a folder of the actor's own until it is taken, so that after a failure only the rest is asked for. A chunk is
checked by its own digest as it comes, the files by their manifest and its notice as everywhere (`actor/weights.py`).
"""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Protocol

from wire.digest import digest
from wire.errors import ProtocolError, TryAgainError, WeightsError
from wire.manifest import FILE, MANIFEST, read_manifest
from wire.messages import MAX_CHUNK, Chunk, Fetch, Reply, Request
from wire.record import VersionNotice

log = logging.getLogger(__name__)
AHEAD = 4
"""Chunks asked for at once."""
TRIES = 3
"""How often a chunk that does not match its digest is asked for again."""
MAX_MANIFEST = 64 << 20


class Client(Protocol):
    async def call(self, request: Request, bulk: bytes = b"") -> tuple[Reply, bytes]: ...


def _folder_for(version: int, into: Path) -> Path:
    folder = into / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    for other in into.iterdir():
        if other != folder:
            shutil.rmtree(other)
    return folder


class Fetcher:
    """`always`: also where the run directory is visible."""

    def __init__(self, client: Client, epoch: int, always: bool, chunk: int = MAX_CHUNK) -> None:
        self.always = always
        self._client, self._epoch, self._chunk = client, epoch, chunk

    async def fetch(self, notice: VersionNotice, into: Path, limit: int) -> None:
        """Both files of the version, in `into/<version>`; what `into` holds of other versions is removed. `limit`: bytes of the larger one.
        Raises WeightsError; RefusedError from replay."""
        try:
            folder = _folder_for(notice.version, into)
            await self._file(notice.version, MANIFEST, folder, MAX_MANIFEST)
            try:
                read_manifest(folder, notice)  # a wrong one is not worth the rest
            except WeightsError:
                shutil.rmtree(folder)
                raise
            await self._file(notice.version, FILE, folder, limit)
        except OSError as error:
            raise WeightsError(f"version {notice.version}: what was fetched cannot be kept: {error.strerror}") from None

    async def _file(self, version: int, name: str, folder: Path, limit: int) -> None:
        part = folder / f"{name}.part"
        if (folder / name).exists():
            return
        with part.open("ab") as out:
            if start := out.tell():
                log.info("version %d: %s goes on at byte %d", version, name, start)
            size, data = await self._checked(version, name, start)
            if not start <= size <= limit:
                part.unlink()
                raise WeightsError(f"version {version}: {name} has {size} bytes; {start} to {limit} were expected")
            out.write(data)
            while out.tell() < size:
                offsets = range(out.tell(), size, self._chunk)[:AHEAD]
                for again, data in await asyncio.gather(*(self._checked(version, name, offset) for offset in offsets)):
                    if again != size:
                        part.unlink()
                        raise WeightsError(f"version {version}: {name} changed while it was fetched")
                    out.write(data)
        part.rename(folder / name)

    async def _checked(self, version: int, name: str, offset: int) -> tuple[int, bytes]:
        """Size of the whole file, and one chunk of it."""
        for _ in range(TRIES):
            try:
                reply, data = await self._client.call(Fetch(self._epoch, version, name, offset, self._chunk))
            except (TryAgainError, ProtocolError) as error:
                raise WeightsError(f"version {version}: {name} cannot be fetched: {error}") from None
            assert isinstance(reply, Chunk)
            if len(data) == max(0, min(self._chunk, reply.size - offset)) and digest(data) == reply.digest:
                return reply.size, data
            log.warning("version %d: a chunk of %s at byte %d is not what its digest says: asked for again", version, name, offset)
        raise WeightsError(f"version {version}: {name}: the chunk at byte {offset} does not match its digest, {TRIES} times")
