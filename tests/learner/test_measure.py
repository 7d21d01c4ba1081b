"""The numbers of an update's record, on a table small enough to do by hand."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.recipe_table import Recipe
from correction.alarms import Watch, look
from correction.factor import Factor
from correction.pipeline import Correction
from learner.batch import Table
from learner.loss import whole_surrogate
from learner.measure import measure, seen_by_alarms, watched
from learner.prepare import Prepared

T, F = True, False
MASK = torch.tensor([[T, T, F], [T, T, T]])
RESPONSE = torch.tensor([[T, T, T], [T, T, T]])
NAN = float("nan")
QUADRANTS = dict.fromkeys(("positive_low", "positive_high", "negative_low", "negative_high"), 0.0)


def logs(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def measured(keep: torch.Tensor | None = None, stale_prox: float = 2.0, advantages: tuple[float, float] = (0.5, -0.5),
             accepted: torch.Tensor | None = None, update: float = 1.0, mismatch: float = 4.0, **recipe: Any) -> dict[str, Any]:
    """Row 0: engine "a", version 4, reward 1; row 1: engine "b", version 3, reward 0. version_in 4. Columns are made from their ratios."""
    mu = logs([[0.1, 0.1, NAN], [0.1, 0.1, 0.1]])
    old = mu + logs([[1, 2, NAN], [1, 1, mismatch]])
    prox = old + logs([[1, 1, NAN], [stale_prox, 1, 1]])
    cur = prox + logs([[1, 1.5, NAN], [update, 0.5, 1]])
    kept = MASK if keep is None else keep & MASK
    weight = torch.where(kept, torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 3.0]], dtype=torch.float64), 0.0)
    correction = Correction(weight, kept, {"engine": Factor(weight, kept)}, {"tokens": 5, "kept": int(kept.sum()), "capped": 2})
    version = torch.tensor([[4, 4, 4], [3, 3, 3]])
    table = Table(
        prompt_lens_R=torch.tensor([1, 1]), response_lens_R=torch.tensor([3, 3]), response_RT=RESPONSE, mask_RT=MASK, mu_RT=mu, old_RT=old,
        source_RT=torch.zeros(2, 3, dtype=torch.uint8), version_RT=version, group_R=torch.tensor([0, 0]),
        reward_R=torch.tensor([1.0, 0.0]), temperature_R=torch.ones(2), engines=("a" * 64, "b" * 64))
    advantage = torch.tensor(advantages, dtype=torch.float64)
    objective = whole_surrogate(Recipe(**recipe), Prepared(table, advantage, prox, correction, accepted_RT=accepted), cur)
    return measure(table, prox, cur, advantage, correction, objective.side_RT, 4)


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
    assert found["capped"] == pytest.approx(0.4)
    assert found["masked_by"] == {"positive_low": 0.0, "positive_high": 0.2, "negative_low": 0.0, "negative_high": 0.2}
    assert found["masked_correct"] == pytest.approx(0.2)
    assert found["kept_mass"] == pytest.approx((1 + 1 + 4) / (1 + 2 + 2 + 1 + 4))
    assert found["weight_mean"] == pytest.approx(5 / 3)
    assert found["ess_corrected"] == pytest.approx(25 / (5 * 11))
    assert found["lags"]["0"]["masked"] == 0.5
    assert found["lags"]["0"]["kept_mass"] == pytest.approx(1 / 3, rel=1e-3)
    assert found["lags"]["1"]["ess_corrected"] == pytest.approx(16 / (3 * 10), rel=1e-3)


# What a bound holds, as shares of the 5 tokens. cur/old is 1, 1.5 | 2, .5, 1 with advantages + and -; over each response 1.22 | 1, over
# each prefix 1, 1.22 | 2, 1, 1; cur/mu 1, 3 | 2, .5, 4; old .1, .2 | .1, .1, .4.
@pytest.mark.parametrize(("recipe", "expected"), [
    ({"objective": "score"}, {}),
    ({"objective": "unit"}, {}),
    ({"objective": "ppo"}, {"positive_high": 0.2, "negative_low": 0.2}),
    ({"objective": "ppo", "clip_high": 0.6, "dual_clip": 1.8}, {"negative_low": 0.2, "negative_high": 0.2}),
    ({"objective": "ppo", "base": "prox"}, {"positive_high": 0.2, "negative_low": 0.2}),
    ({"objective": "gppo"}, {"positive_high": 0.2, "negative_low": 0.2}),  # the gradient is the boundary's, not 0
    ({"objective": "gppo", "dual_clip": 1.8}, {"positive_high": 0.2, "negative_low": 0.2, "negative_high": 0.2}),
    ({"objective": "gspo"}, {"positive_high": 0.4}),
    ({"objective": "luspo"}, {"positive_high": 0.4}),
    ({"objective": "gspo", "clip_high": 0.3}, {}),
    ({"objective": "cispo", "cap": 1.4}, {"positive_high": 0.2, "negative_high": 0.2}),
    ({"objective": "cispo", "cap": 1.6}, {"negative_high": 0.2}),
    ({"objective": "ripo", "delta": 0.04}, {"positive_high": 0.2}),
    ({"objective": "ripo", "delta": 0.02}, {"positive_high": 0.2, "negative_low": 0.2}),
    ({"objective": "fdiv", "divergence": "tv", "delta": 0.06}, {"positive_high": 0.2}),  # |p - q| is .1 and .05
    ({"objective": "fdiv", "divergence": "tv", "delta": 0.04}, {"positive_high": 0.2, "negative_low": 0.2}),
    ({"objective": "tapo"}, {"positive_high": 0.2}),
    ({"objective": "tapo", "clip_high": 0.33}, {}),
    ({"objective": "minirl", "clip_high": 0.27}, {"positive_high": 0.2, "negative_low": 0.2}),
    ({"objective": "minirl", "clip_high": 0.6, "cap": 3.5}, {"negative_low": 0.2, "negative_high": 0.2}),  # the cap is on cur/mu
], ids=str)
def test_what_the_objective_clips_by_quadrant(recipe: dict[str, Any], expected: dict[str, float]) -> None:
    found = measured(**recipe)
    assert found["clipped_by"] == {**QUADRANTS, **expected}
    assert found["clipped"] == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize(("recipe", "share"), [({"objective": "gspo"}, 0.6), ({"objective": "luspo"}, 0.6), ({"objective": "tapo"}, 0.6),
                                               ({"objective": "ppo"}, 0.4)], ids=str)
def test_the_side_is_that_of_the_ratio_which_is_bounded(recipe: dict[str, Any], share: float) -> None:
    """The second response is now .5, .5, 1 times as likely: .63 as a whole, and its last token, of ratio 1, is held with it."""
    found = measured(stale_prox=0.5, **recipe)["clipped_by"]
    assert (found["negative_low"], found["negative_high"]) == (share, 0.0)


def test_neither_a_token_that_sis_accepted_nor_one_without_an_advantage_is_clipped() -> None:
    accepted = torch.tensor([[F, T, F], [F, F, F]])
    assert measured(accepted=accepted)["clipped_by"] == {**QUADRANTS, "negative_low": 0.2}
    assert measured(advantages=(0.0, -0.5))["clipped_by"] == {**QUADRANTS, "negative_low": 0.2}
    assert measured(advantages=(0.0, 0.0))["clipped"] == 0.0


def test_what_masks_and_clip_took_of_each_age() -> None:
    lags = measured(torch.tensor([[T, F, T], [F, T, T]]))["lags"]
    assert [lags[age]["clipped_by"] for age in "01"] == [{**QUADRANTS, "positive_high": 0.5}, {**QUADRANTS, "negative_low": 0.3333}]
    assert [lags[age]["masked_by"] for age in "01"] == [{**QUADRANTS, "positive_high": 0.5}, {**QUADRANTS, "negative_high": 0.3333}]
    assert [(lags[age]["clipped"], lags[age]["masked_correct"]) for age in "01"] == [(0.5, 0.5), (0.3333, 0.0)]
    assert lags["1"]["total_ratio"]["chi2"] == pytest.approx((1 + 9) / 3, rel=1e-3)


def test_clamped_counts_the_tokens_of_every_ratio_that_the_loss_can_read() -> None:
    assert measured()["clamped"] == seen_by_alarms(measured()).clamped == 0
    found = measured(stale_prox=6e8)  # one token: prox/old, prox/mu and cur/old are e^20.2, cur/prox 1
    assert (found["clamped"], list(look(Watch(), seen_by_alarms(found))[1])[-1]) == (1, "clamped")
    assert measured(stale_prox=2e8)["clamped"] == 0  # e^19.1
    assert measured(mismatch=6e8)["clamped"] == 1  # old/mu alone


def test_cur_over_old_counts_as_clamped_where_neither_of_its_two_parts_does() -> None:
    assert measured(stale_prox=2e8, update=3.0)["clamped"] == 1  # e^19.1 and e^1.1


def test_alarms_see_the_stale_tokens() -> None:
    seen = seen_by_alarms(measured())
    assert (seen.stale_tokens, seen.masked, seen.weight_mean) == (3, 0.0, pytest.approx(1.6))
    assert (seen.ess, seen.ess_raw) == (pytest.approx(8**2 / (5 * 16)), pytest.approx(10**2 / (5 * 26)))  # of the weights, and of prox/mu
    assert seen.mismatch == pytest.approx(log(8) / 5)
    assert seen.engines == pytest.approx({"a" * 12: log(2) / 2, "b" * 12: log(4) / 3})
    below = measured()
    below["mismatch"] |= {"mean": -0.25, "mean_abs": 0.5}
    assert seen_by_alarms(below).mismatch == 0.5  # of absolute values: errors of both signs would cancel
    assert seen.stale_drift == pytest.approx(log(2), rel=1e-3)
    assert seen_by_alarms(measured(stale_prox=1.0)).stale_drift == 0.0


def test_a_learner_that_starts_again_goes_on_watching_the_trends(tmp_path: Path) -> None:
    lines = [measured() | {"skipped": False} for _ in range(16)]
    for number, line in enumerate(lines):  # engine b's mismatch doubles after 8 updates
        line["engines"] = {"a": 0.125, "b": 0.25 if number < 8 else 0.5}
    before, alarms = Watch(), dict[str, str]()
    for line in lines:
        before, alarms = look(before, seen_by_alarms(line))
    file = tmp_path / "metrics.jsonl"
    assert watched(file) == (Watch(), set())
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"skipped": True, "reward": 0.5}]))
    after, alarmed = watched(file)
    assert after == before
    assert after.engines["b"].ends == (0.25, 0.5)
    assert alarmed == set(alarms) == {"mismatch_trend"}


def test_the_whole_is_a_short_line_of_plain_json() -> None:
    assert len(json.dumps(measured(), allow_nan=False)) < 4000


def test_everything_masked_is_measured_too() -> None:
    found = measured(torch.zeros_like(MASK))
    assert (found["masked"], found["kept_mass"], found["ess_corrected"]) == (1.0, 0.0, 0.0)
    assert seen_by_alarms(found).weight_mean == 1.0
