"""Advantages, aggregation and reference KL on literal numbers."""

import math

import pytest
import torch
from torch import Tensor

from correction.reference import reference_kl
from learner.advantage import (
    ESTIMATORS,
    ema_scaled_advantages,
    group_advantages,
    overlong_penalty,
    zcpo_coefficients,
)
from learner.objective import aggregate, denominator_of

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_one_right_of_four() -> None:
    r = rewards(1, 0, 0, 0)
    expect = {
        "grpo": [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)],
        "dr_grpo": [0.75, -0.25, -0.25, -0.25],
        "rloo": [1, -1 / 3, -1 / 3, -1 / 3],
        "reinforce_pp": [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)],
    }
    for estimator, values in expect.items():
        advantage = group_advantages(r, ONE_GROUP, estimator=estimator)
        assert advantage.tolist() == pytest.approx(values, abs=1e-5), estimator


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"remax"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_contrast_gets_exactly_zero(estimator: str, dtype: torch.dtype) -> None:
    """In float64 the mean of three times 0.1 is not 0.1."""
    r = torch.tensor([0.1, 1.0, 0.1, 0.1, 0.0], dtype=dtype)
    group = torch.tensor([0, 9, 0, 0, 9])
    advantage = group_advantages(r, group, estimator=estimator)
    assert advantage[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert bool((advantage[[1, 4]] != 0).all())


def test_a_group_of_one() -> None:
    r, group = rewards(1, 0, 5), torch.tensor([0, 0, 42])
    for estimator in ("grpo", "dr_grpo", "reinforce_pp"):
        assert group_advantages(r, group, estimator=estimator)[2] == 0.0
    with pytest.raises(ValueError, match="rloo needs at least two rewards per group; group 42 has one"):
        group_advantages(r, group, estimator="rloo")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_raises(bad: float) -> None:
    for estimator in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
        with pytest.raises(ValueError, match="non-finite reward at response 2"):
            group_advantages(rewards(1, 0, bad, 0), ONE_GROUP, estimator=estimator)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="unknown advantage estimator 'gae'; known: grpo"):
        group_advantages(rewards(1, 0, 0, 0), ONE_GROUP, estimator="gae")
    with pytest.raises(TypeError, match="rewards must be floating point"):
        group_advantages(torch.tensor([1, 0, 0, 0]), ONE_GROUP, estimator="grpo")
    with pytest.raises(TypeError, match="group labels must be 1-d int64"):
        group_advantages(rewards(1, 0, 0, 0), ONE_GROUP.int(), estimator="grpo")
    with pytest.raises(ValueError, match=r"\(3,\) rewards for \(4,\) group labels"):
        group_advantages(rewards(1, 0, 0), ONE_GROUP, estimator="grpo")
    with pytest.raises(ValueError, match="greedy rewards go with estimator remax"):
        group_advantages(rewards(1, 0, 0, 0), ONE_GROUP, estimator="remax")


def test_remax_subtracts_the_greedy_reward() -> None:
    advantage = group_advantages(
        rewards(1, 0, 1, 0), ONE_GROUP, estimator="remax", greedy_reward_R=rewards(1, 1, 0, 0)
    )
    assert advantage.tolist() == [0.0, -1.0, 1.0, 0.0]


def test_reinforce_pp_ema_scale_is_carried_in_batch_order() -> None:
    advantage, moment = ema_scaled_advantages(rewards(2, 0, 1, 1), ONE_GROUP, None, decay=0.9)
    assert moment == pytest.approx(0.5)
    assert advantage.tolist() == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0], abs=1e-5)
    advantage, moment = ema_scaled_advantages(rewards(4, 0, 0, 0), ONE_GROUP, moment, decay=0.9)
    assert moment == pytest.approx(0.9 * 0.5 + 0.1 * 3.0)
    assert advantage[0].item() == pytest.approx(3 / math.sqrt(0.75), rel=1e-5)


def test_zcpo_golden_numbers() -> None:
    coefficient = zcpo_coefficients(rewards(1, 0, 0, 1), ONE_GROUP, rewards(0.02, 0.01, 0.03, 0.02))
    assert coefficient.tolist() == pytest.approx([1, -0.96, -1.04, 1], abs=1e-12)
    one_right = zcpo_coefficients(rewards(1, 0, 0, 0), ONE_GROUP, rewards(0, 0, 0, 0))
    assert one_right.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-12)  # over max |A| = .75, not a deviation
    shifted = zcpo_coefficients(rewards(1, 0, 0, 1), ONE_GROUP, rewards(1.02, 1.01, 1.03, 1.02))
    assert shifted.tolist() == pytest.approx(coefficient.tolist(), abs=1e-12)
    assert float(coefficient.sum()) == pytest.approx(0, abs=1e-12)
    assert zcpo_coefficients(rewards(1, 1, 1, 1), ONE_GROUP, rewards(0.02, 0.01, 0.03, 0.02)).tolist() == [0.0] * 4


