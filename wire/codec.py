"""The one place that encodes and decodes messages: a msgpack header `[seq, message]` and a bulk frame.

Decoding trusts nothing: msgpack with every limit set, a depth check, strict typed conversion, then the bulk frame's length against what
the header announces. Only ProtocolError escapes.
"""

from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]
import msgspec

from wire.errors import ProtocolError
from wire.messages import AnyMessage, Chunk, Commit, Leased, Put, PutAnchors, Recalled, Rows
from wire.record import payload_size

MAX_HEADER = 64 << 20
MAX_BULK = 1 << 30
MAX_DEPTH = 16
MAX_INT = (1 << 63) - 1
MAX_ITEMS = 1 << 20
ITEM_SIZES = {"f4": 4, "u1": 1}


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seq: int
    message: AnyMessage


_encoder = msgspec.msgpack.Encoder()


def encode(seq: int, message: AnyMessage, bulk: bytes = b"") -> list[bytes]:
    """Two frames. Raises ProtocolError when the message is larger than any peer would accept."""
    header = _encoder.encode(Envelope(seq, message))
    if len(header) > MAX_HEADER or len(bulk) > MAX_BULK:
        raise ProtocolError(f"{type(message).__name__} is too large to send: {len(header)} + {len(bulk)} bytes", seq=seq)
    return [header, bulk]


def decode(frames: list[bytes]) -> tuple[int, AnyMessage, bytes]:
    """(seq, message, bulk). Raises ProtocolError, with the sequence number where that could be read."""
    if len(frames) != 2:
        raise ProtocolError(f"a message is two frames, not {len(frames)}")
    header, bulk = frames
    if len(header) > MAX_HEADER or len(bulk) > MAX_BULK:
        raise ProtocolError(f"message too large: {len(header)} + {len(bulk)} bytes")
    tree = _unpack(header)
    seq = tree[0] if isinstance(tree, list) and tree and type(tree[0]) is int else None
    try:
        envelope = msgspec.convert(tree, type=Envelope, strict=True)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}", seq=seq) from None
    expected = bulk_size(envelope.message)
    if expected is not None and expected != len(bulk):
        raise ProtocolError(f"{type(envelope.message).__name__}: {len(bulk)} bulk bytes, its header announces {expected}", seq=seq)
    return envelope.seq, envelope.message, bulk


def join(frames: list[bytes]) -> bytes:
    """A reply's two frames as one: the header's length (4 bytes, little-endian), header, bulk. Why: `wire/sockets.py`, Dealer."""
    header, bulk = frames
    return b"".join((len(header).to_bytes(4, "little"), header, bulk))


def split(joined: memoryview) -> list[bytes]:
    """The two frames again; what is no such thing stays one frame, which `decode` refuses."""
    end = 4 + int.from_bytes(joined[:4], "little")
    return [bytes(joined[4:end]), bytes(joined[end:])] if 4 <= end <= len(joined) else [bytes(joined)]


def bulk_size(message: AnyMessage) -> int | None:
    """Bytes that the header announces. None for Put: rollouts that do not fit are quarantined with their evidence, not refused unseen."""
    match message:
        case Put():
            return None
        case Chunk(count=count):
            return count
        case Rows(heads=heads):
            return sum(payload_size(head) for head in heads)
        case PutAnchors(heads=spans):
            return 4 * sum(span.count for span in spans)
        case Leased(heads=heads, anchors=spans) | Recalled(heads=heads, anchors=spans):
            return sum(payload_size(head) for head in heads) + 4 * sum(span.count for span in spans)
        case Commit(record=record):
            return sum(record.response_lens) * sum(ITEM_SIZES.get(dtype, 0) for _, dtype in record.columns)
        case _:
            return 0


def _unpack(header: bytes) -> Any:
    most = min(MAX_ITEMS, len(header))  # room is made for as many as are announced, and each takes a byte at least
    try:
        tree = msgpack.unpackb(header, raw=False, use_list=True, strict_map_key=True, ext_hook=_no_extensions, max_ext_len=0,
                               max_str_len=MAX_HEADER, max_bin_len=MAX_HEADER, max_array_len=most, max_map_len=most)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"header is not msgpack: {error or type(error).__name__}") from None
    level = [tree]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is list:
                deeper += node
            elif kind is dict:
                deeper += node.values()
            elif kind is int and node > MAX_INT:  # the store cannot hold it
                raise ProtocolError(f"a number above {MAX_INT}")
        if not deeper:
            return tree
        level = deeper
    raise ProtocolError(f"header is nested deeper than {MAX_DEPTH}")


def _no_extensions(code: int, data: bytes) -> NoReturn:
    raise ValueError("msgpack extensions are not used")
