"""A version's files: `<run>/weights/v000123/{model.safetensors, manifest.json}`. Raw bytes only; nothing here computes with weights.

The manifest holds the version, its parent, the dtype, shape and digest of each tensor, a digest of them all, and the probe: token ids and
the learner's log-probs of them. `weights_digest` depends on names, shapes, dtypes and bytes only, not on how the file lays them out.
"""

import os
import shutil
import struct
from pathlib import Path
from typing import Literal

import msgspec

from wire.digest import digest
from wire.errors import WeightsError
from wire.record import VersionNotice

FILE, MANIFEST = "model.safetensors", "manifest.json"
MAX_HEADER = 64 << 20
UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What decoding JSON that somebody else wrote may raise."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    digest: str


class Place(msgspec.Struct, frozen=True):
    """What a safetensors header says of a tensor; offsets are in bytes, from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`logprobs[i]` is the learner's log-prob of `token_ids[i + 1]` given the tokens before it, at temperature 1."""

    token_ids: list[int]
    logprobs: list[float]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    parent: int | None
    kind: Literal["full"]
    tensors: dict[str, TensorEntry]
    weights_digest: str
    probe: Probe


def version_path(version: int) -> str:
    """Relative to the run directory."""
    return f"weights/v{version:06d}"


def staged_path(version: int, epoch: int) -> str:
    """Where the learner of this epoch writes a version, relative to the run directory. Nobody else writes there, and only replay renames it
    to `version_path`, as it accepts the version: so a learner that was replaced cannot touch a version that is committed."""
    return f"weights/.v{version:06d}.e{epoch}"


def weights_digest(tensors: dict[str, TensorEntry]) -> str:
    """One digest of names, dtypes, shapes and bytes. Raises nothing: entries are already digested."""
    lines = [f"{name} {t.dtype} {t.shape} {t.digest}" for name, t in sorted(tensors.items())]
    return digest("\n".join(lines).encode())


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Digest every tensor of a safetensors file. Raises WeightsError when it is cut short or not safetensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise WeightsError(f"{file.name}: truncated or not a safetensors file")
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            places = {name: msgspec.json.decode(place, type=Place) for name, place in header.items() if name != "__metadata__"}
        except UNREADABLE as error:
            raise WeightsError(f"{file.name}: its header is not safetensors: {error}") from None
        entries = {}
        for name, place in places.items():
            start, end = place.data_offsets
            if not 0 <= start <= end <= size - 8 - length:
                raise WeightsError(f"{file.name}: truncated: tensor {name} ends beyond the file")
            stream.seek(8 + length + start)
            entries[name] = TensorEntry(place.dtype, place.shape, digest(stream.read(end - start)))
    return entries


def write_version(run_dir: Path, staged: Path, version: int, parent: int | None, probe: Probe) -> VersionNotice:
    """`seal_version` and `place_version` in one: for who has the run directory to himself."""
    notice = seal_version(staged, version, parent, probe)
    place_version(run_dir, staged, version)
    return notice


def seal_version(staged: Path, version: int, parent: int | None, probe: Probe) -> VersionNotice:
    """Make `staged` (a folder with model.safetensors) whole: digests, manifest, fsync."""
    file = staged / FILE
    entries = read_entries(file)
    manifest = Manifest(version, parent, "full", entries, weights_digest(entries), probe)
    body = msgspec.json.format(msgspec.json.encode(manifest))
    (staged / MANIFEST).write_bytes(body)
    for path in (file, staged / MANIFEST, staged):
        fsync(path)
    return VersionNotice(version, version_path(version), digest(body), manifest.weights_digest)


def place_version(run_dir: Path, staged: Path, version: int) -> None:
    """Rename a sealed folder to the version's. A leftover of the same number is garbage (no commit row names it) and is replaced."""
    target = run_dir / version_path(version)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    fsync(target.parent)


def read_manifest(folder: Path, notice: VersionNotice) -> Manifest:
    """The manifest in `folder`, if it is the one that `notice` names. Raises WeightsError."""
    try:
        body = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise WeightsError(f"version {notice.version}: manifest not readable: {error.strerror}") from None
    if digest(body) != notice.manifest_digest:
        raise WeightsError(f"version {notice.version}: the manifest's digest is not the one committed")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except UNREADABLE as error:
        raise WeightsError(f"version {notice.version}: manifest not understood: {error}") from None
    if (manifest.version, manifest.weights_digest) != (notice.version, notice.weights_digest):
        raise WeightsError(f"version {notice.version}: the manifest speaks of version {manifest.version} or of other weights")
    return manifest


def check_file(file: Path, manifest: Manifest) -> None:
    """Every tensor of `file` is what the manifest says: names, dtypes, shapes, bytes. Raises WeightsError naming the first difference."""
    entries = read_entries(file)
    if missing := sorted(manifest.tensors.keys() ^ entries.keys()):
        raise WeightsError(f"version {manifest.version}: tensor {missing[0]} is in only one of file and manifest")
    for name, entry in manifest.tensors.items():
        found = entries[name]
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise WeightsError(f"version {manifest.version}: {name} is {found.dtype}{found.shape}, the manifest says "
                               f"{entry.dtype}{entry.shape}")
        if found.digest != entry.digest:
            raise WeightsError(f"version {manifest.version}: the digest of {name} does not match")
    if weights_digest(entries) != manifest.weights_digest:
        raise WeightsError(f"version {manifest.version}: the whole digest does not match")


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
