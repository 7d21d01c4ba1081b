"""Score stored rollouts again with stored weights and recorded plans, for the audit: same fingerprint and plan, same bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from configs.load import load_resolved
from learner.model import load_policy, set_determinism, trainer_fingerprint
from learner.publish import read_version
from learner.scoring import Row, passes_of, run_pass
from wire.manifest import version_path
from wire.record import ScoringPlan


class Wanted(NamedTuple):
    """One response under one version, at the place where it was scored the first time."""

    version: int
    row: Row
    plan: ScoringPlan


class Rescored(NamedTuple):
    """`logprobs[i]`: float32, of every response token of row i; None where its version is not retained. `trainer`: our fingerprint, empty
    when none is."""

    logprobs: list[np.ndarray | None]
    trainer: str


@torch.no_grad()
def rescore(run_dir: Path, rows: Sequence[Wanted]) -> Rescored:
    """Loads every version once, with its digests checked. Raises WeightsError for a damaged one."""
    config = load_resolved(run_dir / "config.json")
    set_determinism(config.run.seed, config.learner.device)
    found: list[np.ndarray | None] = [None] * len(rows)
    trainer = ""
    for version in sorted({wanted.version for wanted in rows}):
        if read_version(run_dir, version) is None:
            continue
        policy = load_policy(str(run_dir / version_path(version)), config.model.dtype, config.model.attention,
                             partitioned=config.learner.zero_stage == 3).to(config.learner.device)
        trainer = trainer_fingerprint(config, policy)
        members = [index for index, wanted in enumerate(rows) if wanted.version == version]
        for one in passes_of([rows[index].plan for index in members]):
            for place, values in run_pass(policy, one, [rows[index].row for index in members], config.learner.device).items():
                found[members[place]] = values
    return Rescored(found, trainer)
