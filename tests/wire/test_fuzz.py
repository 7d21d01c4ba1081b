"""Damaged messages by the thousand: only ProtocolError escapes the decoder, and it takes no memory worth speaking of."""

import random
import tracemalloc

import msgpack
import msgspec
import pytest

from tests.support.mutate import in_bytes, inside
from tests.support.torture import scaled, tell
from tests.wire.test_codec import MESSAGES
from wire.codec import REQUEST, decode, encode
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


HELLO = b"\x92\x07\x82\xa4type\xa5hello\xa6shared\x81\xa1a"
"""Begins a message with a part that may hold anything."""
MIB = 1 << 20


@pytest.mark.parametrize(("header", "most"), [
    (b"\x91" * 60_000, MIB), (b"\x92\x07" + b"\x91" * 60_000, MIB), (b"\x81\xa1a" * 20_000, MIB),
    (b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 60_000, MIB), (b"\x92\x07\xdc\xff\xff" + b"\x90" * 65_535, MIB),
    (HELLO + b"\xdc\xff\xff" * 1000 + b"\xc0" * 70_000, MIB), (HELLO + b"\xdc\xff\xff" * 13 + b"\xc0" * 70_000, 3 * MIB),
    (HELLO + b"\xdd\x00\x80\x00\x00" + b"\x90" * (8 * MIB), MIB), (HELLO + b"\xdd\x00\x80\x00\x00" + b"\x80" * (8 * MIB), MIB),
    (HELLO + b"\xdd\x00\x40\x00\x00" + b"\x81\xa0\x00" * (4 * MIB), MIB),
    (HELLO + b"\xdc\xff\xff" + b"\x93\x90\x90\x90" * 65_535, 40 * MIB),
    (HELLO + b"\xdd\x00\x0f\xff\x00" + b"\x90" * 0xfff00, 80 * MIB),
    (HELLO + b"\xdd\x00\x05\x00\x00" + b"\x81\xa0\x00" * 0x50000, 80 * MIB),
    (HELLO + b"\xdd\x00\x40\x00\x00" + b"\xa1a" * (4 * MIB), MIB), (HELLO + b"\xdb\x00\xf0\x00\x00" + b"a" * (15 * MIB), 48 * MIB),
    (HELLO + b"\xd9\x01a" * (4 * MIB), MIB), (b"\xc0" * (16 * MIB + 1), MIB)],
    ids=["deep", "deep inside", "deep maps", "short", "wide", "1,000 announcements", "13 announcements", "empty lists", "empty maps",
         "maps of one", "threes", "just enough lists", "just enough maps", "short texts", "one long text", "no list", "one byte too long"])
def test_shapes_made_to_cost_memory(header: bytes, most: int) -> None:
    """`most`: bytes while a request is read, whatever its header says. 8 MiB of empty lists once took 694 MiB."""
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode([header, b""], REQUEST)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most
