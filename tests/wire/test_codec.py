"""What goes through the codec comes back; anything else is a ProtocolError."""

import random
import re
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wire import messages as messages_module
from wire import record as record_module
from wire.codec import MAX_DEPTH, REPLY, REQUEST, _untyped, bulk_size, decode, encode, join, split
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
from wire.scan import more_items_than

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
    with pytest.raises(ProtocolError, match="nested deeper than 14"):
        decode(body(type="statsreply", values={"a": nested(13)}))


@pytest.mark.parametrize("value", [b"\xc4\x01a", b"\xd4\x05a", b"\xd6\xff\0\0\0\0"], ids=["bytes", "extension", "timestamp"])
@pytest.mark.parametrize("kind", [b"\xaastatsreply\xa6values\x81\xa1a",
                                  b"\xa5hello\xa4role\xa5actor\xa4name\xa1a\xa8protocol\x01\xa6shared\x81\xa1a"])
def test_a_part_without_a_type_holds_what_json_can_hold(kind: bytes, value: bytes) -> None:
    fields = b"\x82" if kind.startswith(b"\xaa") else b"\x85"
    decode([b"\x92\x07" + fields + b"\xa4type" + kind + b"\xa1a", b""])
    with pytest.raises(ProtocolError, match="a value of type"):
        decode([b"\x92\x07" + fields + b"\xa4type" + kind + value, b""])


def test_every_part_without_a_type_is_looked_at() -> None:
    """A number that the store cannot hold, in each place where msgspec would let anything pass."""
    big = {"a": {"b": 2**63}}
    record = {name: msgspec.structs.replace(RECORD, **{name: [big] if name == "steps" else big}) for name in ("steps", "state", "metrics")}
    order = msgspec.structs.replace(ORDER, columns=big)
    messages = [Hello("actor", "a0", 1, big), StatsReply(big), Work([ORDER, order], None, False),
                *(Commit(4, one, None) for one in record.values()), *(Recalled(one, [], [], []) for one in record.values())]
    for message in messages:
        assert big in list(_untyped(message)) or [big] in list(_untyped(message))
        with pytest.raises(ProtocolError, match="a number above 9223372036854775807"):
            decode(encode(1, message))
    source = Path(messages_module.__file__).read_text() + Path(record_module.__file__).read_text()
    free = re.findall(r"^    (\w+): .*\bAny\b", source, re.MULTILINE)
    assert sorted(free) == ["columns", "metrics", "shared", "state", "steps", "values"]


@pytest.mark.parametrize("message", [Pull(2**63, 0, 1, 0.0, []), Pull(0, 0, 2**63, 0.0, []),
                                     Rows([msgspec.structs.replace(HEAD, sample=2**64 - 1)]),
                                     Put(1, [msgspec.structs.replace(HEAD, spans=(Span(0, 0, 2**63),))], [""], [])])
def test_a_number_that_the_store_cannot_hold_is_refused_where_a_number_belongs(message: Any) -> None:
    with pytest.raises(ProtocolError, match="a number above 9223372036854775807"):
        decode(encode(1, message))


def test_text_that_looks_like_a_large_number_is_text() -> None:
    frames = encode(1, Note(1, "\u03c0", "\u03c0 = 3.14, \u03ff"))
    assert frames[0].count(b"\xcf\x80") == 2
    assert decode(frames)[1] == Note(1, "\u03c0", "\u03c0 = 3.14, \u03ff")


def count(tree: Any) -> int:
    """Values and keys, the slow way."""
    if isinstance(tree, list):
        return 1 + sum(map(count, tree))
    return 1 + sum(1 + count(value) for value in tree.values()) if isinstance(tree, dict) else 1


LEAVES = st.none() | st.booleans() | st.integers(-2**63, 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(max_size=40)
TREES = st.recursive(LEAVES,
                     lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20))


