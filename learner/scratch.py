"""A learner's engine without a conversation: loaded from a run's checkpoint, to run its updates again. It only reads the run."""

import os
from pathlib import Path

import torch

from configs.load import load_resolved
from configs.schema import Config
from learner import checkpoint
from learner.anchor import Anchors
from learner.checkpoint import Checkpoint
from learner.deepspeed_engine import TrainEngine
from learner.model import load_policy, set_determinism, trainer_fingerprint
from learner.ranks import join
from learner.rerun import Again, Past, rerun
from learner.session import Session
from learner.stop import Stop
from wire.manifest import version_path
from wire.record import VersionNotice


def world() -> int:
    """How many ranks this process is one of."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Scratch:
    """Each rank makes one. `threads`: as in the records, or sums may have another order. RunError when the number of ranks or the ZeRO
    stage is not the checkpoint's."""

    def __init__(self, run_dir: Path, one: Checkpoint, threads: int) -> None:
        self.config: Config = load_resolved(run_dir / "config.json")
        self.ranks = join(self.config)
        set_determinism(self.config.run.seed, self.config.learner.device)
        torch.set_num_threads(threads)
        policy = load_policy(str(self._model(run_dir, one)), self.config.model.dtype, self.config.model.attention)
        self.engine = TrainEngine(policy, self.config, self.ranks)
        checkpoint.load(self.engine, run_dir, one)
        self.anchors = Anchors(self.engine, Session(self.ranks, None, Stop()), self.config, run_dir)
        self.trainer = trainer_fingerprint(self.config, policy)
        self._hold(one.saved.version, one.saved.weights_digest)

    def run(self, past: Past) -> Again:
        """The next update after those run so far."""
        again = rerun(self.engine, self.config, past, self.anchors.score_live)
        self._hold(past.record.version_out, again.weights_digest)
        return again

    def _hold(self, version: int, weights_digest: str) -> None:
        self.anchors.published(VersionNotice(version, "", "", weights_digest), self.engine.full_state())

    def _model(self, run_dir: Path, one: Checkpoint) -> Path:
        """Any folder with a model of this shape: its weights are replaced. The run's own, so that the run is enough."""
        stored = run_dir / version_path(one.saved.version)
        return stored if (stored / "config.json").is_file() else Path(self.config.model.path)
