"""The numbers of an update's record, on a table small enough to do by hand."""

import json
from math import log
from typing import Any

import pytest
import torch

from configs.recipe_table import Recipe
from correction.factor import Factor
from correction.pipeline import Correction
from learner.batch import Table
from learner.measure import measure, seen_by_alarms

T, F = True, False
MASK = torch.tensor([[T, T, F], [T, T, T]])
RESPONSE = torch.tensor([[T, T, T], [T, T, T]])
NAN = float("nan")


def logs(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def measured(keep: torch.Tensor | None = None, stale_prox: float = 2.0, **recipe: Any) -> dict[str, Any]:
    """Row 0: engine "a", version 4, reward 1; row 1: engine "b", version 3, reward 0. version_in 4. Columns are made from their ratios."""
    mu = logs([[0.1, 0.1, NAN], [0.1, 0.1, 0.1]])
    old = mu + logs([[1, 2, NAN], [1, 1, 4]])
    prox = old + logs([[1, 1, NAN], [stale_prox, 1, 1]])
    cur = prox + logs([[1, 1.5, NAN], [1, 0.5, 1]])
    kept = MASK if keep is None else keep & MASK
    weight = torch.where(kept, torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 3.0]], dtype=torch.float64), 0.0)
    correction = Correction(weight, kept, {"engine": Factor(weight, kept)}, {"tokens": 5, "kept": int(kept.sum())})
    version = torch.tensor([[4, 4, 4], [3, 3, 3]])
    table = Table(
        prompt_lens_R=torch.tensor([1, 1]), response_lens_R=torch.tensor([3, 3]), response_RT=RESPONSE, mask_RT=MASK, mu_RT=mu, old_RT=old,
        source_RT=torch.zeros(2, 3, dtype=torch.uint8), version_RT=version, group_R=torch.tensor([0, 0]),
        reward_R=torch.tensor([1.0, 0.0]), temperature_R=torch.ones(2), engines=("a" * 64, "b" * 64))
    advantage = torch.tensor([0.5, -0.5], dtype=torch.float64)
    return measure(table, prox, cur, advantage, correction, Recipe(**recipe), 4)


def test_factors_over_all_tokens_and_by_age() -> None:
    found = measured()
    assert found["mismatch"] == pytest.approx({
        "mean": log(8) / 5, "mean_abs": log(8) / 5, "max_abs": log(4), "k1": -log(8) / 5, "k3": (1 + 3 - log(8)) / 5, "chi2": (1 + 9) / 5,
        "ess": 9**2 / (5 * 23), "max_ratio": 4.0})
    assert found["staleness_ratio"]["mean"] == pytest.approx(log(2) / 5)
    assert found["update_ratio"]["max_ratio"] == pytest.approx(1.5)
    assert found["total_ratio"]["chi2"] == pytest.approx((1 + 1 + 9) / 5)
    assert list(found["lags"]) == ["0", "1"]
    assert (found["lags"]["0"]["tokens"], found["lags"]["1"]["tokens"]) == (2, 3)
    assert found["lags"]["0"]["staleness_ratio"]["max_abs"] == 0.0
    assert found["lags"]["1"]["staleness_ratio"]["chi2"] == pytest.approx(1 / 3, rel=1e-3)
    assert found["lags"]["1"]["mismatch"]["max_ratio"] == pytest.approx(4.0)
    assert found["engines"] == pytest.approx({"a" * 12: log(2) / 2, "b" * 12: log(4) / 3})


def test_what_the_masks_took_by_quadrant_and_age() -> None:
    found = measured(torch.tensor([[T, F, T], [F, T, T]]))
    assert found["masked"] == pytest.approx(0.4)
    assert found["masked_by"] == {"positive_low": 0.0, "positive_high": 0.2, "negative_low": 0.0, "negative_high": 0.2}
    assert found["masked_correct"] == pytest.approx(0.2)
    assert found["kept_mass"] == pytest.approx((1 + 1 + 4) / (1 + 2 + 2 + 1 + 4))
    assert found["weight_mean"] == pytest.approx(5 / 3)
    assert found["ess_corrected"] == pytest.approx(25 / (5 * 11))
    assert found["lags"]["0"]["masked"] == 0.5
    assert found["lags"]["0"]["kept_mass"] == pytest.approx(1 / 3, rel=1e-3)
    assert found["lags"]["1"]["ess_corrected"] == pytest.approx(16 / (3 * 10), rel=1e-3)


def test_what_the_clip_took_by_quadrant() -> None:
    found = measured(base="old")  # cur/old: 1, 1.5 | 2, .5, 1 with advantages + and -
    assert found["clipped"] == pytest.approx(0.4)
    assert found["clipped_by"] == {"positive_low": 0.0, "positive_high": 0.2, "negative_low": 0.2, "negative_high": 0.0}
    assert measured(objective="score")["clipped_by"] == dict.fromkeys(found["clipped_by"], 0.0)


def test_alarms_see_the_stale_tokens() -> None:
    seen = seen_by_alarms(measured())
    assert (seen.stale_tokens, seen.masked, seen.weight_mean) == (3, 0.0, pytest.approx(1.6))
    assert seen.stale_drift == pytest.approx(log(2), rel=1e-3)
    assert seen_by_alarms(measured(stale_prox=1.0)).stale_drift == 0.0


def test_the_whole_is_a_short_line_of_plain_json() -> None:
    assert len(json.dumps(measured(), allow_nan=False)) < 4000


def test_everything_masked_is_measured_too() -> None:
    found = measured(torch.zeros_like(MASK))
    assert (found["masked"], found["kept_mass"], found["ess_corrected"]) == (1.0, 0.0, 0.0)
    assert seen_by_alarms(found).weight_mean == 1.0
