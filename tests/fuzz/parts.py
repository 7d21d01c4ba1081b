"""An input of a fuzz target: a list of byte strings, each after its length (4 bytes, little-endian). And how messages in it are mutated."""

import os
import random
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from tests.support.mutate import in_bytes, in_floats, inside
from tests.support.torture import IN_MEMORY, ROOM
from wire.digest import digest

LENGTH = 4
Mutate = Callable[[bytes], bytes]
"""The engine's own mutation, which knows what comparisons were made."""

_folders: list[tempfile.TemporaryDirectory[str]] = []


def folder() -> Path:
    """An empty one, for as long as this process lives; under the engine, which ends without a word to Python, as long as its parent."""
    _folders.append(tempfile.TemporaryDirectory(dir=os.environ.get(ROOM, IN_MEMORY), prefix="leeway-"))
    return Path(_folders[-1].name)


def pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(LENGTH, "little") + part for part in parts)


def unpack(data: bytes, count: int | None = None) -> list[bytes]:
    """Whatever `data` is: what is announced and is not there is left out. With `count`: so many, empty ones where there are fewer."""
    parts, start = [], 0
    while start < len(data):
        size = int.from_bytes(data[start:start + LENGTH], "little")
        parts.append(data[start + LENGTH:start + LENGTH + size])
        start += LENGTH + size
    return parts if count is None else (parts + [b""] * count)[:count]


def mutate_part(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    """One of the parts."""
    parts = unpack(data) or [b""]
    at = source.randrange(len(parts))
    parts[at] = engine(parts[at]) if source.random() < 0.5 else in_bytes(parts[at], source)
    return pack(parts)


def mutate_messages(data: bytes, source: random.Random, engine: Mutate, known: Sequence[list[bytes]] = ()) -> bytes:
    """Of a list header, bulk, header, bulk...: one message changed, or one doubled, lost, moved, or put in from those `known`."""
    parts = unpack(data)
    messages = [unpack(pack(parts[at:at + 2]), 2) for at in range(0, len(parts), 2)] or [[b"", b""]]
    at = source.randrange(len(messages))
    match source.randrange(8):
        case 0 if known:
            messages.insert(source.randrange(len(messages) + 1), source.choice(known))
        case 1:
            messages.insert(source.randrange(len(messages) + 1), messages[at])
        case 2 if len(messages) > 1:
            del messages[at]
        case 3 if len(messages) > 1:
            messages.insert(source.randrange(len(messages)), messages.pop(at))
        case _:
            messages[at] = mutate_message(*messages[at], source, engine)
    return pack([part for message in messages for part in message])


def mutate_message(header: bytes, bulk: bytes, source: random.Random, engine: Mutate) -> list[bytes]:
    """Values inside it, mostly, so that typed decoding lets many through; then the digests of a Put are mostly made to fit."""
    if bulk and source.random() < 0.3:
        bulk = source.choice([in_floats, in_bytes, lambda data, _: engine(data)])(bulk, source)
    try:
        tree = msgpack.unpackb(header)
    except Exception:  # noqa: BLE001 - it is no message any more
        return [in_bytes(header, source), bulk]
    match source.randrange(8):
        case 0:
            return [engine(header), bulk]
        case 1 | 2 | 3:
            tree = inside(tree, source)
        case 4 | 5 | 6:
            tree = in_leaf(tree, source, engine)
    if source.random() < 0.7:
        fit_digests(tree, bulk)
    try:
        return [msgpack.packb(tree), bulk]
    except (ValueError, OverflowError, TypeError, UnicodeEncodeError):
        return [in_bytes(header, source), bulk]


def in_leaf(tree: Any, source: random.Random, engine: Mutate) -> Any:
    """One number or text in it as the engine would have it: so that it can put in what that was compared with."""
    match tree:
        case dict() if tree:
            key = source.choice(sorted(tree, key=str))
            return {**tree, key: in_leaf(tree[key], source, engine)}
        case list() if tree:
            at = source.randrange(len(tree))
            return [*tree[:at], in_leaf(tree[at], source, engine), *tree[at + 1:]]
        case str():
            return engine(tree.encode()).decode(errors="replace")
        case int() if -2**63 <= tree < 2**63:
            return int.from_bytes(engine(tree.to_bytes(8, "little", signed=True))[:8], "little", signed=True)
        case float():
            return struct.unpack("<d", (engine(struct.pack("<d", tree)) + bytes(8))[:8])[0]
    return tree


def fit_digests(tree: Any, bulk: bytes) -> None:
    """Of a Put whose rollouts are all of one length."""
    try:
        digests = tree[1]["digests"]
        size = len(bulk) // len(digests)
        tree[1]["digests"] = [digest(bulk[at * size:(at + 1) * size]) for at in range(len(digests))]
    except (TypeError, KeyError, IndexError, ZeroDivisionError):
        pass
