"""Hostile requests by the thousand, well-formed and not: whatever they say, they get an answer or a refusal, poison is quarantined, the
daemon's memory agrees with its tables, and the run goes on."""

import random
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from replay.books import books, imbalance
from replay.handlers import arrive, handle
from tests.replay.conftest import Stage
from tests.replay.test_histories import Quick
from tests.replay.test_store import facts
from tests.support.mutate import in_floats, inside
from tests.support.replay import ENGINE, PRINT, FakeClock, LightActor, LightLearner, make_config, make_core, rollout
from tests.support.torture import IN_MEMORY, scaled, tell
from wire.codec import decode, encode
from wire.digest import digest
from wire.errors import ProtocolError
from wire.messages import (
    MAX_CHUNK,
    PROTOCOL,
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
    SampleFailure,
    Stats,
    Unscored,
)
from wire.record import VersionNotice


class Fuzzed:
    """A small run that is fed damaged requests. `count`: how many were decoded, so reached a handler."""

    def __init__(self, folder: Path, source: random.Random) -> None:
        config = make_config(folder, prompts=20, learner={"updates": 10**6}, replay={"max_failure_rate": 1.0},
                             actor={"max_quarantined": 10**9})
        clock = FakeClock()
        self.source, self.config = source, config
        self.stage = Stage(folder, config, make_core(config, clock=clock, storage=Quick), clock)
        self.core = self.stage.core
        self.join()
        self.handled = self.refused = 0

    def join(self) -> None:
        """Again after each HELLO that took a name."""
        self.actor, self.learner = LightActor(self.core, self.config), LightLearner(self.core, self.config)

    def step(self) -> None:
        request, bulk = self.request()
        tree = inside(msgspec.to_builtins(request), self.source) if self.source.random() < 0.7 else msgspec.to_builtins(request)
        if bulk and self.source.random() < 0.2:
            bulk = in_floats(bulk, self.source)
            if isinstance(request, Put) and isinstance(tree, dict) and self.source.random() < 0.8:
                half = len(bulk) // 2
                tree["digests"] = [digest(bulk[:half]), digest(bulk[half:])]
        try:
            seq, message, data = decode([msgpack.packb([1, tree]), bulk])
        except ProtocolError:
            self.refused += 1
            return
        self.handled += 1
        answer = handle(self.core, arrive(self.core, b"peer", seq, message, data)._replace(deadline=0.0))
        assert answer is not None
        self.core.keep_house_before_commit()
        self.core.store.commit()
        reply, more = answer if isinstance(answer, tuple) else (answer, b"")
        decode(encode(seq, reply, more))
        if isinstance(message, Hello | Initial | Fork):
            self.join()

    def request(self) -> tuple[Any, bytes]:
        """A request that would do something, as the run stands."""
        actor, learner, source, core = self.actor, self.learner, self.source, self.core
        actor.confirmed = learner.committed = core.committed
        newest = core.versions[core.committed]
        match source.randrange(12):
            case 0 | 1 | 2 | 3:
                actor.client.call(Applied(actor.epoch, core.committed, newest.weights_digest, 0.0, 0.0))
                actor.pull(want=4)
                if actor.holding:
                    order = actor.holding.pop(source.choice(sorted(actor.holding)))
                    rows = [rollout(order, sample, core.committed) for sample in range(order.n)]
                    failures = [SampleFailure(order.order_id, order.attempt, 1, "no_token")] if source.random() < 0.2 else []
                    heads, payloads = [head for head, _ in rows], [payload for _, payload in rows]
                    return Put(actor.epoch, heads, [digest(payload) for payload in payloads], failures), b"".join(payloads)
                return Pull(actor.epoch, core.committed, 4, 0.0, ["t1.1"]), b""
            case 4:
                return PutAnchors(learner.epoch, []), b""
            case 5 | 6:
                leased = learner.lease()
                if isinstance(leased, Leased):
                    record, bulk, _ = learner.record(leased, version_out=core.next_version)
                    return Commit(learner.epoch, record, self.notice(core.next_version)), bulk
                return Lease(learner.epoch, core.committed, 0.0), b""
        return source.choice([
            Hello("actor", "a0", PROTOCOL, self.config.shared()), Stats(), Engine(actor.epoch, ENGINE, PRINT),
            Applied(actor.epoch, core.committed, newest.weights_digest, 0.0, 0.0), GiveBack(actor.epoch, sorted(actor.holding), "x"),
            Note(actor.epoch, "kind", "detail"), Fetch(actor.epoch, core.committed, "manifest.json", 0, MAX_CHUNK),
            Initial(learner.epoch, newest), Unscored(learner.epoch, core.committed, 8),
            Checkpointed(learner.epoch, core.committed, "checkpoints/v000000", "d" * 64), Finished(learner.epoch, {"total": 1.0}),
            Fork(learner.epoch, core.committed, self.notice(core.next_version))]), b""

    def notice(self, version: int) -> VersionNotice:
        return VersionNotice(version, f"weights/v{version:06d}", "a" * 64, digest(b"weights%d" % version))


@pytest.mark.timeout(3600)
def test_hostile_requests() -> None:
    count = scaled(5_000, 100_000)
    source = random.Random(20261130)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        fuzzed = Fuzzed(Path(folder), source)
        for number in range(count):
            fuzzed.step()
            if number % 500 == 499:
                assert imbalance(books(fuzzed.core.store.db)) == 0
        core = fuzzed.core
        assert fuzzed.handled > count // 4
        assert core.store.one("SELECT count(*) FROM quarantine") > count // 100
        assert core.store.one("SELECT count(*) FROM updates") > count // 500
        assert core.store.one("SELECT count(*) FROM rollouts") > count // 20
        tell(hostile_requests=count, of_them_handled=fuzzed.handled, quarantined=core.store.one("SELECT count(*) FROM quarantine"),
             rollouts_stored=core.store.one("SELECT count(*) FROM rollouts"), updates=core.stepped)
        before = facts(fuzzed.stage)
        fuzzed.stage.reopen()
        assert facts(fuzzed.stage) == before
        fuzzed.stage.core.store.close()
