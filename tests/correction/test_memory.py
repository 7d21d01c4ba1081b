"""Correction plus objective keeps to twelve float32 tensors of the batch's shape, columns not counted: every method of the bench."""

import pytest
import torch

from correction import masked
from correction.choice import CorrectionChoice
from learner.objective import token_losses
from scripts.bench.correction import TENSOR, Batch, cases, peak_bytes, run


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


@pytest.mark.parametrize(("name", "choice"), list(cases()), ids=[name for name, _ in cases()])
def test_at_most_twelve_tensors_at_the_peak(batch: Batch, name: str, choice: CorrectionChoice) -> None:
    batch.cur.grad = None
    assert 4 * TENSOR < peak_bytes(lambda: run(batch, choice)) <= 12 * TENSOR


def test_the_measure_sees_a_temporary_that_is_freed_at_once() -> None:
    assert peak_bytes(lambda: torch.zeros(1000).add(1.0).sum()) == pytest.approx(8000, rel=0.02)


@pytest.mark.parametrize("block", [1, 7 * 40, 10**6])
@pytest.mark.parametrize("objective", ["tapo", "gspo", "ripo", "minirl"])
def test_blocks_of_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch, objective: str, block: int) -> None:
    small = Batch(16, 40)
    hyper = {"tapo": {"clip_low": 0.01, "clip_high": 0.02}, "gspo": {"clip_low": 1e-3, "clip_high": 1e-3}, "ripo": {"delta": 1e-4},
             "minirl": {"mu_RT": small.table.mu_RT}}[objective]

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        cur = small.cur.detach().clone().requires_grad_()
        found = token_losses(cur, small.table.old_RT, small.advantage, small.table.mask_RT, objective=objective, **hyper)
        found.sum().backward()
        assert cur.grad is not None
        return found.detach(), cur.grad

    whole = losses()
    monkeypatch.setattr(masked, "BLOCK_ELEMENTS", block)
    for one, other in zip(losses(), whole, strict=True):
        assert torch.equal(one, other)
