"""An outbox's file (`actor/outbox_file.py`) as a next life of the actor finds it. First part `f`: the file's own bytes; `e`: an entry whose
digest is right, as another version of Leeway may have written it. StoreError, or what is found can be sent and was written."""

import random
import sqlite3
from contextlib import closing

import msgspec

from actor.collect import Outcome
from actor.outbox_file import Body, OutboxFile
from tests.actor.orders import train
from tests.fuzz.parts import Mutate, folder, mutate_part, pack, unpack
from tests.support.replay import rollout
from wire.codec import encode
from wire.digest import digest
from wire.errors import ProtocolError, StoreError
from wire.messages import Put, SampleFailure

FOLDER = folder()
FILE = FOLDER / "a0-r1.sqlite"


def outcome(number: int) -> Outcome:
    order = train(number)
    rows = [rollout(order, sample, 0) for sample in range(order.n)]
    payloads = [payload for _, payload in rows]
    return Outcome([order], [head for head, _ in rows], payloads, [digest(payload) for payload in payloads],
                   [SampleFailure(order.order_id, order.attempt, order.n, "no_token")])


def clear() -> None:
    for file in FOLDER.iterdir():
        file.unlink()


def seeds() -> list[bytes]:
    clear()
    outbox = OutboxFile(FOLDER, "a0", "r1")
    outbox.write([outcome(1), outcome(2)])
    outbox.close()
    whole, one = FILE.read_bytes(), outcome(1)
    body = msgspec.msgpack.encode(Body(one.orders, one.heads, one.digests, one.failures))
    empty = msgspec.msgpack.encode(Body([], [], [], []))
    return [pack([b"f", whole]), pack([b"e", body, b"".join(one.payloads)]), pack([b"e", empty, b""])]


def mutate(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    return mutate_part(data, source, engine)


def check(data: bytes) -> None:
    kind, first, second = unpack(data, 3)
    clear()
    if kind == b"f":
        FILE.write_bytes(first)
    else:
        OutboxFile(FOLDER, "a0", "r1").close()
        with closing(sqlite3.connect(FILE)) as db, db:
            db.execute("INSERT INTO entries (digest, body, payload) VALUES (?, ?, ?)", (digest(first, second), first, second))
    try:
        outbox = OutboxFile(FOLDER, "a0", "r1")
    except StoreError:
        return
    for found in outbox.found.values():
        try:
            encode(1, Put(1, found.heads, found.digests, found.failures), b"".join(found.payloads))
        except ProtocolError:
            pass
        if kind == b"f":
            assert found in (outcome(1), outcome(2))
    outbox.close()
