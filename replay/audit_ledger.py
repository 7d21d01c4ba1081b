"""Audit of the ledger: its chain, and the story that it tells.

`read_ledger` folds the rows into a `Story`: what should be in the tables if nobody touched them; `audit_tables.py` compares.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from replay.audit_rollouts import Finding
from replay.audit_told import Told
from replay.ledger import FIRST, row_hash
from replay.reader import RunReader
from replay.rows import LedgerRow

BEFORE: dict[str, set[str | None]] = {
    "granted": {None, "queued"},
    "complete": {"granted", "leased"},
    "leased": {"complete"},
    "trained": {"leased"},
    "dropped": {"granted", "complete", "leased"},
    "expired": {"complete"},
    "lost": {"trained"},
    "queued": {None},
}
"""Which states a group may come from."""


@dataclass
class Story:
    """`groups`: the state of each training group, with its reason. `payloads`, `heads`: digests by rollout. `produced`: rollouts stored, as
    its last row says. `baselines`: digests of payload and head by greedy response. `anchors`: anchor digest by (rollout, span). `commits`:
    bodies by update. `notices`: by version. `budgets`: (first update, max_staleness). `line`: the newest retention's (version, update).
    `config`: digest of the one last used. `hashes`: of all rows; `head`: of the last. `told`: what it says of the other tables."""

    groups: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    payloads: dict[str, str] = field(default_factory=dict)
    produced: int = 0
    heads: dict[str, str] = field(default_factory=dict)
    baselines: dict[str, tuple[str, str]] = field(default_factory=dict)
    anchors: dict[tuple[str, int], str] = field(default_factory=dict)
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    notices: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost_updates: set[int] = field(default_factory=set)
    orphaned: set[int] = field(default_factory=set)
    removed_versions: set[int] = field(default_factory=set)
    budgets: list[tuple[int, int]] = field(default_factory=list)
    line: tuple[int, int] = (-1, -1)
    config: str | None = None
    hashes: set[str] = field(default_factory=set)
    head: str = FIRST
    told: Told = field(default_factory=Told)


def read_ledger(run: RunReader, budget: int) -> tuple[Story, list[Finding]]:
    """Check the chain and fold the rows. `budget`: max_staleness of the config, for a ledger that does not say."""
    story, findings = Story(), []
    seq = 0
    for row in run.read(LedgerRow):
        seq += 1
        findings += _link(row, seq, story.head)
        seq, story.head = row.seq, row.hash
        story.hashes.add(row.hash)
        try:
            body = json.loads(row.body)
            findings += _fold(story, row, body)
            story.told.fold(row.kind, body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            findings.append(Finding("ledger", [f"row {row.seq}"], f"its body is not one of a {row.kind} row: {error!r}"))
    story.budgets = story.budgets or [(0, budget)]
    return story, findings


def _link(row: LedgerRow, seq: int, head: str) -> list[Finding]:
    ids, found = [f"row {row.seq}"], []
    if row.seq != seq:
        found.append(Finding("ledger", ids, f"expected row {seq}: {row.seq - seq} rows are missing before it"))
    elif row.prev != head:
        found.append(Finding("ledger", ids, f"does not follow the row before: expected prev {head[:16]}, found {row.prev[:16]}"))
    if (computed := row_hash(row.prev, row.seq, row.kind, row.body)) != row.hash:
        found.append(Finding("ledger", ids, f"kind or body was changed: expected hash {row.hash[:16]}, computed {computed[:16]}"))
    return found


def _fold(story: Story, row: LedgerRow, body: dict[str, Any]) -> list[Finding]:
    found = []
    match row.kind:
        case "put":
            story.payloads.update(body.get("rollouts", {}))
            story.heads.update(body.get("heads", {}))
            story.produced += len(body.get("rollouts", {}))
            if (told := body.get("produced", story.produced)) != story.produced:
                found = [Finding("books", [f"row {row.seq}"], f"produced is {told} in this row; the rows so far stored {story.produced}")]
                story.produced = told
        case "baseline_put":
            story.baselines.update({rollout: (payload, body["heads"][rollout]) for rollout, payload in body["rollouts"].items()})
        case "anchors":
            for name, old in body["spans"].items():
                rollout, _, span = name.rpartition("/")
                story.anchors[rollout, int(span)] = old
        case "version" | "commit" | "fork":
            if body.get("notice"):
                story.notices[body["notice"]["version"]] = body["notice"]
        case "retention":
            story.line = (body["version"], body["update"])
            story.removed_versions.update(body["versions"])
        case "created" | "opened":
            _opened(story, body)
    if row.kind == "commit":
        story.commits[body["update"]] = body
    if row.kind == "fork":
        story.lost_updates.update(body["updates"])
        story.orphaned.update(body["versions"])
    moves = [(group, "granted", None) for group in body["groups"] if "eval" not in body] if row.kind == "grant" else []
    for to, groups in body.get("to", {}).items():
        state, _, reason = to.removesuffix(")").partition("(")
        moves += [(group, state, reason or None) for group in groups]
    moves += [(group, "queued", None) for group in body.get("requeued", [])]
    return found + [finding for move in moves if (finding := _move(story, row, *move))]


def _move(story: Story, row: LedgerRow, group: str, to: str, reason: str | None) -> Finding | None:
    before = story.groups.get(group, (None, None))[0]
    story.groups[group] = (to, reason)
    if before in BEFORE.get(to, set()):
        return None
    return Finding(
        "transition",
        [group, f"row {row.seq}"],
        f"{row.kind} moves it from {before or 'nothing'} to {to}, which is no step of a group's life",
    )


def _opened(story: Story, body: dict[str, Any]) -> None:
    """A start of replay: the config it ran with, and what a resume changed."""
    story.config = body["config"]
    if "replay.max_staleness" in body["changed"]:
        before, now = body["changed"]["replay.max_staleness"]
        story.budgets = story.budgets or [(0, before)]
        story.budgets.append((max(story.commits, default=0) + 1, now))
