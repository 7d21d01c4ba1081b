"""How many values and keys a msgpack text holds, read from its bytes alone: nothing is built of them."""

FIXED = dict.fromkeys(range(256), 0) | {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,  # numbers
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,  # extensions of a fixed size, with their type
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # how many a list or map has: they come after it, and are counted there
FIXED |= {0xA0 + length: length for length in range(32)}
"""Bytes that belong to a value, by its first one."""
SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""Bytes of the length that follows, and further bytes besides as many as it says: bytes, extensions, text."""


def more_items_than(limit: int, text: bytes) -> bool:
    """Ends after `limit` steps, whatever the text says of itself. What is no msgpack is for the decoder to refuse."""
    at = count = 0
    while at < len(text):
        count += 1
        if count > limit:
            return True
        first = text[at]
        if first in SIZED:
            width, more = SIZED[first]
            at += width + more + int.from_bytes(text[at + 1:at + 1 + width], "big")
        at += 1 + FIXED[first]
    return False
