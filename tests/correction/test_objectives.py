"""Gradients, not values: finite differences with the detached parts held fixed, and the clip quadrants."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.bounds import fdiv_bounds
from learner.objective import OBJECTIVES, token_losses

HYPER: dict[str, dict[str, Any]] = {
    "score": {},
    "unit": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "gppo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 0.05, "clip_high": 0.06},
    "luspo": {"clip_low": 0.05, "clip_high": 0.06},
    "cispo": {"cap": 1.2},
    "ripo": {},
    "fdiv": {"divergence": "kl", "topology": "binary", "delta": 0.01},
    "tapo": {"clip_low": 0.3, "clip_high": 0.3, "floor": 0.05},
    "minirl": {},
}


def clip_loss(r: float, unit: float, low: float, high: float, advantage: float) -> float:
    """PPO's loss by cases, of a ratio r * unit whose clip decision may move with it."""
    r = r * unit
    if advantage > 0:
        return -min(r, high) * advantage
    return -max(r, low) * advantage


@functools.cache
def fdiv_ends(base: float) -> tuple[float, float]:
    low, high = fdiv_bounds(torch.tensor(base, dtype=torch.float64), **HYPER["fdiv"], cap=10.0)
    return float(low), float(high)


def reference_loss(
    name: str, x: list[float], frozen: list[float], base: list[float], mu: list[float], advantage: float
) -> list[float]:
    """One response, loop by loop. `frozen` is cur inside every stop-gradient; x is cur outside of them."""
    h = HYPER[name]
    low, high = 1 - h.get("clip_low", 0.0), 1 + h.get("clip_high", 0.0)
    mean = sum(f - b for f, b in zip(frozen, base, strict=True)) / len(x)
    loss, so_far = [], 0.0
    for t, (c, f, b, m) in enumerate(zip(x, frozen, base, mu, strict=True)):
        r, fixed, unit = math.exp(c - b), math.exp(f - b), math.exp(c - f)
        so_far += f - b
        if name == "score":
            loss.append(-advantage * c)
        elif name == "unit":
            loss.append(-advantage * unit)
        elif name == "ppo":
            loss.append(clip_loss(r, 1.0, low, high, advantage))
        elif name == "gppo":
            clipped = min(max(fixed, low), high) * unit
            loss.append(-min(r * advantage, clipped * advantage) if fixed != clipped / unit else -r * advantage)
        elif name in ("gspo", "luspo"):
            loss.append(clip_loss(math.exp(mean), unit, low, high, advantage) * (len(x) if name == "luspo" else 1))
        elif name == "cispo":
            loss.append(-min(fixed, h["cap"]) * advantage * c)
        elif name == "ripo":
            width = math.sqrt(0.05 / math.exp(b))
            loss.append(clip_loss(r, 1.0, max(1 - width, 0.0), min(1 + width, 10.0), advantage))
        elif name == "fdiv":
            loss.append(clip_loss(r, 1.0, *fdiv_ends(b), advantage))
        elif name == "tapo":
            width = max(0.3 / math.sqrt(t + 1), 0.05)
            loss.append(clip_loss(math.exp(so_far / (t + 1)), unit, 1 - width, 1 + width, advantage))
        else:
            stopped = fixed > 1.27 if advantage > 0 else fixed < 0.8
            loss.append(0.0 if stopped else -min(math.exp(f - m), 5.0) * advantage * c)
    return loss


def extra(name: str, mu: Tensor) -> dict[str, Any]:
    return HYPER[name] | ({"mu_RT": mu} if name == "minirl" else {})


def test_every_objective_is_listed_here() -> None:
    assert set(HYPER) == set(OBJECTIVES)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_value_and_gradient_equal_a_loop_with_detached_parts_held_fixed(name: str, make_batch: Callable) -> None:
    b = make_batch(seed=5)
    cur = b.cur.clone().requires_grad_()
    loss = token_losses(cur, b.old, b.advantage, b.mask, objective=name, **extra(name, b.mu))
    (grad,) = torch.autograd.grad(loss.sum(), cur)
    for i, keep in enumerate(b.mask):
        frozen, base, mu = (column[i][keep].tolist() for column in (b.cur, b.old, b.mu))
        args = (frozen, base, mu, float(b.advantage[i]))
        assert loss[i][keep].tolist() == pytest.approx(reference_loss(name, frozen, *args), rel=1e-12, abs=1e-12)
        for j, t in enumerate(keep.nonzero().flatten().tolist()):
            up, down = ([c + step * (k == j) for k, c in enumerate(frozen)] for step in (1e-6, -1e-6))
            slope = (sum(reference_loss(name, up, *args)) - sum(reference_loss(name, down, *args))) / 2e-6
            assert float(grad[i, t]) == pytest.approx(slope, rel=1e-6, abs=1e-8), (i, t)


