"""What happens exactly at each bound, on which side of it, and that nothing of a weight carries a gradient. Literal numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.bounds import fdiv_bounds
from correction.factor import make_factor
from correction.filters import k3_filter, veto
from correction.groupmass import cap_group_mass
from correction.reference import reference_kl
from correction.staleness import decoupled, m2_mask, m2_range, opsm
from learner.objective import token_losses


def tensor(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def every(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def one_token(objective: str, log_ratio: float, advantage: float, **hyper: Any) -> tuple[float, float]:
    """Value and slope of one token; cur or base is 0, so that their difference is exact."""
    base, cur = tensor(min(-log_ratio, 0.0)), tensor(min(log_ratio, 0.0)).requires_grad_()
    loss = token_losses(cur, base, torch.tensor([advantage], dtype=torch.float64), every(base), objective=objective, **hyper)
    (slope,) = torch.autograd.grad(loss.sum(), cur)
    return float(loss.detach()), float(slope)


TWICE, HALF = math.log(2.0), math.log(0.5)


def test_a_ratio_at_the_clip_itself_is_not_clipped() -> None:
    """TRL's min and clamp let the gradient through there too."""
    assert math.exp(TWICE) == 2.0 and math.exp(HALF) == 0.5
    assert one_token("ppo", TWICE, 1.0, clip_low=0.5, clip_high=1.0) == pytest.approx((-2.0, -2.0))
    assert one_token("ppo", HALF, -1.0, clip_low=0.5, clip_high=1.0) == pytest.approx((0.5, 0.5))
    assert one_token("ppo", TWICE + 1e-9, 1.0, clip_low=0.5, clip_high=1.0) == pytest.approx((-2.0, 0.0))
    assert one_token("ppo", HALF - 1e-9, -1.0, clip_low=0.5, clip_high=1.0) == pytest.approx((0.5, 0.0))


def test_a_ratio_at_the_dual_clip_is_not_held() -> None:
    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual": 2.0}
    for objective in ("ppo", "gppo"):
        assert one_token(objective, TWICE, -1.0, **clip) == pytest.approx((2.0, 2.0))
        assert one_token(objective, TWICE + 1e-9, -1.0, **clip) == pytest.approx((2.0, 0.0))


def test_cispo_has_no_lower_clamp() -> None:
    for ratio in (0.19, 0.01, 1e-4):
        assert one_token("cispo", math.log(ratio), 1.0, cap=5.0)[1] == pytest.approx(-ratio)
        assert one_token("cispo", math.log(ratio), -1.0, cap=5.0)[1] == pytest.approx(ratio)


def test_minirl_caps_the_total_ratio() -> None:
    """cur/mu is e^3 = 20 while cur/old is 1."""
    for cap, slope in ((5.0, -5.0), (1.5, -1.5), (100.0, -math.exp(3.0))):
        assert one_token("minirl", 0.0, 1.0, mu_RT=tensor(-3.0), cap=cap)[1] == pytest.approx(slope)


def test_tapo_never_clips_narrower_than_its_floor() -> None:
    """At the 4th token the schedule's half-width is .4 / 2 = .2; the prefix ratio is 1.25 throughout, then .75."""
    base, ratio = tensor(-1.0, -1.0, -1.0, -1.0), math.log(1.25)
    for floor, slope in ((0.0, 0.0), (0.24, 0.0), (0.26, -1.25)):
        cur = (base + ratio).requires_grad_()
        loss = token_losses(cur, base, torch.ones(1, dtype=torch.float64), every(base), objective="tapo", clip_low=0.4, clip_high=0.4,
                            floor=floor)
        (grad,) = torch.autograd.grad(loss.sum(), cur)
        assert float(grad[0, 3]) == pytest.approx(slope), floor
        assert float(grad[0, 0]) == pytest.approx(-1.25)
        fallen = (base + math.log(0.75)).requires_grad_()
        loss = token_losses(fallen, base, -torch.ones(1, dtype=torch.float64), every(base), objective="tapo", clip_low=0.4, clip_high=0.4,
                            floor=floor)
        (grad,) = torch.autograd.grad(loss.sum(), fallen)
        assert float(grad[0, 3]) == pytest.approx(0.75 if slope else 0.0), floor


def test_decoupled_keeps_a_weight_at_its_cap() -> None:
    x = tensor(TWICE, TWICE + 1e-9)
    assert decoupled(x, every(x), cap=2.0, mode="mask").keep_RT.tolist() == [[True, False]]


