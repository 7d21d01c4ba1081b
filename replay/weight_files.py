"""Takes a version's files from the learner when the version is accepted, and serves those of committed versions, chunk by chunk, to actors
that do not see the run directory. To replay they are opaque bytes."""

import shutil

from replay.core import Core
from replay.sessions import Session
from wire.digest import digest
from wire.errors import StoreError
from wire.manifest import FILE, MANIFEST, place_version, staged_path, version_path
from wire.messages import MAX_CHUNK, Chunk, Fetch, Refusal, Reply
from wire.record import VersionNotice

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


def place(core: Core, session: Session, notice: VersionNotice) -> Refusal | None:
    """Put the files that this learner staged where the version's belong, before the version is written to the store. So `weights/vN` is
    what commit N says at every instant: nobody but replay writes there, and not after the commit. Does nothing when they are there already:
    replay may have ended between the renaming and the commit. StoreError when it cannot be done."""
    staged, target = core.run_dir / staged_path(notice.version, session.epoch), core.run_dir / version_path(notice.version)
    try:
        found = next((folder for folder in (staged, target) if folder.is_dir()), None)
        if found is not None and digest((found / MANIFEST).read_bytes()) != notice.manifest_digest:
            return Refusal("again", f"version {notice.version}: the files in {found.name} are not those of the notice")
        if found == staged:
            place_version(core.run_dir, staged, notice.version)
    except FileNotFoundError:
        return Refusal("again", f"version {notice.version}: its files are not complete")
    except OSError as error:
        raise StoreError(f"the files of version {notice.version} cannot be put in their place: {error.strerror}") from None
    _sweep(core, notice.version)
    return None


def _sweep(core: Core, version: int) -> None:
    """Remove what learners left that were killed or replaced before they could commit a version up to this one."""
    for left in (core.run_dir / "weights").glob(".v*"):
        number = left.name[2:].split(".")[0]
        if number.isdecimal() and int(number) <= version:
            shutil.rmtree(left, ignore_errors=True)
