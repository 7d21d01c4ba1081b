"""What goes through the codec comes back; anything else is a ProtocolError."""

import random
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wire.codec import MAX_DEPTH, bulk_size, decode, encode, join, split
from wire.errors import ProtocolError
from wire.messages import (
    AnchorHead,
    Applied,
    Baseline,
    Checkpointed,
    Chunk,
    Commit,
    Committed,
    Done,
    Engine,
    Fetch,
    Finished,
    Fork,
    GiveBack,
    Hello,
    Initial,
    Lease,
    Leased,
    Note,
    NotYet,
    Ok,
    Pull,
    Put,
    PutAnchors,
    Recall,
    Recalled,
    Refusal,
    Rows,
    SampleFailure,
    Stats,
    StatsReply,
    Stored,
    Unscored,
    UpdateRecord,
    Welcome,
    Work,
)
from wire.record import (
    Failed,
    Fingerprint,
    RolloutHead,
    Sampling,
    Scored,
    ScoringPlan,
    Span,
    VersionNotice,
    WorkOrder,
    pack_payload,
)

SAMPLING = Sampling(1.0, 8)
NOTICE = VersionNotice(3, "weights/v000003", "a" * 64, "b" * 64)
HEAD = RolloutHead("t1.1.0", "t1", 1, 0, 2, 3, (Span(2, 0, 1), Span(3, 1, 3, False)), "stop", SAMPLING, "f0", Scored(0.5, "partly"))
PAYLOAD = pack_payload(np.arange(2), np.arange(3), np.full(3, -0.25))
ANCHOR = AnchorHead("t1.1.0", 0, 2, "snapshot", "b" * 64, "{}", ScoringPlan(64, 64, 5), 1)
RECORD = UpdateRecord(
    1,
    3,
    4,
    False,
    ["t1.1"],
    ["t1.1.0"],
    [3],
    [("old", "f4"), ("keep", "u1")],
    [{"loss": 0.5}],
    {"seed": 1},
    "version_in",
    "c" * 64,
    {"loss": 0.5},
    {"total": 1.5},
)
ORDER = WorkOrder("t1", 1, "train", "7", [{"role": "user", "content": "1+1="}], {"answer": "2", "list": [1, {"deep": None}]}, 8, SAMPLING)
MESSAGES: list[tuple[Any, bytes]] = [
    (Hello("actor", "a0", 1, {"replay": {"max_staleness": 2}}), b""),
    (Welcome(4, "runs/x", NOTICE, 3), b""),
    (Refusal("again", "why"), b""),
    (Ok(), b""),
    (Stats(), b""),
    (StatsReply({"a": [1, {"b": None}]}), b""),
    (Pull(4, -1, 3, 1.5, ["t1.1"]), b""),
    (Work([ORDER], None, False), b""),
    (Engine(4, "f0", Fingerprint("sglang", "0.5", "float32", "x", "none", 1, False, "full", "d" * 64, 16)), b""),
    (Baseline(1.5e-5), b""),
    (Put(4, [HEAD, HEAD], ["e" * 64] * 2, [SampleFailure("t1", 1, 1, "no_token")]), PAYLOAD * 2),
    (Stored(1, 2, [("a", "b")], []), b""),
    (Applied(4, 3, "b" * 64, 1e-6, 1e-5), b""),
    (GiveBack(4, ["t1.1"], "stop"), b""),
    (Note(4, "kind", "detail"), b""),
    (Fetch(4, 3, "model.safetensors", 8, 16), b""),
    (Chunk(24, 16, "a" * 64), b"\0" * 16),
    (Initial(4, NOTICE), b""),
    (Unscored(4, 3, 64), b""),
    (Rows([HEAD]), PAYLOAD),
    (PutAnchors(4, [ANCHOR]), b"\0" * 4),
    (Lease(4, 3, 1.0), b""),
    (Leased(1, ["t1.1"], [HEAD], [ANCHOR]), PAYLOAD + b"\0" * 4),
    (NotYet("2 of 32"), b""),
    (Done(), b""),
    (Commit(4, RECORD, NOTICE), b"\0" * 15),
    (Committed(4, "f" * 64, False), b""),
    (Checkpointed(4, 3, "checkpoints/v3", "a" * 64), b""),
    (Recall(4, 3, 1), b""),
    (Recalled(RECORD, ["a" * 64, "b" * 64], [HEAD], [ANCHOR]), PAYLOAD + b"\0" * 4),
    (Fork(4, 3, NOTICE), b""),
    (Finished(4, {"total": 2.0}), b""),
]


@pytest.mark.parametrize(("message", "bulk"), MESSAGES, ids=[type(message).__name__ for message, _ in MESSAGES])
def test_round_trip(message: Any, bulk: bytes) -> None:
    assert decode(encode(2**62, message, bulk)) == (2**62, message, bulk)
    assert bulk_size(message) in (None, len(bulk))


def test_a_failed_verdict_stays_one() -> None:
    head = msgspec.structs.replace(HEAD, verdict=Failed("timeout"))
    _, rows, _ = decode(encode(1, Rows([head]), PAYLOAD))
    assert rows.heads[0].verdict == Failed("timeout")  # type: ignore[union-attr]


