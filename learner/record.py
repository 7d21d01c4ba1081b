"""The record of an update: enough to run it again."""

from pathlib import Path
from typing import Any

import torch

from configs.schema import Config
from learner.batch import LeaseRows
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.model import trainer_fingerprint
from learner.rerun import engine_state
from learner.update import Outcome
from wire.digest import digest, digest_json
from wire.messages import UpdateRecord

PACKAGES = ("configs", "wire", "correction", "learner")


def source_digest() -> str:
    """Digest of the source that an update depends on."""
    home = Path(__file__).resolve().parent.parent
    files = sorted(path for package in PACKAGES for path in (home / package).rglob("*.py"))
    return digest(*(part for path in files for part in (str(path.relative_to(home)).encode(), path.read_bytes())))


class RecordMaker:
    """What stays the same from update to update is found out once."""

    def __init__(self, config: Config, engine: TrainEngine) -> None:
        self.engine = engine
        self.fixed: dict[str, Any] = {
            "seed": config.run.seed, "world": engine.ranks.world, "zero_stage": engine.zero_stage, "threads": torch.get_num_threads(),
            "trainer": trainer_fingerprint(config, engine.policy), "config_digest": digest_json(config.model_dump(mode="json")),
            "source_digest": source_digest()}
        self.prox_source = config.recipe.prox
        if engine.reference is not None:
            self.fixed["reference"] = digest_state({name: value.cpu() for name, value in engine.reference.policy.model.named_parameters()})

    def make(self, lease: LeaseRows, outcome: Outcome, version_out: int, weights_digest: str, metrics: dict[str, Any],
             seconds: dict[str, float]) -> UpdateRecord:
        state = self.fixed | engine_state(self.engine)
        return UpdateRecord(
            update=lease.update, version_in=lease.version_in, version_out=version_out, skipped=outcome.skipped, group_ids=lease.group_ids,
            rollout_ids=[head.rollout_id for head in lease.heads], response_lens=[head.response_len for head in lease.heads],
            columns=[(name, dtype) for name, dtype, _ in outcome.columns], steps=outcome.steps, state=state, prox_source=self.prox_source,
            weights_digest_out=weights_digest, metrics=metrics, seconds=seconds,
            greedy_rewards=lease.greedy_rewards)
