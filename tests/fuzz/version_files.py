"""A version's manifest and weights file (`wire/manifest.py`), as an actor, the learner and the audit read them: WeightsError, or sound."""

import random

import msgspec
import numpy as np
from safetensors.numpy import save

from tests.fuzz.parts import Mutate, folder, mutate_part, pack, unpack
from wire.digest import digest
from wire.errors import WeightsError
from wire.manifest import FILE, MANIFEST, Manifest, Probe, check_file, read_entries, read_manifest, weights_digest
from wire.record import VersionNotice

FOLDER = folder()


class Claims(msgspec.Struct):
    """What a hostile notice would repeat of the manifest."""

    version: int = 3
    weights_digest: str = ""


def seeds() -> list[bytes]:
    found = []
    for tensors in ({"w": np.zeros((4, 3), np.float32), "b": np.arange(4, dtype=np.float16)}, {"one": np.ones(1, np.int8)}, {}):
        (FOLDER / FILE).write_bytes(weights := save(tensors, metadata={"format": "pt"}))
        entries = read_entries(FOLDER / FILE)
        manifest = Manifest(3, 2, "full", entries, weights_digest(entries), Probe([1, 2, 3], [-1.0, -2.0]))
        found.append(pack([msgspec.json.format(msgspec.json.encode(manifest)), weights]))
    return found


def mutate(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    return mutate_part(data, source, engine)


def check(data: bytes) -> None:
    manifest, weights = unpack(data, 2)
    (FOLDER / MANIFEST).write_bytes(manifest)
    (FOLDER / FILE).write_bytes(weights)
    try:
        entries = read_entries(FOLDER / FILE)
        assert len(weights_digest(entries)) == 64
    except WeightsError:
        pass
    try:
        claims = msgspec.json.decode(manifest, type=Claims)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        claims = Claims()
    try:
        found = read_manifest(FOLDER, VersionNotice(claims.version, "weights/v000003", digest(manifest), claims.weights_digest))
        check_file(FOLDER / FILE, found)
    except WeightsError:
        pass
