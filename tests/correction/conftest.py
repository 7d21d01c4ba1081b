"""Random but seeded batches with every role, ragged rows, interior masked slots and interleaved groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    mu: Tensor
    old: Tensor
    prox: Tensor
    cur: Tensor
    ref: Tensor
    mask: Tensor
    group: Tensor
    reward: Tensor
    advantage: Tensor

    COLUMNS = ("mu", "old", "prox", "cur", "ref")

    def poisoned(self, poison: float) -> "Batch":
        """The same batch with every masked slot of every column set to `poison`."""
        return replace(self, **{c: getattr(self, c).masked_fill(~self.mask, poison) for c in self.COLUMNS})

    def rows(self, index: Tensor | slice) -> "Batch":
        names = (*self.COLUMNS, "mask", "group", "reward", "advantage")
        return replace(self, **{name: getattr(self, name)[index] for name in names})


def _make(rows: int = 12, width: int = 9, groups: int = 3, *, seed: int = 0, noise: float = 0.3) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=random, dtype=torch.float64)

    mu = -torch.rand(rows, width, generator=random, dtype=torch.float64) * 3 - 1e-3
    old = (mu + normal(noise)).clamp(max=-1e-6)
    prox = (old + normal(noise)).clamp(max=-1e-6)
    cur = (prox + normal(noise)).clamp(max=-1e-6)
    ref = (mu + normal(noise)).clamp(max=-1e-6)
    length = torch.randint(1, width + 1, (rows,), generator=random)
    mask = torch.arange(width)[None, :] < length[:, None]
    mask[3, 0] = length[3] == 1  # an interior hole: a tool's token, say
    group = torch.arange(rows) % groups * 7 - 3
    reward = torch.randint(0, 3, (rows,), generator=random).double()
    advantage = torch.randn(rows, generator=random, dtype=torch.float64)
    return Batch(mu, old, prox, cur, ref, mask, group, reward, advantage)


@pytest.fixture(name="make_batch", scope="session")
def _make_batch() -> Callable[..., Batch]:
    return _make
