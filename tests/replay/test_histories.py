"""Random histories of messages that are lost, late, doubled or out of order, of restarts, leases that end, and crashes, against the whole
core and beside a small model of what must have come of them: the books balance, nothing is trained twice or past the budget, no prompt is
skipped, and a crash changes nothing that was acknowledged."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay.books import books, imbalance
from replay.ledger import FIRST, row_hash
from replay.store import Storage
from tests.replay.conftest import Stage
from tests.replay.test_store import facts
from tests.support.frontier import skipped
from tests.support.replay import DirectClient, FakeClock, LightActor, LightLearner, make_config, make_core, notice, rollout
from tests.support.torture import IN_MEMORY, scaled, shared, tell
from wire.errors import TryAgainError
from wire.messages import Checkpointed, Commit, Fork, GiveBack, Leased, Pull, SampleFailure, Stored
from wire.record import Failed, RolloutHead, WorkOrder, group_id, pack_payload

POISON = pack_payload(np.arange(4), np.ones(3), np.array([math.nan, -1, -1]))
DONE: Counter[str] = Counter()
N = 2
"""Samples of a group."""
LIVE = "SELECT group_id, state FROM groups WHERE purpose = 'train' AND state IN ('granted', 'complete', 'leased')"


class Quick(Storage):
    """Without the flush to disk: here a crash is a crash of the process."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.execute("PRAGMA synchronous = OFF")

    def execute(self, sql: str, values: Any = ()) -> Any:
        return super().execute("SELECT 1" if "synchronous = FULL" in sql else sql, values)


class Model:
    """Every sample has the first outcome that was taken, for good; whatever else comes for it is a duplicate, or refused."""

    def __init__(self) -> None:
        self.taken: set[tuple[str, int]] = set()
        self.acknowledged: set[str] = set()
        self.produced = 0

    def answered(self, rows: list[Any], failures: list[SampleFailure], stored: Stored) -> None:
        refused, poison = dict(stored.refused), dict(stored.quarantined)
        fresh: set[tuple[str, int]] = set()
        twice = 0
        for one in (*(head for head, _ in rows), *failures):
            key, name = (group_id(one), one.sample), f"{group_id(one)}.{one.sample}"
            twice += key in self.taken | fresh
            if key not in self.taken | fresh and name not in refused:
                fresh.add(key)
                self.produced += isinstance(one, RolloutHead) and name not in poison and name[0] == "t" and one.sample < N
        assert stored.duplicates == twice, "what had an outcome is a duplicate, and nothing else is"
        assert not {f"{of}.{sample}" for of, sample in self.taken} & {*refused, *poison}
        self.taken |= fresh
        self.acknowledged |= {head.rollout_id for head, _ in rows} - {*refused, *poison}