def test_overlong_shaping() -> None:
    length = rewards(100, 16384, 16385, 18432, 20480, 30000)
    assert overlong_penalty(length).tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -1, -1])
    with pytest.raises(ValueError, match="0 < cache <= limit"):
        overlong_penalty(length, limit=10, cache=11)


# two responses of 3 and 2 tokens; the engine corrector dropped the first token of the first
LOSS = torch.tensor([[100.0, 2.0, 4.0], [6.0, 8.0, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
KEPT = torch.tensor([[False, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("mode", "original", "kept"),
    [
        ("token_mean", 20 / 5, 20 / 4),
        ("sequence_mean", (6 / 3 + 14 / 2) / 2, (6 / 2 + 14 / 2) / 2),
        ("constant", 20 / (2 * 10), 20 / (2 * 10)),
        ("length_weighted", 20 / 2, 20 / 2),
    ],
)
def test_both_denominators(mode: str, original: float, kept: float) -> None:
    assert float(aggregate(LOSS, KEPT, mode=mode, constant=10, count_mask_RT=MASK)) == pytest.approx(original)
    assert float(aggregate(LOSS, KEPT, mode=mode, constant=10)) == pytest.approx(kept)
    assert float(aggregate(LOSS, KEPT, mode=mode, denominator=denominator_of(MASK, mode=mode, constant=10),
                           count_mask_RT=MASK)) == pytest.approx(original)  # fmt: skip


def test_responses_without_a_counted_token_are_left_out_of_the_mean_of_means() -> None:
    loss = torch.cat([LOSS, torch.full((1, 3), math.nan, dtype=torch.float64)])
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    assert denominator_of(mask, mode="sequence_mean") == 2.0
    assert denominator_of(mask, mode="constant", constant=10) == 30.0
    assert float(aggregate(loss, mask, mode="sequence_mean")) == pytest.approx((106 / 3 + 14 / 2) / 2)
    second_only = MASK & torch.tensor([[False], [True]])
    assert float(aggregate(LOSS, MASK, mode="sequence_mean", count_mask_RT=second_only)) == 14 / 2


def test_nothing_to_divide_by_raises_unless_the_global_denominator_is_given() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="skip the step instead"):
        aggregate(LOSS, none, mode="token_mean")
    assert float(aggregate(LOSS, none, mode="token_mean", denominator=7.0)) == 0.0
    with pytest.raises(ValueError, match="needs a constant > 0"):
        aggregate(LOSS, MASK, mode="constant")
    for denominator in (None, 3.0):
        with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
            aggregate(LOSS, MASK, mode="mean", denominator=denominator)


def test_k3_never_pushes_away_from_the_reference() -> None:
    """Beyond the clamp its slope is 0, not that of the unclamped `-d`, which would lower cur further."""
    cur = torch.tensor([[-22.5, -80.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -0.5, -50.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad(reference_kl(cur, ref, torch.ones(1, 3, dtype=torch.bool), estimator="k3").sum(), cur)
    assert slope.tolist() == [[0.0, 0.0, 1.0]]


def test_reference_kl_values_and_gradients() -> None:
    cur = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[-1.5, -1.0, 0.0]], dtype=torch.float64), torch.tensor([[True, True, False]])
    values = {
        "k1": ([0.5, -1.0, 0.0], [1.0, 1.0, 0.0]),
        "k2": ([0.125, 0.5, 0.0], [0.5, -1.0, 0.0]),
        "k3": ([math.exp(-0.5) - 0.5, math.e - 2, 0.0], [1 - math.exp(-0.5), 1 - math.e, 0.0]),
    }
    for estimator, (value, slope) in values.items():
        kl = reference_kl(cur, ref, mask, estimator=estimator)
        assert kl[0].tolist() == pytest.approx(value), estimator
        assert torch.autograd.grad(kl.sum(), cur)[0][0].tolist() == pytest.approx(slope), estimator
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        reference_kl(cur, ref, mask, estimator="k4")