@pytest.mark.parametrize(("message", "bulk"), [(m, b) for m, b in MESSAGES if not isinstance(m, Put)])
def test_a_bulk_frame_of_another_length_is_refused(message: Any, bulk: bytes) -> None:
    with pytest.raises(ProtocolError, match="its header announces") as caught:
        decode(encode(9, message, bulk + b"\0"))
    assert caught.value.seq == 9


def body(**fields: Any) -> list[bytes]:
    return [msgpack.packb([7, fields]), b""]


def nested(depth: int, value: Any = 0) -> Any:
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, list[bytes]] = {
    "no frames": [],
    "one frame": [b"\xc0"],
    "three frames": [b"", b"", b""],
    "empty header": [b"", b""],
    "not msgpack": [b"\xc1", b""],
    "trailing bytes": [msgpack.packb([7, {"type": "ok"}]) + b"\0", b""],
    "no envelope": [msgpack.packb({"type": "ok"}), b""],
    "seq is text": [msgpack.packb(["7", {"type": "ok"}]), b""],
    "seq is a bool": [msgpack.packb([True, {"type": "ok"}]), b""],
    "unknown message": body(type="exec"),
    "no type": body(epoch=1),
    "unknown field": body(type="ok", more=1),
    "missing field": body(type="lease", epoch=1),
    "wrong type": body(type="lease", epoch="1", version=0, wait_s=0.0),
    "number as text": body(type="note", epoch=1, kind=5, detail=""),
    "array of 2^31": [b"\x92\x07\xdd\x7f\xff\xff\xff", b""],
    "map of 2^31": [b"\xdf\x7f\xff\xff\xff", b""],
    "text of 2^31": [b"\xdb\x7f\xff\xff\xff", b""],
    "extension": [msgpack.packb([7, msgpack.ExtType(1, b"")]), b""],
    "timestamp": [msgpack.packb([7, msgpack.Timestamp(1)]), b""],
    "bad utf-8": [b"\x92\x07\xa2\xff\xfe", b""],
    "bytes as key": [b"\x92\x07\x81\xc4\x01a\x01", b""],
    "number as key": [b"\x92\x07\x81\x01\x01", b""],
    "extension inside": body(type="statsreply", values={"a": [msgpack.ExtType(1, b"x")]}),
    "empty extension inside": body(type="statsreply", values={"a": [msgpack.ExtType(1, b"")]}),
    "timestamp inside": body(type="statsreply", values={"a": [msgpack.Timestamp(1)]}),
    "number as key inside": body(type="statsreply", values={"a": {1: 2}}),
    "nested 1,100 deep": [b"\x91" * 1100 + b"\xc0", b""],
    "nested 100,000 deep": [b"\x91" * 100_000 + b"\xc0", b""],
    "nested beyond the limit": [msgpack.packb([7, {"type": "statsreply", "values": {"a": nested(MAX_DEPTH)}}]), b""],
    "negative length": [
        msgpack.packb([7, {"type": "putanchors", "epoch": 1, "heads": [msgspec.to_builtins(ANCHOR) | {"count": -1}]}]),
        b"",
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(REFUSED[name])


@pytest.mark.parametrize("depth", [0, 1, 12])
def test_a_number_that_the_store_cannot_hold_is_refused_at_any_depth(depth: int) -> None:
    frames = body(type="statsreply", values={"a": nested(depth, 2**63 - 1), "b": {}})
    assert decode(frames)[1] == StatsReply({"a": nested(depth, 2**63 - 1), "b": {}})
    with pytest.raises(ProtocolError, match="a number above 9223372036854775807"):
        decode(body(type="statsreply", values={"a": nested(depth, 2**63), "b": {}}))


def test_one_level_beyond_the_deepest_is_refused() -> None:
    with pytest.raises(ProtocolError, match="nested deeper than 16"):
        decode(body(type="statsreply", values={"a": nested(13)}))


def test_the_number_of_a_request_that_is_not_understood_is_kept() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(body(type="exec"))
    assert caught.value.seq == 7


@pytest.mark.parametrize(("header", "bulk"), [(b"", b""), (b"a", b""), (b"", b"b"), (b"header", bytes(1000))])
def test_two_frames_go_through_one(header: bytes, bulk: bytes) -> None:
    assert split(memoryview(join([header, bulk]))) == [header, bulk]


@pytest.mark.parametrize("frame", [b"", b"\0", b"\1\0\0\0", b"\xff\xff\xff\xffrest", b"\5\0\0\0rest"])
def test_what_is_no_joined_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="two frames"):
        decode(split(memoryview(frame)))


def escapes(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except ProtocolError:
        pass


@given(st.lists(st.binary(max_size=200), max_size=4))
@example([b"\x92\x07\x81\xa4type\xa2ok", b""])
@settings(max_examples=300)
def test_only_protocol_errors_escape(frames: list[bytes]) -> None:
    escapes(frames)


@given(st.sampled_from(MESSAGES), st.randoms(use_true_random=False))
@settings(max_examples=500)
def test_only_protocol_errors_escape_damaged_messages(case: tuple[Any, bytes], source: random.Random) -> None:
    header, bulk = encode(1, *case)
    damaged = bytearray(header)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(damaged))
        match source.randrange(3):
            case 0:
                damaged[at] = source.randrange(256)
            case 1:
                del damaged[at]
            case 2:
                damaged.insert(at, source.randrange(256))
    escapes([bytes(damaged), bulk])