def test_opsm_keeps_a_response_at_its_threshold() -> None:
    """As TRL does: it keeps on <=."""
    x = torch.tensor([[-0.5, -0.5], [-0.5, -0.500001]], dtype=torch.float64)
    keep = opsm(x, torch.tensor([-1.0, -1.0]), every(x), threshold=0.5).keep_RT
    assert keep.tolist() == [[True, True], [False, False]]
    assert bool(opsm(x, torch.tensor([0.0, 0.0]), every(x), threshold=0.0).keep_RT.all())  # an advantage of 0 is not negative


def test_m2_is_content_with_exactly_its_budget() -> None:
    x, positive = tensor(0.25, -0.25, 0.25), torch.tensor([1.0], dtype=torch.float64)
    assert bool(m2_mask(x, positive, every(x), budget=0.0625).keep_RT.all())
    assert m2_mask(x, positive, every(x), budget=0.0624).keep_RT.tolist() == [[False, True, False]]
    assert m2_range(tensor(0.25), positive, every(tensor(0.0)), budget=0.0625) == (1.0, math.inf)
    assert m2_range(tensor(0.25), positive, every(tensor(0.0)), budget=0.0624, floor_low=0.0, floor_high=0.0)[1] == pytest.approx(
        math.expm1(math.sqrt(0.0624)))


def test_m2_range_reads_the_side_where_the_clip_bites() -> None:
    """A > 0: the clip bites above 1, so .9 counts and -.1 does not. Alone, -.1 would meet the budget unclipped."""
    x = tensor(0.9, -0.1)
    low, high = m2_range(x, torch.tensor([1.0], dtype=torch.float64), every(x), floor_low=0.0, floor_high=0.0)
    assert (low, high) == pytest.approx((1 - math.exp(-0.2), math.exp(0.2) - 1))  # a half-width of .2 has the square .04
    assert m2_range(x, torch.tensor([-1.0], dtype=torch.float64), every(x)) == (1.0, math.inf)


def test_k3_is_not_symmetric_and_keeps_a_response_at_its_threshold() -> None:
    """ratio - 1 - log ratio: .718 for a trainer that says the token e times as often, .368 for 1/e times."""
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert k3_filter(x, every(x), threshold=0.5).keep_RT.tolist() == [[False], [True]]
    assert k3_filter(x, every(x), threshold=0.3).keep_RT.tolist() == [[False], [False]]
    exact = float(torch.expm1(torch.ones((), dtype=torch.float64)) - 1)
    assert exact == pytest.approx(math.e - 2)
    assert bool(k3_filter(x, every(x), threshold=exact).keep_RT.all())


def test_veto_keeps_a_token_at_its_floor() -> None:
    x = torch.tensor([[math.log(1e-4), 0.0], [math.log(1e-4) - 1e-9, 0.0]], dtype=torch.float64)
    assert veto(x, every(x)).keep_RT.tolist() == [[True, True], [False, False]]


def test_a_ratio_whose_divergence_is_the_radius_is_inside() -> None:
    """The radius is the estimate at the bisection's first middle, so that it is met exactly."""
    cap = math.exp(4.0)
    middle = torch.tensor(cap, dtype=torch.float64).log() / 2
    ratio = middle.exp()
    delta = float(ratio.log().abs())
    high = fdiv_bounds(tensor(-1.0), divergence="abs_log", topology="mc", delta=delta, cap=cap)[1]
    assert float(high) >= float(ratio)


# ---------------------------------------------------------------- gradients
def test_weights_made_from_plain_tensors_carry_no_gradient() -> None:
    x = tensor(0.1, -0.2).requires_grad_()
    factor = make_factor(x.exp(), every(x), every(x))
    assert not factor.weight_RT.requires_grad
    log_ratio_R = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    assert not cap_group_mass(log_ratio_R, torch.zeros(2, dtype=torch.int64), cap=1.0).requires_grad


def test_the_kl_sends_no_gradient_to_the_reference() -> None:
    cur, ref = tensor(-1.0).requires_grad_(), tensor(-2.0).requires_grad_()
    for estimator in ("k1", "k2", "k3"):
        kl = reference_kl(cur, ref, every(cur), estimator=estimator)
        grads = torch.autograd.grad(kl.sum(), [cur, ref], allow_unused=True)
        assert float(grads[0].abs()) > 0.1 and grads[1] is None, estimator