@pytest.mark.parametrize("name", ["score", "ppo", "ripo", "fdiv"])
def test_gradcheck_where_nothing_is_detached(name: str, make_batch: Callable) -> None:
    b = make_batch(rows=4, width=5, groups=2, seed=1)
    cur = b.cur.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c: token_losses(c, b.old, b.advantage, b.mask, objective=name, **HYPER[name]), (cur,)
    )


def gradient(name: str, ratio: float, advantage: float, **hyper: float) -> float:
    """d loss / d cur of one token."""
    base = torch.full((1, 1), -2.0, dtype=torch.float64)
    cur = (base + math.log(ratio)).requires_grad_()
    loss = token_losses(
        cur, base, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool),
        objective=name, **hyper,
    )  # fmt: skip
    return float(torch.autograd.grad(loss.sum(), cur)[0])


# ratio, advantage, and the gradient under ppo, gppo (.2 / .28) and cispo (cap 2)
QUADRANTS = [
    (3.0, 1.0, 0.0, -1.28, -2.0),
    (0.5, 1.0, -0.5, -0.5, -0.5),
    (3.0, -1.0, 3.0, 3.0, 2.0),
    (0.5, -1.0, 0.0, 0.8, 0.5),
    (1.1, 1.0, -1.1, -1.1, -1.1),
    (1.1, -1.0, 1.1, 1.1, 1.1),
]


@pytest.mark.parametrize(("ratio", "advantage", "ppo", "gppo", "cispo"), QUADRANTS)
def test_clip_quadrants(ratio: float, advantage: float, ppo: float, gppo: float, cispo: float) -> None:
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    assert gradient("ppo", ratio, advantage, **clip) == pytest.approx(ppo, abs=1e-12)
    assert gradient("gppo", ratio, advantage, **clip) == pytest.approx(gppo, abs=1e-12)
    assert gradient("cispo", ratio, advantage, cap=2.0) == pytest.approx(cispo, abs=1e-12)


def test_dual_clip_kills_the_gradient_of_a_far_token_with_negative_advantage() -> None:
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual": 3.0}
    assert gradient("ppo", 2.9, -1.0, **clip) == pytest.approx(2.9)
    assert gradient("ppo", 3.1, -1.0, **clip) == 0.0
    assert gradient("ppo", 0.5, 1.0, **clip) == pytest.approx(-0.5)
    assert gradient("gppo", 2.9, -1.0, **clip) == pytest.approx(2.9)
    assert gradient("gppo", 3.1, -1.0, **clip) == 0.0
    assert gradient("gppo", 3.1, 1.0, **clip) == pytest.approx(-1.28)  # where ppo is flat too


def test_unclipped_importance_sampling_is_ppo_with_open_bounds() -> None:
    assert gradient("ppo", 30.0, 1.0, clip_low=1.0, clip_high=math.inf) == pytest.approx(-30.0)


def test_unit_ratio_has_value_one_and_a_live_gradient() -> None:
    cur = torch.tensor([[-0.3, -4.0]], dtype=torch.float64, requires_grad=True)
    loss = token_losses(
        cur, None, torch.tensor([2.0], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool), objective="unit"
    )
    assert loss.tolist() == [[-2.0, -2.0]]
    assert torch.autograd.grad(loss.sum(), cur)[0].tolist() == [[-2.0, -2.0]]