class History(RuleBasedStateMachine):
    @initialize(eta=st.sampled_from([0, 1, 2, 8]), least=st.integers(1, 2), heldout=st.sampled_from([0, 1]),
                estimator=st.sampled_from(["grpo", "remax"]), full=st.booleans())
    def start(self, eta: int, least: int, heldout: int, estimator: str, full: bool) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        replay = {"max_staleness": eta, "min_scored": least, "max_rollouts": (eta + 1) * 2 * N if full else 100_000}
        self.config = make_config(Path(self.folder.name), heldout=heldout, prompts=7, replay=replay,
                                  learner={"updates": 10_000}, eval={"samples": 2, "every": 3}, recipe={"estimator": estimator})
        self.clock = FakeClock()
        self.stage = Stage(Path(self.folder.name), self.config, self.core(), self.clock)
        self.join()
        self.model = Model()
        self.late: list[tuple[LightActor, WorkOrder]] = []
        self.delayed: list[tuple[LightActor, list[Any], list[SampleFailure]]] = []
        self.asked: list[tuple[LightActor, int, Pull]] = []

    def core(self) -> Any:
        return make_core(self.config, clock=self.clock, storage=Quick)

    def join(self) -> None:
        self.actors = {name: LightActor(self.stage.core, self.config, name) for name in ("a0", "a1")}
        self.learner = LightLearner(self.stage.core, self.config)

    @rule(name=st.sampled_from(["a0", "a1"]), want=st.integers(0, 5))
    def pull(self, name: str, want: int) -> None:
        self.actors[name].pull(want=want)

    @rule(name=st.sampled_from(["a0", "a1"]), want=st.integers(0, 5))
    def pull_whose_reply_is_lost(self, name: str, want: int) -> None:
        """It is sent again under its number, and brings the same orders."""
        actor = self.actors[name]
        request = Pull(actor.epoch, actor.confirmed, want, 0.0, list(actor.holding))
        lost, _ = actor.client.call(request)
        granted = len(self.stage.core.book.groups)
        again, _ = actor.client.repeat(request)  # type: ignore[union-attr]
        assert (again, len(self.stage.core.book.groups)) == (lost, granted)
        actor.take(again)  # type: ignore[arg-type]
        self.asked.append((actor, actor.client.seq, request))  # type: ignore[union-attr]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def late_copy_of_a_pull(self, data: st.DataObject) -> None:
        """It overtook nobody and its reply finds nobody: what it may be granted outlives its lease."""
        actor, seq, request = data.draw(st.sampled_from(self.asked))
        client = DirectClient(self.stage.core)
        client.seq = seq
        if request.epoch == self.actors[actor.name].epoch:
            client.repeat(request)
        else:
            with pytest.raises(TryAgainError):
                client.repeat(request)

    @rule(name=st.sampled_from(["a0", "a1"]))
    def work(self, name: str) -> None:
        """Load what is to be loaded, take all there is, answer it."""
        actor = self.actors[name]
        if actor.pull().notice is not None:
            actor.pull()
        answered = [order for order in actor.holding.values() if order.version in (None, actor.confirmed)]
        self.send(actor, [rollout(order, sample, actor.confirmed) for order in answered for sample in range(order.rows)], [])
        self.late += [(actor, order) for order in answered]

    @precondition(lambda self: any(actor.holding for actor in self.actors.values()))
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from([actor for actor in self.actors.values() if actor.holding]))
        order = actor.holding[data.draw(st.sampled_from(sorted(actor.holding)))]
        if order.version is not None and order.version != actor.confirmed:
            return
        rows, failures = [], []
        for sample in data.draw(st.sets(st.integers(0, order.rows - 1), min_size=1)):
            match data.draw(st.sampled_from(["scored"] * 5 + ["failed", "aborted", "no token", "poison"])):
                case "scored":
                    rows.append(rollout(order, sample, actor.confirmed))
                case "failed":
                    rows.append(rollout(order, sample, actor.confirmed, verdict=Failed("timeout")))
                case "aborted":
                    rows.append(rollout(order, sample, actor.confirmed, verdict=Failed("aborted")))
                case "no token":
                    failures.append(SampleFailure(order.order_id, order.attempt, sample, "no_token"))
                case "poison":
                    rows.append((rollout(order, sample, actor.confirmed)[0], POISON))
        rows = data.draw(st.permutations(rows))
        match data.draw(st.sampled_from(["once", "once", "twice", "later"])):
            case "later":
                self.delayed.append((actor, rows, failures))
            case times:
                for _ in range(1 + (times == "twice")):
                    self.send(actor, rows, failures)
        self.late.append((actor, order))

    @precondition(lambda self: self.delayed)
    @rule(data=st.data())
    def delayed_put(self, data: st.DataObject) -> None:
        """In any order; it may come more than once, and long after."""
        actor, rows, failures = data.draw(st.sampled_from(self.delayed))
        self.send(self.actors[actor.name], rows, failures)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def put_late(self, data: st.DataObject) -> None:
        """An outbox that is emptied much later, by whoever now has the name."""
        actor, order = data.draw(st.sampled_from(self.late))
        actor = self.actors[actor.name]
        if actor.confirmed >= 0:
            self.send(actor, [rollout(order, 0, actor.confirmed)], [])

    def send(self, actor: LightActor, rows: list[Any], failures: list[Any]) -> None:
        self.model.answered(rows, failures, actor.put(rows, failures))
        for of in list(actor.holding):
            group, found = self.stage.core.book.groups.get(of), self.stage.core.eval_group(of)
            if not (group and group.state == "granted" or found and found[1].held):
                del actor.holding[of]

    @precondition(lambda self: any(actor.holding for actor in self.actors.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from([actor for actor in self.actors.values() if actor.holding]))
        group_id = data.draw(st.sampled_from(sorted(actor.holding)))
        actor.client.call(GiveBack(actor.epoch, [group_id], "stop"))
        del actor.holding[group_id]

    @rule(name=st.sampled_from(["a0", "a1"]), times=st.integers(1, 4))
    def dies_with_orders_in_hand(self, name: str, times: int) -> None:
        """And comes back when their lease is over; now and then more often than replay.max_attempts."""
        for _ in range(times):
            self.actors[name] = actor = LightActor(self.stage.core, self.config, name)
            actor.pull(want=0)
            actor.pull(want=5)
            self.clock.at += 31

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.at += seconds

    @rule(skipped=st.booleans())
    def update(self, skipped: bool) -> None:
        self.learner.score()
        leased = self.learner.lease()
        if not isinstance(leased, Leased):
            return
        wanted = leased.group_ids if self.config.recipe.estimator == "remax" else []
        assert [group_id(head) for head in leased.baselines] == wanted
        assert all(head.sampling.temperature > 0 for head in leased.heads)
        for head in (*leased.heads, *leased.baselines):
            assert self.learner.committed - head.spans[0].version <= self.config.replay.max_staleness
        if skipped:
            self.learner.commit(leased, skipped=True)
            return
        out = self.stage.core.next_version
        record, bulk, _ = self.learner.record(leased, version_out=out, weights_digest_out=notice(out).weights_digest)
        request = Commit(self.learner.epoch, record, notice(out))
        first, _ = self.learner.client.call(request, bulk)
        again, _ = self.learner.client.call(request, bulk)
        assert again == first
        self.learner.committed = first.version  # type: ignore[union-attr]

    @rule(name=st.sampled_from(["a0", "a1"]))
    def advance(self, name: str) -> None:
        self.work(name)
        self.update(skipped=False)

    @rule()
    def lease_and_stall(self) -> None:
        self.learner.lease()

    @rule()
    def checkpoint(self) -> None:
        version = self.learner.committed
        self.learner.client.call(Checkpointed(self.learner.epoch, version, f"checkpoints/v{version:06d}", "d" * 64))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        complete = [v for v, in self.stage.rows("SELECT version FROM checkpoints WHERE state = 'complete'")] or [0]
        back, new = max(complete), self.stage.core.next_version
        self.learner = LightLearner(self.stage.core, self.config)
        self.learner.client.call(Fork(self.learner.epoch, back, notice(new)))
        self.learner.committed = new

    @rule(name=st.sampled_from(["a0", "a1"]))
    def actor_restarts(self, name: str) -> None:
        old = self.actors[name]
        self.actors[name] = LightActor(self.stage.core, self.config, name)
        with pytest.raises(TryAgainError):
            old.pull()

    @rule()
    def crash(self) -> None:
        """Nobody notices: clients go on under their epochs."""
        before = facts(self.stage)
        self.stage.core.store.close()
        self.stage.core = self.core()
        assert facts(self.stage) == before
        assert skipped(self.stage.rows, self.config) == []
        DONE["crashes"] += 1
        for client in (self.learner, *self.actors.values()):
            client.client.core = self.stage.core  # type: ignore[union-attr]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "stage"):
            return
        DONE["steps"] += 1
        found = books(self.stage.core.store.db)
        assert (imbalance(found), found["produced"]) == (0, self.model.produced)
        stored = {r for r, in self.stage.rows("SELECT rollout_id FROM rollouts UNION SELECT rollout_id FROM eval_rollouts")}
        assert self.model.acknowledged <= stored | {f"{g}.{s}" for g, s in self.stage.rows("SELECT group_id, sample FROM failures")}
        assert self.stage.rows("SELECT value FROM updates, json_each(record, '$.rollout_ids') WHERE state = 'committed' AND NOT skipped "
                               "GROUP BY value HAVING count(*) > 1") == []
        assert all(age <= self.config.replay.max_staleness for age, in self.stage.rows("SELECT staleness FROM trained_staleness"))
        assert self.stage.rows("SELECT 1 FROM rollouts WHERE json_extract(head, '$.sampling.temperature') <= 0") == []
        assert dict(self.stage.rows(LIVE)) == {group_id: group.state for group_id, group in self.stage.core.book.groups.items()}

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        prev = FIRST
        for seq, kind, body, before, found in self.stage.rows("SELECT * FROM ledger ORDER BY seq"):
            assert (before, found) == (prev, row_hash(prev, seq, kind, body))
            prev = found
        try:
            DONE.update(histories=1, acknowledged_rollouts=len(self.model.acknowledged),
                        updates=self.stage.core.store.one("SELECT count(*) FROM updates"))
            assert skipped(self.stage.rows, self.config) == []
            self.progress()
            assert skipped(self.stage.rows, self.config) == []
        finally:
            self.stage.core.store.close()
            self.folder.cleanup()

    def progress(self) -> None:
        """A well-behaved actor and learner go on from wherever this ended."""
        actor, target = LightActor(self.stage.core, self.config, "fresh"), self.stage.core.stepped + 4
        self.learner = LightLearner(self.stage.core, self.config)
        for _ in range(100):
            if self.stage.core.stepped >= target:
                return
            self.clock.at += 31
            actor.pull(want=0)
            while actor.work():
                pass
            leased = self.learner.lease()
            if isinstance(leased, Leased):
                self.learner.commit(leased, version_out=self.stage.core.next_version)
        raise AssertionError("progress stopped")


History.TestCase.settings = settings(max_examples=shared(scaled(300, 10_000)), stateful_step_count=40,
                                     suppress_health_check=list(HealthCheck))
TestHistory = pytest.mark.timeout(7200)(History.TestCase)


@pytest.fixture(scope="module", autouse=True)
def told() -> Iterator[None]:
    yield
    tell(**{name: DONE[name] for name in ("histories", "steps", "crashes", "acknowledged_rollouts", "updates")})
