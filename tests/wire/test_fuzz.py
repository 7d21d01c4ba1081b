"""Damaged messages by the thousand: only ProtocolError escapes the decoder, and it takes no memory worth speaking of."""

import random
import tracemalloc

import msgpack
import msgspec
import pytest

from tests.support.mutate import in_bytes, inside
from tests.support.torture import scaled, tell
from tests.wire.test_codec import MESSAGES
from wire.codec import decode, encode
from wire.errors import ProtocolError


def damaged(source: random.Random) -> list[bytes]:
    message, bulk = source.choice(MESSAGES)
    header, bulk = encode(source.randrange(2**62), message, bulk)
    match source.randrange(4):
        case 0:
            header = msgpack.packb([7, inside(msgspec.to_builtins(message), source)])
        case 1:
            other, _ = source.choice(MESSAGES)
            spliced = encode(1, other)[0] if source.random() < 0.5 else header
            header = header[:source.randrange(len(header))] + spliced[source.randrange(len(spliced)):]
        case 2:
            bulk = in_bytes(bulk, source)
        case _:
            header = in_bytes(header, source)
    return [header, bulk] if source.random() < 0.95 else source.choice([[header], [header, bulk, b""], [bulk, header]])


@pytest.mark.timeout(3600)
def test_only_protocol_errors_escape_and_memory_is_bounded() -> None:
    count = scaled(5_000, 100_000)
    source, refused = random.Random(20261130), 0
    peaks: list[tuple[int, int]] = []
    for number in range(count):
        frames = damaged(source)
        measured = number % 10 == 0
        if measured:
            tracemalloc.start()
        try:
            decode(frames)
        except ProtocolError:
            refused += 1
        if measured:
            peaks.append((tracemalloc.get_traced_memory()[1], sum(map(len, frames))))
            tracemalloc.stop()
    assert count * 0.5 < refused < count * 0.98  # most are damaged for good, and not all are stopped at the first byte
    assert [(peak, size) for peak, size in peaks if peak > (64 << 10) + 32 * size] == []
    tell(messages_decoded=count, of_them_refused=refused, peaks_of_memory_measured=len(peaks))


@pytest.mark.parametrize("header", [
    b"\x91" * 60_000, b"\x92\x07" + b"\x91" * 60_000, b"\x81\xa1a" * 20_000, b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 60_000,
    b"\x92\x07\xdc\xff\xff" + b"\x90" * 65_535], ids=["deep", "deep inside", "deep maps", "short", "wide"])
def test_shapes_made_to_cost_memory(header: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode([header, b""])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(header)