def test_sis_accepted_token_has_ratio_one_and_a_gradient_and_the_rejected_keeps_its_host(make_batch: Callable) -> None:
    b = make_batch(seed=2)
    accepted = b.mask & (torch.arange(9) % 2 == 0)
    cur = b.cur.clone().requires_grad_()
    host = token_losses(cur, b.old, b.advantage, b.mask, objective="gspo", clip_low=1e-3, clip_high=1e-3)
    loss = token_losses(
        cur, b.old, b.advantage, b.mask, objective="gspo", accepted_RT=accepted, clip_low=1e-3, clip_high=1e-3
    )
    (grad,) = torch.autograd.grad(loss.sum(), cur)
    minus_advantage = -b.advantage[:, None].expand_as(b.mask)
    assert torch.equal(loss[accepted], minus_advantage[accepted])
    assert torch.equal(grad[accepted], minus_advantage[accepted])
    assert torch.equal(loss[~accepted], host[~accepted])


def test_tapo_reads_the_prefix_and_sends_no_gradient_back_to_it() -> None:
    cur = torch.full((1, 10), -0.9, dtype=torch.float64, requires_grad=True)
    base, ones = torch.full((1, 10), -1.0, dtype=torch.float64), torch.ones(1, 10, dtype=torch.bool)
    loss = token_losses(
        cur, base, torch.ones(1, dtype=torch.float64), ones, objective="tapo", clip_low=0.9, clip_high=0.9
    )
    assert loss[0, 9].item() == pytest.approx(-1.105170918)  # the geometric mean, not the product 2.718
    (grad,) = torch.autograd.grad(loss[0, 9], cur)
    assert grad[0, :9].tolist() == [0.0] * 9
    assert grad[0, 9].item() == pytest.approx(-1.105170918)  # not divided by 10


def test_identity_when_all_policies_agree(make_batch: Callable) -> None:
    b = make_batch(seed=3)
    for name in OBJECTIVES:
        cur = b.mu.clone().requires_grad_()
        hyper = extra(name, b.mu)
        (grad,) = torch.autograd.grad(
            token_losses(cur, b.mu, b.advantage, b.mask, objective=name, **hyper).sum(), cur
        )
        length = b.mask.sum(-1, keepdim=True) if name == "luspo" else 1
        expect = torch.where(b.mask, -b.advantage[:, None] * length, 0.0)
        assert torch.allclose(grad, expect, atol=1e-12), name


def test_a_far_ratio_is_finite_and_cispo_still_learns_there() -> None:
    base = torch.tensor([[-60.0]], dtype=torch.float64)
    cur = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    loss = token_losses(cur, base, -one, mask, objective="ppo", clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(math.exp(20.0))
    assert torch.autograd.grad(loss.sum(), cur)[0].item() == 0.0
    loss = token_losses(cur, base, one, mask, objective="cispo", cap=5.0)
    assert torch.autograd.grad(loss.sum(), cur)[0].item() == pytest.approx(-5.0)


@pytest.mark.parametrize(("log_ratio", "advantage", "expected"), [
    (20.5, -1.0, 0.0), (-20.5, 1.0, 0.0),  # no bound on this side, and r is clamped
    (20.5, 1.0, -1.28), (-20.5, -1.0, 0.8)])  # the boundary's, however far
def test_gppo_has_no_slope_through_a_clamped_ratio_and_keeps_its_boundary(log_ratio: float, advantage: float, expected: float) -> None:
    assert gradient("gppo", math.exp(log_ratio), advantage, clip_low=0.2, clip_high=0.28) == pytest.approx(expected)


def test_refusals(make_batch: Callable) -> None:
    b = make_batch()
    with pytest.raises(ValueError, match="unknown objective 'pppo'; known: score, unit, ppo"):
        token_losses(b.cur, b.old, b.advantage, b.mask, objective="pppo")
    with pytest.raises(ValueError, match="ppo needs base log-probs"):
        token_losses(b.cur, None, b.advantage, b.mask, objective="ppo", clip_low=0.2, clip_high=0.2)
    with pytest.raises(TypeError, match="mask must be bool"):
        token_losses(b.cur, b.old, b.advantage, b.mask.double(), objective="score")
    with pytest.raises(ValueError, match=r"advantage has shape \(11,\) for 12 responses"):
        token_losses(b.cur, b.old, b.advantage[1:], b.mask, objective="score")
    with pytest.raises(ValueError, match="dual clip must be > 1"):
        token_losses(b.cur, b.old, b.advantage, b.mask, objective="ppo", clip_low=0.2, clip_high=0.2, dual=1.0)
