"""Damage to messages: bytes of a header, and values inside it."""

import math
import random
from typing import Any

INTS = [0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -2**31, 2**53, 2**63 - 1, -2**63, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.5]
TEXTS = ["", "\0", "a0", "t1", "t1.1", "t1.1.0", "../../etc/passwd", "x" * 5000, "é\U0001f600", "'; DROP TABLE rollouts; --",
         "full", "0" * 64]


def hostile(value: Any, source: random.Random) -> Any:
    """Something in the place of `value`: mostly of its own type, so that typed decoding lets it through."""
    if source.random() < 0.1:
        return source.choice([None, True, [], {}, "text", 3, 2.5, [[[]]], {"a": 1}])
    match value:
        case bool():
            return not value
        case int():
            return source.choice([*INTS, value + 1, value - 1, -value])
        case float():
            return source.choice(FLOATS)
        case str():
            return source.choice([*TEXTS, value[:-1], value + "0"])
        case list():
            return source.choice([[], value + value, value[::-1], value[:-1], value * 3])
        case dict():
            return {key: part for key, part in value.items() if source.random() < 0.8}
    return source.choice(INTS)


def inside(tree: Any, source: random.Random) -> Any:
    """`tree` with one value in it, at any depth, replaced."""
    if isinstance(tree, dict) and tree and source.random() < 0.93:
        key = source.choice(sorted(tree))
        return {**tree, key: inside(tree[key], source)}
    if isinstance(tree, list) and tree and source.random() < 0.85:
        at = source.randrange(len(tree))
        return [*tree[:at], inside(tree[at], source), *tree[at + 1:]]
    return hostile(tree, source)


def in_bytes(data: bytes, source: random.Random) -> bytes:
    """`data` with a few bytes changed, lost, added, doubled or cut off."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(damaged) + 1)
        match source.randrange(6):
            case 0 if at < len(damaged):
                damaged[at] = source.randrange(256)
            case 1:
                del damaged[at:at + source.randint(1, 8)]
            case 2:
                damaged[at:at] = source.randbytes(source.randint(1, 8))
            case 3:
                damaged[at:at] = damaged[at:at + 40]
            case 4:
                del damaged[source.randrange(len(damaged) + 1):]
            case 5:
                damaged[at:at + 5] = source.choice([b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
                                                    b"\xc6\x7f\xff\xff\xff", b"\x91\x91\x91\x91\x91"])
    return bytes(damaged)


def in_floats(data: bytes, source: random.Random) -> bytes:
    """`data` with up to three of its 32-bit words replaced by NaN, infinities, positives, denormals, huge and negative integers."""
    words = bytearray(data)
    for _ in range(source.randint(1, 3)):
        if len(words) >= 4:
            at = 4 * source.randrange(len(words) // 4)
            words[at:at + 4] = source.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\x80\x3f", b"\1\0\0\0",
                                              b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\x80\xbf"])
    return bytes(words)
