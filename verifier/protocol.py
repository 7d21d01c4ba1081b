"""What the pool and a worker say to each other: length-prefixed msgpack over one inherited socket. No pickle.

* pool to worker: Setup, then any number of Requests;
* worker to pool: Ready, then one Reply per Request.
"""

import struct
from typing import Any

import msgspec

from wire.record import Failed, Verdict

PREFIX = struct.Struct("<I")
MAX_REPLY_BYTES = 16 * 2**20
"""A worker's reply is cut by the worker; a longer one is a broken worker."""


class VerifyItem(msgspec.Struct, frozen=True):
    """One response to judge, with the columns of its dataset row (`answer` and others; plain JSON-like values)."""

    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    columns: dict[str, Any]


class Setup(msgspec.Struct, frozen=True):
    spec: str
    arguments: dict[str, Any]
    memory_mb: int


class Ready(msgspec.Struct, frozen=True):
    """`name` is the verifier with its version; `error` is one line when the spec cannot be used."""

    name: str = ""
    error: str = ""


class Request(msgspec.Struct, frozen=True):
    id: int
    items: list[VerifyItem]


class Reply(msgspec.Struct, frozen=True):
    """A verdict for each item, or one failure for the call as a whole."""

    id: int
    verdicts: list[Verdict] = []
    failure: Failed | None = None


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(body)) + body
