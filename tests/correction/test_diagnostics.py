"""Drift scalars on literal numbers."""

import math

import pytest
import torch

from correction.diagnostics import (
    effective_sample_size,
    k3,
    kept_mass,
    quadrant_shares,
    ratio_summary,
)
from correction.ewma import ewma_beta, ewma_step

RATIO = torch.tensor([[0.5, 2.0, math.nan], [1.0, 4.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_effective_sample_size() -> None:
    assert float(effective_sample_size(weights(1, 1, 1, 1))) == 1.0
    assert float(effective_sample_size(weights(1, 0, 0, 0))) == 0.25
    assert float(effective_sample_size(weights(0, 0))) == 0.0
    assert float(effective_sample_size(weights(3, 1, 99), torch.tensor([True, True, False]))) == pytest.approx(0.8)
    assert float(effective_sample_size(torch.tensor([1e30, 1e30]))) == pytest.approx(1.0)
    assert float(effective_sample_size(weights(2, 2), torch.tensor([False, False]))) == 0.0


def test_k3() -> None:
    assert float(k3(weights(0, 0))) == 0.0
    assert float(k3(weights(1, -1))) == pytest.approx((math.e - 2 + math.exp(-1)) / 2)
    assert float(k3(torch.tensor([1.0, math.nan]), torch.tensor([True, False]))) == pytest.approx(math.e - 2)
    assert float(k3(weights(1e-6))) == pytest.approx(5e-13, rel=1e-6, abs=0)  # exp(x) - 1 - x would lose it


def test_ratio_summary() -> None:
    log2 = math.log(2)
    assert ratio_summary(RATIO.log(), MASK) == pytest.approx({
        "mean": 2 * log2 / 5, "mean_abs": 4 * log2 / 5, "k1": -2 * log2 / 5, "k3": (3.5 - 2 * log2) / 5,
        "chi2": (0.25 + 1 + 9) / 5, "ess": 8.5**2 / (5 * 22.25), "max_ratio": 4.0,
    })  # fmt: skip
    assert set(ratio_summary(RATIO.log(), torch.zeros_like(MASK)).values()) == {0.0}


def test_kept_mass() -> None:
    keep = torch.tensor([[True, False, False], [True, False, True]])
    assert kept_mass(RATIO.log(), keep, MASK) == pytest.approx(2.5 / 8.5)
    assert kept_mass(RATIO.log(), keep, torch.zeros_like(MASK)) == 0.0


def test_quadrant_shares_of_what_was_hit() -> None:
    hit = torch.tensor([[True, True, True], [True, True, False]])
    assert quadrant_shares(hit, RATIO.log(), weights(1, -1), MASK) == {
        "positive_low": 0.2, "positive_high": 0.2, "negative_low": 0.0, "negative_high": 0.4}  # fmt: skip
    assert set(quadrant_shares(hit, RATIO.log(), weights(0, 0), MASK).values()) == {0.0}
    assert set(quadrant_shares(hit, RATIO.log(), weights(1, -1), torch.zeros_like(MASK)).values()) == {0.0}


def test_ewma_anchor_is_the_normalised_sum_and_sits_in_mid_window() -> None:
    beta = ewma_beta(8)
    assert beta == 0.8
    versions = [weights(1, 0), weights(5, 1), weights(-2, 3)]
    anchor, mass = torch.zeros(2, dtype=torch.float64), 0.0
    for version in versions:
        anchor, mass = ewma_step(anchor, mass, version, beta=beta)
    total = 0.64 + 0.8 + 1
    assert mass == pytest.approx(total)
    assert anchor.tolist() == pytest.approx([(0.64 + 4 - 2) / total, (0.8 + 3) / total])
    with pytest.raises(ValueError, match="window is >= 0"):
        ewma_beta(-1)
