"""The one place that encodes and decodes messages: a msgpack header `[seq, message]` and a bulk frame.

Decoding trusts nothing. A header is limited in bytes and in items before anything is built of it; it is decoded straight into the typed
structs, so that what does not fit ends it at once; the few parts that have no type are looked at node by node; the bulk frame's length has
to be what the header announces. Only ProtocolError escapes.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import msgspec

from wire.errors import ProtocolError
from wire.messages import AnyMessage, Chunk, Commit, Hello, Leased, Put, PutAnchors, Recalled, Request, Rows, StatsReply, Work
from wire.record import payload_size
from wire.scan import more_items_than

MAX_BULK = 1 << 30
MAX_DEPTH = 14
MAX_INT = (1 << 63) - 1
ITEM_SIZES = {"f4": 4, "u1": 1}
ABOVE_MAX_INT = re.compile(rb"\xcf[\x80-\xff]")
"""A number above MAX_INT looks like this in msgpack; so may a piece of text."""


class Limits(NamedTuple):
    """Of a header: bytes; and values and keys, all together. Python takes up to 90 bytes for one that takes 1 in the header."""

    header: int
    items: int


REQUEST = Limits(16 << 20, 1 << 20)
"""Anyone may send one. The largest honest ones: a PutAnchors of 32,768 spans (a lease that lacks all its anchors, and up to 4,096
rollouts more); a Put of one group of 1,024 whose verdicts all have the longest detail (`actor/outbox.py` adds no further group to 1,024
samples)."""
REPLY = Limits(64 << 20, 1 << 23)
"""Only replay sends one. The largest: a lease of 32,768 rollouts with their anchors."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seq: int
    message: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_seq_alone = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def encode(seq: int, message: AnyMessage, bulk: bytes = b"") -> list[bytes]:
    """Two frames. Raises ProtocolError when the message is larger than any peer would accept."""
    header = _encoder.encode(Envelope(seq, message))
    if fault := _too_large(header, bulk, REQUEST if isinstance(message, get_args(Request)) else REPLY):
        raise ProtocolError(f"{type(message).__name__} is too large to send: {fault}", seq=seq)
    return [header, bulk]


def decode(frames: list[bytes], limits: Limits = REPLY) -> tuple[int, AnyMessage, bytes]:
    """(seq, message, bulk). Raises ProtocolError, with the sequence number where that could be read."""
    if len(frames) != 2:
        raise ProtocolError(f"a message is two frames, not {len(frames)}")
    header, bulk = frames
    if fault := _too_large(header, bulk, limits):
        raise ProtocolError(f"message too large: {fault}")
    try:
        envelope = _decoder.decode(header)
        _check_nodes(_untyped(envelope.message), MAX_DEPTH)
        if ABOVE_MAX_INT.search(header):
            _check_nodes([envelope], 2 * MAX_DEPTH)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}", seq=_seq(header)) from None
    expected = bulk_size(envelope.message)
    if expected is not None and expected != len(bulk):
        raise ProtocolError(f"{type(envelope.message).__name__}: {len(bulk)} bulk bytes, its header announces {expected}", seq=envelope.seq)
    return envelope.seq, envelope.message, bulk


def _untyped(message: AnyMessage) -> Iterable[Any]:
    """The parts that may hold anything."""
    match message:
        case Hello(shared=part) | StatsReply(values=part):
            return [part]
        case Work(orders=orders):
            return [order.columns for order in orders]
        case Commit(record=record) | Recalled(record=record):
            return [record.steps, record.state, record.metrics]
        case _:
            return []


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


def _too_large(header: bytes, bulk: bytes, limits: Limits) -> str | None:
    if len(header) > limits.header or len(bulk) > MAX_BULK:
        return f"{len(header)} + {len(bulk)} bytes"
    if len(header) > limits.items and more_items_than(limits.items, header):  # each takes a byte at least
        return f"more than {limits.items} items in the header"
    return None


def _seq(header: bytes) -> int | None:
    try:
        seq, _ = _seq_alone.decode(header)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return seq if seq <= MAX_INT else None


def _check_nodes(level: Iterable[Any], depth: int) -> None:
    """Text, numbers, true, false, null, lists, maps with keys of text; no number that the store cannot hold; not too deep. ValueError."""
    for _ in range(depth):
        deeper: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is list or kind is tuple:
                deeper += node
            elif kind is dict:
                if not all(type(key) is str for key in node):
                    raise ValueError("a key that is not text")
                deeper += node.values()
            elif kind is int:
                if node > MAX_INT:
                    raise ValueError(f"a number above {MAX_INT}")
            elif isinstance(node, msgspec.Struct):
                deeper += msgspec.structs.astuple(node)
            elif not (kind is str or kind is float or kind is bool or node is None):
                raise ValueError(f"a value of type {kind.__name__}")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"nested deeper than {MAX_DEPTH}")
