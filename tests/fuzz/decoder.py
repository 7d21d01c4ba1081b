"""Two frames into `wire/codec.py`: ProtocolError, or a message that says the same when it is encoded again."""

import random

from tests.fuzz.parts import Mutate, mutate_message, pack, unpack
from tests.wire.test_codec import MESSAGES, REFUSED
from wire.codec import decode, encode, join, split
from wire.errors import ProtocolError


def seeds() -> list[bytes]:
    refused = [frames for frames in REFUSED.values() if len(frames) == 2 and sum(map(len, frames)) < 4000]
    return [pack(frames) for frames in [*(encode(7, message, bulk) for message, bulk in MESSAGES), *refused]]


SEEDS = seeds()


def mutate(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    if source.random() < 0.3:
        data = source.choice(SEEDS)  # a message whose type the engine has lost sight of: it is read by msgspec, where it cannot look
    return pack(mutate_message(*unpack(data, 2), source, engine))


def check(data: bytes) -> None:
    parts = unpack(data)
    try:
        decode(split(memoryview(data)))
    except ProtocolError:
        pass
    try:
        seq, message, bulk = decode(parts)
    except ProtocolError:
        return
    frames = encode(seq, message, bulk)
    assert encode(*decode(frames)) == frames
    assert split(memoryview(join(frames))) == frames
