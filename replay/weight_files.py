"""Serves the files of committed versions, chunk by chunk, to actors that do not see the run directory. To replay they are opaque bytes."""

from replay.core import Core
from replay.sessions import Session
from wire.digest import digest
from wire.manifest import FILE, MANIFEST, version_path
from wire.messages import MAX_CHUNK, Chunk, Fetch, Refusal, Reply

FILES = (FILE, MANIFEST)


def fetch(core: Core, session: Session, request: Fetch) -> Reply | tuple[Reply, bytes]:
    """The path is made here, from a number and a name of this list: nothing else can be asked for."""
    if request.file not in FILES or request.offset < 0 or not 0 < request.count <= MAX_CHUNK:
        return Refusal("protocol", f"a chunk is 1 to {MAX_CHUNK} bytes of {' or '.join(FILES)}")
    if request.version not in core.versions:
        return Refusal("again", f"version {request.version} was never committed, or is no longer kept")
    try:
        with (core.run_dir / version_path(request.version) / request.file).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(min(request.offset, size))
            data = file.read(request.count)
    except OSError as error:
        return Refusal("again", f"version {request.version}: {request.file} cannot be read: {error.strerror}")
    return Chunk(size, len(data), digest(data)), data
