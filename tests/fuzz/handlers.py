"""Requests into replay's handlers, as the daemon hands them on, each time from the same moment of a run: orders held by two actors, a lease
outstanding, anchors missing, a checkpoint to fork to. Whatever they say: an answer or a refusal (RunError, the end of the run by its own
rules, is one), the books balance, nothing that is not a number is stored, and a restarted replay knows what this one knew."""

import logging
import random
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from replay.books import books, imbalance
from replay.core import Core
from replay.handlers import arrive, handle
from replay.start import open_core, read_prompts
from replay.store import Storage
from replay.summary import TRAINED_TWICE
from tests.fuzz.parts import Mutate, folder, mutate_messages, pack, unpack
from tests.replay.test_store import facts
from tests.support.replay import PRINT, FakeClock, LightActor, LightLearner, make_config, make_core, notice, rollout
from wire.codec import decode, encode
from wire.digest import digest
from wire.errors import ProtocolError, RunError
from wire.messages import (
    PROTOCOL,
    AnchorHead,
    Applied,
    Checkpointed,
    Commit,
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
    Pull,
    Put,
    PutAnchors,
    Recall,
    SampleFailure,
    Stats,
    Unscored,
)
from wire.record import Failed, ScoringPlan

MOST = 12
"""Messages of an input that are looked at."""
FOLDER = folder()
CONFIG = make_config(FOLDER, heldout=1, prompts=20, learner={"updates": 100}, replay={"max_staleness": 2}, eval={"samples": 1, "every": 2})
PROMPTS = read_prompts(CONFIG)
logging.disable(logging.CRITICAL)


class InMemory(Storage):
    """A store that begins as `whole`."""

    whole = b""

    def __init__(self, path: Path) -> None:
        super().__init__(Path(":memory:"))
        if self.whole:
            self._db.deserialize(self.whole)

    def bytes(self) -> bytes:
        return self._db.serialize()


def opened(whole: bytes, clock: FakeClock) -> Core:
    return open_core(CONFIG, FOLDER, PROMPTS, clock=clock, storage=type("Begun", (InMemory,), {"whole": whole}))


def prepare() -> tuple[bytes, list[list[bytes]]]:
    """The store at that moment, and requests that do something then."""
    core = make_core(CONFIG, clock=FakeClock())
    learner, actor, other = LightLearner(core, CONFIG), LightActor(core, CONFIG, "a0"), LightActor(core, CONFIG, "a1")
    for version in range(3):
        for each in (actor, other):
            each.pull(want=0)
        while actor.work():
            pass
        learner.score()
        if version < 2:
            learner.commit(learner.lease())
            learner.client.call(Checkpointed(learner.epoch, version + 1, f"checkpoints/v{version + 1:06d}", "d" * 64))
    leased = learner.lease()
    assert isinstance(leased, Leased)
    record, columns, new = learner.record(leased)
    learner.client.call(Commit(learner.epoch, record, new), columns)
    learner.committed = 3
    for each in (actor, other):
        each.pull(want=0)
    other.pull(want=2)
    actor.pull(want=2)
    orders = list(actor.holding.values())
    rows = [rollout(order, sample, 3) for order in orders for sample in range(order.n)]
    more = [rollout(order, 0, 3, verdict=Failed("timeout")) for order in other.holding.values()]
    leased = learner.lease()
    requests: list[tuple[Any, bytes]] = []
    if isinstance(leased, Leased):
        record, columns, new = learner.record(leased)
        requests += [(Commit(learner.epoch, record, new), columns)]
    skipped, _, _ = learner.record(leased, skipped=True, columns=[], response_lens=[])
    unscored, _ = learner.client.call(Unscored(learner.epoch, 3, 8))
    anchors = [AnchorHead(head.rollout_id, 0, 3, "resident", notice(3).weights_digest, "{}", ScoringPlan(64, 64, row), 3)
               for row, head in enumerate(unscored.heads)]  # type: ignore[union-attr]
    put = [Put(each.epoch, [head for head, _ in rows], [digest(payload) for _, payload in rows], failures)
           for each, rows, failures in ((actor, rows, []), (other, more, [SampleFailure(more[0][0].order_id, 1, 1, "no_token")]))]
    requests += [
        (put[0], b"".join(payload for _, payload in rows)), (put[1], b"".join(payload for _, payload in more)),
        (PutAnchors(learner.epoch, anchors), b"\0" * 12 * len(anchors)), (Commit(learner.epoch, skipped, None), b""),
        *((request, b"") for request in (
            Pull(actor.epoch, 3, 4, 0.0, sorted(actor.holding)), Pull(other.epoch, 3, 64, 1.0, []), Lease(learner.epoch, 3, 0.0),
            Unscored(learner.epoch, 3, 8), Hello("actor", "a0", PROTOCOL, CONFIG.shared()), Hello("learner", "rank0", PROTOCOL, CONFIG.shared()),
            Hello("tool", "t", PROTOCOL, {}), Stats(), Engine(actor.epoch, "f0", PRINT), Engine(other.epoch, "f1", PRINT),
            Applied(actor.epoch, 3, notice(3).weights_digest, 1e-6, 1e-5), GiveBack(actor.epoch, sorted(actor.holding), "stop"),
            Note(actor.epoch, "kind", "detail"), Fetch(actor.epoch, 3, "manifest.json", 0, 100), Initial(learner.epoch, notice(0)),
            Checkpointed(learner.epoch, 3, "checkpoints/v000003", "d" * 64), Recall(learner.epoch, 1, 1), Finished(learner.epoch, {"total": 1.0}),
            Fork(learner.epoch, 2, notice(4)), Fork(learner.epoch, 0, notice(4))))]
    core.store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    path = core.run_dir / "replay.sqlite"
    core.store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE").fetchall()
    db.close()
    return path.read_bytes(), [encode(30 * number, *request) for number, request in enumerate(requests)]


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
    rows = core.store.rows("SELECT response_len, payload FROM rollouts WHERE state IN ('buffered', 'leased', 'trained') AND payload IS NOT NULL")
    mus = [np.frombuffer(payload, "<f4")[-length:] for length, payload in rows]
    return all(np.isfinite(mu).all() and (mu <= 0).all() for mu in mus)
