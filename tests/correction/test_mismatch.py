"""Engine correctors, filters and group mass on literal numbers."""

import math

import pytest
import torch
from torch import Tensor

from correction.filters import carm, geometric_filter, k3_filter, sequence_filter, veto
from correction.groupmass import cap_group_mass
from correction.mismatch import binary_kl, icepop, kpop, tis

NAN = math.nan


def tensor(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def logs(*ratios: float) -> Tensor:
    return tensor(*ratios).log()


def every(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_tis_caps_from_above_only() -> None:
    x = logs(1e-3, 0.5, 1.0, 1.9, 2.1, 1e6)
    factor = tis(x, every(x), cap=2.0)
    assert factor.weight_RT[0].tolist() == pytest.approx([1e-3, 0.5, 1.0, 1.9, 2.0, 2.0], rel=1e-12)
    assert float(factor.weight_RT.max()) == 2.0
    assert bool(factor.keep_RT.all())


def test_tis_is_exactly_one_at_equal_log_probs() -> None:
    x = torch.zeros(2, 3)
    for level in ("token", "sequence", "geometric"):
        assert torch.equal(tis(x, every(x), level=level).weight_RT, torch.ones(2, 3))


def test_tis_levels_run_over_masked_in_tokens() -> None:
    x, mask = tensor(0.1, NAN, 0.3, NAN), torch.tensor([[True, False, True, False]])
    sequence, geometric = (tis(x, mask, level=level).weight_RT[0].tolist() for level in ("sequence", "geometric"))
    assert sequence == pytest.approx([math.exp(0.4), 0, math.exp(0.4), 0])
    assert geometric == pytest.approx([math.exp(0.2), 0, math.exp(0.2), 0])


def test_icepop_bounds_are_inclusive_and_outside_is_zero_not_the_bound() -> None:
    x = tensor(0.0, math.log(0.5), math.log(0.499), math.log(5.01), -50.0, 800.0)
    factor = icepop(x, every(x))
    assert factor.keep_RT[0].tolist() == [True, True, False, False, False, False]
    assert factor.weight_RT[0].tolist() == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert icepop(x, every(x), low=1.0, high=1.0).keep_RT[0].tolist() == [True] + [False] * 5


def test_binary_kl_golden_numbers() -> None:
    p, q = logs(0.001, 0.3), logs(0.05, 0.1)
    assert binary_kl(p, q)[0].tolist() == pytest.approx([0.0463, 0.1537], abs=5e-5)
    assert binary_kl(q, p)[0].tolist() == pytest.approx([0.1478, 0.1163], abs=5e-5)


def test_kpop_needs_both_directions() -> None:
    p, q = logs(0.001, 0.3), logs(0.05, 0.1)
    assert kpop(p, q, every(p), threshold=0.1).keep_RT.tolist() == [[False, False]]  # one direction passes for p=.001
    assert kpop(p, q, every(p), threshold=0.148).keep_RT.tolist() == [[True, False]]
    assert kpop(p, q, every(p), threshold=0.16, carry="one").weight_RT.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kpop_at_certainty(dtype: torch.dtype) -> None:
    zero, tiny = torch.zeros(1, 1, dtype=dtype), torch.full((1, 1), -80.0, dtype=dtype)
    mask = every(zero)
    assert kpop(zero, zero, mask, threshold=0.0).weight_RT.item() == 1.0
    assert kpop(tiny, zero, mask, threshold=1.0).weight_RT.item() == 0.0
    assert bool(binary_kl(tiny, zero).isfinite())


@pytest.mark.parametrize(("q", "low", "high"), [(0.9, 0.910, 1.064), (0.5, 0.759, 1.241), (0.1, 0.424, 1.81)])
def test_kpop_windows_at_threshold_003(q: float, low: float, high: float) -> None:
    ratio = torch.linspace(0.2, min(2.0, 0.999 / q), 4001, dtype=torch.float64)[None, :]
    kept = ratio[kpop((ratio * q).log(), torch.full_like(ratio, q).log(), every(ratio), threshold=0.03).keep_RT]
    assert (float(kept.min()), float(kept.max())) == pytest.approx((low, high), abs=1.5e-3 * high / low)


def test_response_filters() -> None:
    x = torch.tensor(
        [[0.01, 0.01, 0.01, NAN], [0.2, -0.2, 0.0, 0.0], [-0.1, NAN, NAN, NAN], [0.0, 0.0, -9.3, NAN]],
        dtype=torch.float64,
    )
    mask = ~x.isnan()
    for factor, keep in (
        (sequence_filter(x, mask, low=0.95, high=1.02), [False, True, False, False]),
        (geometric_filter(x, mask, low=0.98, high=1.011), [True, True, False, False]),
        (carm(x, mask, threshold=1.05), [True, False, False, False]),  # the signs of row 1 do not cancel here
        (k3_filter(x, mask, threshold=0.001), [True, False, False, False]),
        (k3_filter(x, mask, threshold=0.0101), [True, True, True, False]),
        (veto(x, mask), [True, True, True, False]),
    ):
        assert torch.equal(factor.keep_RT, mask & torch.tensor(keep)[:, None])
        assert torch.equal(factor.weight_RT, factor.keep_RT.double())


def test_length_trap_hits_the_sum_and_not_the_mean() -> None:
    x = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    assert not bool(sequence_filter(x, every(x), low=0.5, high=2.0).keep_RT.any())
    assert bool(geometric_filter(x, every(x), low=0.998, high=1.002).keep_RT.all())


def test_group_mass_golden_numbers() -> None:
    group = torch.tensor([5, -1, 5, -1, 5, -1, 5, -1])
    ratio = torch.tensor([4, 0.5, 2, 1, 1, 0.5, 1, 1], dtype=torch.float64)
    weight = cap_group_mass(ratio.log(), group, cap=4.0)
    assert weight.tolist() == pytest.approx([2, 0.5, 1, 1, 0.5, 0.5, 0.5, 1], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_mass_survives_long_responses(dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([2000.0, 1999.0, -3000.0, -math.inf], dtype=dtype)
    weight = cap_group_mass(log_ratio, torch.zeros(4, dtype=torch.int64), cap=4.0)
    assert weight.tolist() == pytest.approx([4 / (1 + math.exp(-1)), 4 / (1 + math.e), 0.0, 0.0], rel=1e-5)


def test_group_mass_takes_a_cap_per_response() -> None:
    group = torch.tensor([0, 1, 0, 1, 1])
    weight = cap_group_mass(torch.full((5,), math.log(3.0)), group, cap=torch.tensor([2.0, 3.0, 2.0, 3.0, 3.0]))
    assert weight.tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_group_mass_refuses_what_is_no_log_ratio(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or \\+inf"):
        cap_group_mass(torch.tensor([0.0, bad]), torch.tensor([0, 0]), cap=2.0)


def test_bad_settings_are_refused() -> None:
    x = torch.zeros(1, 2)
    for call in (
        lambda: tis(x, every(x), cap=0.0),
        lambda: tis(x, every(x), level="word"),
        lambda: icepop(x, every(x), low=2.0, high=1.0),
        lambda: kpop(x, x, every(x), threshold=-1.0),
        lambda: kpop(x, x, every(x), threshold=0.1, carry="two"),
        lambda: cap_group_mass(torch.zeros(1), torch.tensor([0]), cap=0.0),
        lambda: sequence_filter(x, every(x), low=2.0, high=1.0),
        lambda: carm(x, every(x), threshold=0.9),
        lambda: k3_filter(x, every(x), threshold=-1.0),
        lambda: veto(x, every(x), floor=0.0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError, match="mask must be bool"):
        tis(x, torch.ones(1, 2))
    with pytest.raises(ValueError, match="does not match the mask"):
        icepop(x, every(x)[:, :1])
