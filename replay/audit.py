"""The audit that needs no model: does the record of a run agree with itself, with its files and with its promises?

It detects a fault, an accident or a change in part of the record. It does not detect a consistent rewrite of everything by someone who
owns the files: for that, keep the ledger's head elsewhere.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config
from replay.audit_baselines import check_baselines
from replay.audit_ledger import Story, read_ledger
from replay.audit_rollouts import Finding, check_rollout
from replay.audit_state import check_state
from replay.audit_tables import (
    check_anchors,
    check_books,
    check_commits,
    check_evals,
    check_groups,
    check_notices,
    check_retention,
    check_rollout_row,
)
from replay.audit_updates import check_updates
from replay.audit_versions import check_checkpoints, check_versions
from replay.baselines import BASELINES
from replay.reader import RunReader
from replay.rows import RolloutRow, SpanRow, VersionRow
from wire.digest import digest_json

__all__ = ["Audit", "Finding", "audit"]


class Audit(NamedTuple):
    """`findings`: what does not hold. `notes`: what could not be looked at, and why. `checked`: how many of each were."""

    findings: list[Finding]
    notes: list[str]
    checked: dict[str, int]


def audit(run_dir: Path, *, files: bool = True) -> Audit:
    """Check a run, live or finished. `files`: also digest every tensor of every retained version. ConfigError when there is no run."""
    notes: list[str] = []
    with RunReader(run_dir) as run:
        config = run.config()
        story, findings = read_ledger(run, config.replay.max_staleness)
        findings += [
            *_config(config, story),
            *_summary(run, story, notes),
            *check_checkpoints(run, story.hashes, notes),
            *check_versions(run, notes, files=files),
            *check_notices(run, story),
            *check_groups(run, story),
            *check_books(run, story),
            *check_anchors(run, story),
            *check_commits(run, story),
            *check_retention(run, story, notes),
            *_rollouts(run, story),
            *check_updates(run, config, story.budgets),
            *check_evals(run),
            *check_baselines(run, config, story),
        ]
        if any(finding.kind == "ledger head" for finding in findings):
            notes.append("the ledger's tail was cut: counters, actors, grants and evaluations were not compared with it")
        else:
            findings += check_state(run, story)
        tables = {
            "ledger rows": "ledger",
            "rollouts": "rollouts",
            "spans": "spans",
            "updates": "updates",
            "versions": "versions",
            "checkpoints": "checkpoints",
            "evaluations": "evals",
            "greedy baselines": f"eval_rollouts WHERE eval_id = {BASELINES}",
        }
        checked = {name: run.one(f"SELECT count(*) FROM {table}") for name, table in tables.items()}
    return Audit(findings, notes, checked)


def _config(config: Config, story: Story) -> Iterator[Finding]:
    found = digest_json(config.model_dump(mode="json"))
    if story.config is not None and story.config != found:
        yield Finding(
            "config", ["config.json"], f"the run was last started with config {story.config[:16]}, the file digests to {found[:16]}"
        )


def _summary(run: RunReader, story: Story, notes: list[str]) -> Iterator[Finding]:
    """The head in summary.json must be a row of the ledger, else its tail was cut. It is the last row unless the run goes on."""
    path = run.run_dir / "summary.json"
    if not path.is_file():
        notes.append("no summary.json: the run is going on or was killed, so a cut ledger tail shows only against checkpoints")
        return
    values = json.loads(path.read_text())
    head = values.get("ledger_head")
    if head is not None and head not in story.hashes:
        yield Finding(
            "ledger head",
            ["summary.json"],
            f"written when the ledger ended at {head[:16]}, which is no row of the ledger: its tail was cut",
        )
    elif head != story.head:
        notes.append("summary.json is older than the ledger's last row: the run went on after it")


def _rollouts(run: RunReader, story: Story) -> Iterator[Finding]:
    weights = {row.version: row.weights_digest for row in run.read(VersionRow)}
    for row in run.read(RolloutRow):
        yield from check_rollout_row(story, row)
        yield from check_rollout(run, row, list(run.read(SpanRow, "rollout_id = ?", row.rollout_id)), weights)
