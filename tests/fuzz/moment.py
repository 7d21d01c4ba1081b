"""A moment of a run: orders held by two actors, a lease outstanding, anchors missing, checkpoints to fork to; and the requests that do
something then."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from replay.core import Core
from replay.start import open_core, read_prompts
from replay.store import Storage
from tests.fuzz.parts import folder
from tests.support.replay import PRINT, FakeClock, LightActor, LightLearner, make_config, make_core, notice, rollout
from wire.codec import encode
from wire.digest import digest
from wire.manifest import MANIFEST, version_path
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
    Rows,
    SampleFailure,
    Stats,
    Unscored,
)
from wire.record import Failed, ScoringPlan

FOLDER = folder()
CONFIG = make_config(FOLDER, heldout=1, prompts=20, learner={"updates": 100}, replay={"max_staleness": 4}, eval={"samples": 1, "every": 2})
PROMPTS = read_prompts(CONFIG)
(FOLDER / version_path(3)).mkdir(parents=True)
(FOLDER / version_path(3) / MANIFEST).write_bytes(bytes(250))


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
        while core.evals:
            actor.pull(want=1)
            actor.answer()
        actor.pull(want=2)
        actor.answer()
        learner.score()
        if version < 2:
            learner.commit(learner.lease())
            learner.client.call(Checkpointed(learner.epoch, version + 1, f"checkpoints/v{version + 1:06d}", "d" * 64))
    learner.commit(learner.lease())
    for each in (actor, other):
        each.pull(want=0)
    for _ in range(3):
        actor.pull(want=1)
        actor.answer()
    for each in (actor, other):
        each.pull(want=2)
    leased = learner.lease()
    assert isinstance(leased, Leased)
    assert len(actor.holding) == len(other.holding) == 2
    requests = [learner_asks(learner, leased), actors_ask(actor, other)]
    core.store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    path = core.run_dir / "replay.sqlite"
    core.store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE").fetchall()
    db.close()
    known = [request for of in requests for request in of]
    return path.read_bytes(), [encode(30 * number, *request) for number, request in enumerate(known)]


Asked = list[tuple[Any, bytes]]


def learner_asks(learner: LightLearner, leased: Leased) -> Asked:
    epoch = learner.epoch
    record, columns, new = learner.record(leased)
    skipped, skipped_columns, _ = learner.record(leased, skipped=True)
    unscored, _ = learner.client.call(Unscored(epoch, 3, 8))
    assert isinstance(unscored, Rows)
    anchors = [AnchorHead(head.rollout_id, 0, 3, "resident", notice(3).weights_digest, "{}", ScoringPlan(64, 64, row), 3)
               for row, head in enumerate(unscored.heads)]
    assert len(anchors) == 6
    return [
        (Commit(epoch, record, new), columns), (Commit(epoch, skipped, None), skipped_columns),
        (PutAnchors(epoch, anchors), np.full((len(anchors), 3), -0.5, "<f4").tobytes()),
        *((request, b"") for request in (
            Lease(epoch, 3, 0.0), Unscored(epoch, 3, 8), Hello("learner", "rank0", PROTOCOL, CONFIG.shared()), Initial(epoch, notice(0)),
            Checkpointed(epoch, 3, "checkpoints/v000003", "d" * 64), Recall(epoch, 1, 1), Finished(epoch, {"total": 1.0}),
            Fork(epoch, 2, notice(4)), Fork(epoch, 0, notice(4))))]


def actors_ask(actor: LightActor, other: LightActor) -> Asked:
    whole = [rollout(order, sample, 3) for order in actor.holding.values() for sample in range(order.n)]
    failed = [rollout(order, 0, 3, verdict=Failed("timeout")) for order in other.holding.values()]
    without = [SampleFailure(order.order_id, order.attempt, 1, "no_token") for order in other.holding.values()]
    return [
        *((Put(each.epoch, [head for head, _ in rows], [digest(payload) for _, payload in rows], failures), b"".join(p for _, p in rows))
          for each, rows, failures in ((actor, whole, []), (other, failed, without))),
        *((request, b"") for request in (
            Pull(actor.epoch, 3, 4, 0.0, sorted(actor.holding)), Pull(other.epoch, 3, 64, 1.0, []),
            Hello("actor", "a0", PROTOCOL, CONFIG.shared()), Hello("tool", "t", PROTOCOL, {}), Stats(),
            Engine(actor.epoch, "f0", PRINT), Engine(other.epoch, "f1", PRINT),
            Applied(actor.epoch, 3, notice(3).weights_digest, 1e-6, 1e-5),
            GiveBack(actor.epoch, sorted(actor.holding), "stop"), Note(actor.epoch, "kind", "detail"),
            Fetch(actor.epoch, 3, "manifest.json", 0, 100)))]
