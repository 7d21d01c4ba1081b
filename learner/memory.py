"""Training state beside DeepSpeed's: what a recipe carries from update to update. It is part of every checkpoint.

It moves only with an update that makes a step, so a rerun from the checkpoint repeats it.
"""

from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from correction.ewma import ewma_step
from wire.digest import digest

FACTS, ANCHOR = "memory.json", "anchor.safetensors"


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward_moment: float | None
    anchor_mass: float


class Memory:
    """reward_moment: running mean of squared centred rewards (reinforce_pp_ema), None before the first step.
    anchor: running average of the weights (prox = ewma), float32, on rank 0 only; anchor_mass 0 means that there is none."""

    def __init__(self) -> None:
        self.reward_moment: float | None = None
        self.anchor: dict[str, Tensor] = {}
        self.anchor_mass = 0.0

    def restart_anchor(self, state: dict[str, Tensor]) -> None:
        """The average becomes the live weights (rank 0's `state`, empty elsewhere)."""
        self.anchor = {name: tensor.float().clone() for name, tensor in state.items()}
        self.anchor_mass = 1.0

    def follow(self, state: dict[str, Tensor], beta: float) -> None:
        """One more version: the average moves to the live weights."""
        mass = self.anchor_mass
        for name, tensor in state.items():
            self.anchor[name], _ = ewma_step(self.anchor[name], mass, tensor.float(), beta=beta)
        self.anchor_mass = beta * mass + 1

    def summary(self) -> dict[str, Any]:
        """For the record of an update, on rank 0; empty when nothing is carried."""
        found: dict[str, Any] = {} if self.reward_moment is None else {"reward_moment": self.reward_moment}
        if self.anchor_mass:
            found |= {"anchor_mass": self.anchor_mass,
                      "anchor": digest(*(part for name, tensor in sorted(self.anchor.items())
                                         for part in (name.encode(), tensor.numpy().tobytes())))}
        return found

    def save(self, folder: Path) -> None:
        """On rank 0. Nothing is written when nothing is carried."""
        if self.reward_moment is None and not self.anchor_mass:
            return
        (folder / FACTS).write_bytes(msgspec.json.encode(Facts(self.reward_moment, self.anchor_mass)))
        if self.anchor:
            save_file({name: tensor.contiguous() for name, tensor in self.anchor.items()}, folder / ANCHOR)

    def load(self, folder: Path, *, first: bool) -> None:
        """On every rank, from a checkpoint whose digests were checked; the average itself only where `first`."""
        facts = Facts(None, 0.0)
        if (folder / FACTS).exists():
            facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=Facts)
        self.reward_moment, self.anchor_mass = facts.reward_moment, facts.anchor_mass
        self.anchor = load_file(folder / ANCHOR) if first and facts.anchor_mass else {}
