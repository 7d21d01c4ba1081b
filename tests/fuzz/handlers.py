"""Requests into replay's handlers, as the daemon hands them on, each time from the same moment of a run: orders held by two actors, a lease
outstanding, anchors missing, a checkpoint to fork to. Whatever they say: an answer or a refusal (RunError, the end of the run by its own
rules, is one), the books balance, nothing that is not a number is stored, and a restarted replay knows what this one knew."""

import random
from types import SimpleNamespace

import numpy as np

from replay.books import books, imbalance
from replay.core import Core
from replay.handlers import arrive, handle
from replay.summary import TRAINED_TWICE
from tests.fuzz.moment import opened, prepare
from tests.fuzz.parts import Mutate, mutate_messages, pack, unpack
from tests.replay.test_store import facts
from tests.support.replay import FakeClock
from wire.codec import decode, encode
from wire.errors import ProtocolError, RunError

MOST = 12
"""Messages of an input that are looked at."""
WHOLE, KNOWN = prepare()


def seeds() -> list[bytes]:
    return [pack(frames) for frames in KNOWN] + [pack([part for frames in KNOWN[at::5] for part in frames]) for at in range(5)]


def mutate(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    return mutate_messages(data, source, engine, KNOWN)


def check(data: bytes) -> None:
    parts, clock = unpack(data), FakeClock()
    core = opened(WHOLE, clock)
    try:
        for at in range(0, min(len(parts), 2 * MOST), 2):
            if not tell(core, clock, parts[at:at + 2]):
                break
        assert imbalance(books(core.store.db)) == 0
        assert core.store.one(TRAINED_TWICE) == 0
        assert sound(core)
        known, whole = facts(SimpleNamespace(core=core)), core.store.db.bytes()
    finally:
        core.store.close()
    again = opened(whole, clock)
    after = facts(SimpleNamespace(core=again))
    again.store.close()
    del known["epoch"]  # a tool's HELLO takes an epoch and is not written down
    assert after["epoch"] > max((epoch for _, _, epoch, _ in after["sessions"]), default=0)
    assert [(name, value, after[name]) for name, value in known.items() if after[name] != value] == []


def tell(core: Core, clock: FakeClock, frames: list[bytes]) -> bool:
    """What the daemon does with a message. False when the run has ended. Its number says how much time has passed."""
    try:
        seq, request, bulk = decode(frames)
    except ProtocolError:
        return True
    clock.at += seq % 100
    try:
        answer = handle(core, arrive(core, b"peer", seq, request, bulk)._replace(deadline=0.0))
        assert answer is not None
        reply, more = answer if isinstance(answer, tuple) else (answer, b"")
        decode(encode(seq, reply, more))
        core.expire_orders()
        core.keep_house_before_commit()
        goes_on = True
    except RunError:
        goes_on = False
    core.store.commit()
    return goes_on


def sound(core: Core) -> bool:
    """No rollout that is stored to be trained on has a log-prob that is none."""
    rows = core.store.rows("SELECT response_len, payload FROM rollouts WHERE state IN ('buffered', 'leased', 'trained') "
                           "AND payload IS NOT NULL")
    mus = [np.frombuffer(payload, "<f4")[-length:] for length, payload in rows]
    return all(np.isfinite(mu).all() and (mu <= 0).all() for mu in mus)
