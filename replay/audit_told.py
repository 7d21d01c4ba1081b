"""What the ledger says of the tables, beside groups' states, anchors and records: grants, outcomes, actors, evaluations, counters.

`read_ledger` folds each row into this while it reads; `audit_state.py` compares.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replay.books import PROBE_MEAN
from replay.sampler import QUARANTINED
from wire.record import ABORTED_WITHOUT_TOKEN

COUNTED = ("eval_rollouts", "greedy_rollouts", "quarantined", "aborted_without_token", "failed_without_token")
"""Counters that the ledger determines, beside `produced`."""


class Grant(NamedTuple):
    """`seq`: its place in the order of all grants."""

    actor: str
    seq: int
    version: int


@dataclass
class Actor:
    """As in the table `actors`."""

    epoch: int
    confirmed: int = -1
    probe_mean: float | None = None
    probe_max: float | None = None
    fingerprint: str | None = None


@dataclass
class Evaluation:
    version: int
    updates: int
    groups: int
    state: str = "pending"
    result: tuple[float | None, float | None, int | None] = (None, None, None)


@dataclass
class Told:
    """`put_by`: actor by rollout. `failures`: reason by (group, sample). `quarantine`: (rollout, actor, reason) in order. `outside`: (eval,
    payload digest, head digest) by rollout outside the books. `holders`: actor by eval group that was granted. `updates`: of a training
    group, by id. `parents`: (parent of a fork, update) by version. `checkpoints`: [update, path, manifest digest, state] by version."""

    grants: dict[str, Grant] = field(default_factory=dict)
    put_by: dict[str, str] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    quarantine: list[tuple[str, str, str]] = field(default_factory=list)
    outside: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    holders: dict[str, str | None] = field(default_factory=dict)
    updates: dict[str, int | None] = field(default_factory=dict)
    parents: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    checkpoints: dict[int, list[Any]] = field(default_factory=dict)
    evals: dict[int, Evaluation] = field(default_factory=dict)
    actors: dict[str, Actor] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    meta: dict[str, str] = field(default_factory=dict)
    next_epoch: int = 1

    def fold(self, kind: str, body: dict[str, Any]) -> None:
        match kind:
            case "hello" | "engine" | "applied":
                self._process(kind, body)
            case "grant":
                self._granted(body)
            case "give_back" if "eval" in body:
                self.holders.update(dict.fromkeys(body["groups"]))
            case "put":
                self._put(body)
            case "baseline_put" | "eval_put":
                of = body.get("eval", 0)
                self.outside.update({rollout: (of, told, body["heads"][rollout]) for rollout, told in body["rollouts"].items()})
                self.counters["eval_rollouts" if of else "greedy_rollouts"] += len(body["rollouts"])
            case "version":
                self.parents[body["notice"]["version"]] = (None, None)
            case "commit" if body.get("notice"):
                self.parents[body["notice"]["version"]] = (None, body["update"])
            case "fork":
                self._forked(body["checkpoint"], body["notice"]["version"])
            case "checkpoint":
                self.checkpoints[body["version"]] = [body["update"], body["path"], body["manifest"], "complete"]
            case "retention":
                for version in body["checkpoints"]:
                    self.checkpoints[version][3] = "removed"
            case "eval_planned":
                self.evals[body["eval"]] = Evaluation(body["version"], body["updates"], body["groups"])
            case "eval_done":
                done = self.evals[body["eval"]]
                done.state, done.result = "done", (body["sampled"], body["greedy"], body["failed"])
            case "finished":
                self.meta["finished"] = "1"
        for to, groups in body.get("to", {}).items():
            if not to.startswith("lost"):
                self.updates.update(dict.fromkeys(groups, body.get("update")))

    def _process(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "hello":
            self.next_epoch = max(self.next_epoch, body["epoch"] + 1)
            if body["role"] == "actor":
                before = self.actors.get(body["name"])
                self.actors[body["name"]] = Actor(body["epoch"], fingerprint=before.fingerprint if before else None)
            return
        actor = self.actors[body["actor"]]
        if kind == "engine":
            actor.fingerprint = body["fingerprint"]
            self.engines.add(body["fingerprint"])
            return
        actor.confirmed, actor.probe_mean, actor.probe_max = body["version"], body["probe_mean"], body["probe_max"]
        if actor.fingerprint is not None:
            self.meta.setdefault(PROBE_MEAN.format(actor.fingerprint), repr(actor.probe_mean))

    def _granted(self, body: dict[str, Any]) -> None:
        if "eval" in body:
            self.holders.update(dict.fromkeys(body["groups"], body["actor"]))
            return
        for group in body["groups"]:
            self.grants[group] = Grant(body["actor"], len(self.grants), body["version"])
        fresh = sum(group.endswith(".1") for group in body["groups"])
        self.meta["cursor"] = str(int(self.meta.get("cursor", "0")) + fresh)

    def _put(self, body: dict[str, Any]) -> None:
        actor = body["actor"]
        self.put_by.update(dict.fromkeys(body.get("rollouts", {}), actor))
        for group, sample, reason in body.get("failures", []):
            self.failures[group, sample] = reason
            self.counters["aborted_without_token" if reason == ABORTED_WITHOUT_TOKEN else "failed_without_token"] += 1
        for rollout, reason, group, sample in body.get("quarantined", []):
            self.failures[group, sample] = QUARANTINED
            self.quarantine.append((rollout, actor, reason))
            self.counters["quarantined"] += 1

    def _forked(self, checkpoint: int, version: int) -> None:
        self.parents[version] = (checkpoint, None)
        for at, row in self.checkpoints.items():
            if at > checkpoint and row[3] == "complete":
                row[3] = "orphaned"
        for one in self.evals.values():
            if one.version > checkpoint and one.state == "pending":
                one.state = "lost"