@given(TREES)
@example("a" * 40_000)
@example("a" * 70_000)
@example(b"a" * 40_000)
@example(b"a" * 70_000)
@example([0] * 70_000)
@example({str(number): number for number in range(70_000)})
@settings(max_examples=200)
def test_items_are_counted_without_building_them(tree: Any) -> None:
    text, items = msgpack.packb(tree), count(tree)
    assert not more_items_than(items, text)
    assert more_items_than(items - 1, text)


def test_extensions_are_one_item_each() -> None:
    text = msgpack.packb([msgpack.ExtType(1, bytes(size)) for size in (1, 2, 3, 4, 8, 16, 300, 70_000)])
    assert (more_items_than(8, text), more_items_than(9, text)) == (True, False)


def filled(size: int) -> bytes:
    """A Note of `size` bytes."""
    return encode(1, Note(1, "", "a" * (size - len(encode(1, Note(1, "", "a" * 70_000))[0]) + 70_000)))[0]


def test_the_limits_of_a_header() -> None:
    assert (REQUEST, REPLY) == ((16_777_216, 1_048_576), (67_108_864, 8_388_608))
    whole = filled(16_777_216)
    assert len(whole) == 16_777_216
    decode([whole, b""], REQUEST)
    with pytest.raises(ProtocolError, match="message too large: 16777217"):
        decode([filled(16_777_215) + b"aa", b""], REQUEST)
    with pytest.raises(ProtocolError, match="Note is too large to send: 16777217"):
        filled(16_777_217)
    encode(1, NotYet("a" * 20_000_000))  # a reply may be larger
    with pytest.raises(ProtocolError, match="NotYet is too large to send"):
        encode(1, NotYet("a" * 67_108_864))
    held = [""] * 1_048_560 + ["a" * 40]  # besides: envelope, number, message, 6 names, 6 values
    assert decode(encode(1, Pull(1, 1, 1, 1.0, held)), REQUEST)[0] == 1
    more = b"\x92\x01" + msgpack.packb({"type": "pull", "epoch": 1, "confirmed": 1, "want": 1, "wait_s": 1.0, "holding": [*held, ""]})
    assert decode([more, b""])[0] == 1
    with pytest.raises(ProtocolError, match="message too large: more than 1048576 items"):
        decode([more, b""], REQUEST)
    with pytest.raises(ProtocolError, match="Pull is too large to send: more than 1048576 items"):
        encode(1, Pull(1, 1, 1, 1.0, [*held, ""]))


def test_the_largest_honest_requests_fit() -> None:
    """A group of 1,024 whose failures have the longest detail, sampled under four versions; an update of 16,384 rollouts; 32,768
    spans that were scored at once."""
    spans = tuple(Span(1000 + i, 30_000 * i, 30_000 * (i + 1)) for i in range(4))
    name = "t1000000.3.1000"
    head = msgspec.structs.replace(HEAD, rollout_id=name, spans=spans, fingerprint="f" * 16, started=1.5, finished=2.5, engine_seconds=0.5,
                                   verdict=Failed("x" * 300, "\u4e00" * 2000, "package.module:function", 1.5))
    assert len(encode(1, Put(1, [head] * 1024, ["e" * 64] * 1024, []))[0]) < 9_000_000
    lengths = [30_000] * 16_384
    record = msgspec.structs.replace(RECORD, group_ids=["t1000000.3"] * 1024, rollout_ids=[name] * 16_384, response_lens=lengths,
                                     steps=[{"rows": [list(range(1000, 1000 + 16_384))], "loss": 0.5}], greedy_rewards=[0.5] * 1024)
    assert len(encode(1, Commit(1, record, NOTICE))[0]) < 1_000_000
    anchor = AnchorHead(name, 1, 1000, "snapshot", "b" * 64, '{"kind": "cpu", "threads": 1}', ScoringPlan(64, 64, 5), 30_000)
    assert len(encode(1, PutAnchors(1, [anchor] * 32_768))[0]) < 11_000_000
    heads = [msgspec.structs.replace(head, spans=spans[:2], verdict=Scored(1.0, "", "package.module:function", 1.5))] * 32_768
    assert len(encode(1, Leased(1, ["t1000000.3"] * 1024, heads, [anchor] * 65_536))[0]) < 45_000_000


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
