"""What must not matter: junk in masked slots, padding, order, the split into micro-batches, foreign groups."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.pipeline import CorrectionChoice, correct
from correction.reference import reference_kl
from correction.table import PolicyTable
from learner.advantage import group_advantages
from learner.objective import aggregate, denominator_of, token_losses

CHOICES = {
    "none": CorrectionChoice(),
    "tis-token": CorrectionChoice(engine="tis", cap=1.1),
    "tis-sequence": CorrectionChoice(engine="tis", level="sequence"),
    "tis-geometric": CorrectionChoice(engine="tis", level="geometric"),
    "icepop": CorrectionChoice(engine="icepop", low=0.8, high=1.25),
    "kpop": CorrectionChoice(engine="kpop", threshold=0.01),
    "sequence": CorrectionChoice(engine="tis", filter="sequence", filter_hyper={"low": 0.5, "high": 2.0}),
    "geometric": CorrectionChoice(filter="geometric", filter_hyper={"low": 0.9, "high": 1.1}),
    "k3": CorrectionChoice(filter="k3", filter_hyper={"threshold": 0.05}),
    "carm": CorrectionChoice(filter="carm", filter_hyper={"threshold": 1.3}),
    "veto": CorrectionChoice(filter="veto", filter_hyper={"floor": 0.6}),
    "decoupled": CorrectionChoice(engine="tis", staleness="decoupled", base="prox", steps_per_update=2),
    "m2": CorrectionChoice(staleness="m2_mask"),
    "opsm": CorrectionChoice(staleness="opsm", staleness_hyper={"threshold": 0.01}),
    "group-mass": CorrectionChoice(engine="icepop", group_mass_cap_per_response=1.2, objective="score"),
}
OBJECTIVES: list[dict[str, Any]] = [
    {"objective": "score"},
    {"objective": "unit"},
    {"objective": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual": 3.0},
    {"objective": "gppo", "clip_low": 0.2, "clip_high": 0.28},
    {"objective": "gspo", "clip_low": 0.03, "clip_high": 0.03},
    {"objective": "luspo", "clip_low": 0.03, "clip_high": 0.03},
    {"objective": "cispo", "cap": 1.3},
    {"objective": "ripo"},
    {"objective": "fdiv", "divergence": "chi2", "topology": "atomic", "delta": 0.05},
    {"objective": "tapo", "clip_low": 0.3, "clip_high": 0.3},
    {"objective": "minirl"},
]
MODES = ("token_mean", "sequence_mean", "constant", "length_weighted")


def table(b: Any) -> PolicyTable:
    version = torch.zeros(b.mask.shape, dtype=torch.int64)
    return PolicyTable(b.mu, b.old, b.prox, b.cur, b.ref, b.mask, version, b.group)


def losses(cur: Tensor, b: Any, weight: Tensor, objective: dict[str, Any]) -> Tensor:
    extra = {"mu_RT": b.mu} if objective["objective"] == "minirl" else {}
    loss = token_losses(cur, b.old, b.advantage, b.mask, **objective, **extra) * weight
    return loss + 0.1 * reference_kl(cur, b.ref, b.mask, estimator="k3")


def step(b: Any, choice: CorrectionChoice, objective: dict[str, Any], mode: str) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one optimizer step on the whole batch, original counts as the denominator."""
    b = replace(b, advantage=group_advantages(b.reward, b.group, estimator="grpo"))
    correction = correct(table(b), choice, b.advantage)
    cur = b.cur.clone().requires_grad_()
    loss_RT = losses(cur, b, correction.weight_RT, objective)
    loss = aggregate(loss_RT, correction.keep_RT, mode=mode, constant=64, count_mask_RT=b.mask)
    return loss.detach(), torch.autograd.grad(loss, cur)[0]


def cases() -> list[tuple[str, dict[str, Any], str]]:
    """Every choice with ppo, every objective without a corrector, every mode."""
    by_choice = [(name, OBJECTIVES[2], "token_mean") for name in CHOICES]
    by_objective = [("none", objective, "sequence_mean") for objective in OBJECTIVES]
    return by_choice + by_objective + [("icepop", OBJECTIVES[2], mode) for mode in MODES]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize(("choice", "objective", "mode"), cases())
def test_poison_in_masked_slots_changes_no_bit(
    choice: str, objective: dict[str, Any], mode: str, poison: float, make_batch: Callable
) -> None:
    clean, dirty = make_batch().poisoned(0.0), make_batch().poisoned(poison)
    loss, grad = step(clean, CHOICES[choice], objective, mode)
    loss_dirty, grad_dirty = step(dirty, CHOICES[choice], objective, mode)
    assert torch.equal(loss, loss_dirty)
    assert torch.equal(grad, grad_dirty)
    assert not bool(grad_dirty[~dirty.mask].any())
    assert bool(grad.any())


def test_poison_in_a_response_without_a_token_changes_no_bit(make_batch: Callable) -> None:
    b = make_batch()
    mask = b.mask.clone()
    mask[5] = False
    clean, dirty = replace(b, mask=mask).poisoned(0.0), replace(b, mask=mask).poisoned(math.nan)
    for name, choice in CHOICES.items():
        assert torch.equal(step(clean, choice, OBJECTIVES[4], "sequence_mean")[1],
                           step(dirty, choice, OBJECTIVES[4], "sequence_mean")[1]), name  # fmt: skip
    poisoned_advantage = b.advantage.clone()
    poisoned_advantage[5] = math.nan
    cur = b.cur.clone().requires_grad_()
    loss = token_losses(cur, b.old, poisoned_advantage, mask, objective="score").sum()
    assert bool(torch.autograd.grad(loss, cur)[0].isfinite().all())


@pytest.mark.parametrize(("choice", "objective", "mode"), cases())
def test_padding_width(choice: str, objective: dict[str, Any], mode: str, make_batch: Callable) -> None:
    b = make_batch()
    wide = replace(
        b,
        **{c: torch.nn.functional.pad(getattr(b, c), (0, 5), value=math.nan) for c in b.COLUMNS},
        mask=torch.nn.functional.pad(b.mask, (0, 5)),
    )
    loss, grad = step(b, CHOICES[choice], objective, mode)
    loss_wide, grad_wide = step(wide, CHOICES[choice], objective, mode)
    assert float(loss_wide) == pytest.approx(float(loss), abs=1e-12)
    assert torch.allclose(grad_wide[:, :9], grad, atol=1e-12)


@pytest.mark.parametrize(("choice", "objective", "mode"), cases())
def test_row_order_and_group_labels(choice: str, objective: dict[str, Any], mode: str, make_batch: Callable) -> None:
    b = make_batch()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = replace(b.rows(order), group=-1000 * b.group[order] + 17)
    loss, grad = step(b, CHOICES[choice], objective, mode)
    loss_shuffled, grad_shuffled = step(shuffled, CHOICES[choice], objective, mode)
    assert float(loss_shuffled) == pytest.approx(float(loss), abs=1e-12)
    assert torch.allclose(grad_shuffled, grad[order], atol=1e-12)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [3, 3, 3, 3]])
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_share_one_denominator(mode: str, sizes: list[int], kept: bool, make_batch: Callable) -> None:
    b = make_batch(seed=4)
    correction = correct(table(b), CHOICES["icepop"])
    count_mask = correction.keep_RT if kept else b.mask
    cur = b.cur.clone().requires_grad_()
    whole = aggregate(
        losses(cur, b, correction.weight_RT, OBJECTIVES[2]), correction.keep_RT,
        mode=mode, constant=64, count_mask_RT=count_mask,
    )  # fmt: skip
    (expect,) = torch.autograd.grad(whole, cur)
    slices = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    total = sum(denominator_of(count_mask[s], mode=mode, constant=64) for s in slices)
    grad, value = torch.zeros_like(cur), 0.0
    for s in slices:
        part = aggregate(
            losses(cur[s], b.rows(s), correction.weight_RT[s], OBJECTIVES[2]), correction.keep_RT[s],
            mode=mode, constant=64, count_mask_RT=count_mask[s], denominator=total,
        )  # fmt: skip
        grad, value = grad + torch.autograd.grad(part, cur)[0], value + part.item()
    assert value == pytest.approx(whole.item(), abs=1e-10)
    assert torch.allclose(grad, expect, atol=1e-10)


@pytest.mark.parametrize("choice", sorted(set(CHOICES) - {"m2"}))  # m2's budget is the batch's, by definition
def test_a_foreign_group_changes_nothing_here(choice: str, make_batch: Callable) -> None:
    b, foreign = make_batch(), make_batch(seed=9)
    names = (*b.COLUMNS, "mask", "reward", "advantage")
    both = replace(
        b,
        **{n: torch.cat([getattr(b, n), getattr(foreign, n)]) for n in names},
        group=torch.cat([b.group, foreign.group + 10**6]),
    )
    alone = correct(table(b), CHOICES[choice], b.advantage)
    together = correct(table(both), CHOICES[choice], both.advantage)
    assert torch.allclose(together.weight_RT[:12], alone.weight_RT, atol=1e-12)
    assert torch.equal(together.keep_RT[:12], alone.keep_RT)
    for estimator in ("grpo", "dr_grpo", "rloo"):
        advantage = group_advantages(both.reward, both.group, estimator=estimator)[:12]
        assert torch.allclose(advantage, group_advantages(b.reward, b.group, estimator=estimator), atol=1e-12)


def test_float32_stays_float32_and_agrees(make_batch: Callable) -> None:
    b = make_batch()
    single = replace(
        b, **{n: getattr(b, n).float() for n in (*b.COLUMNS, "reward", "advantage")}
    )
    for name, choice in CHOICES.items():
        loss, grad = step(b, choice, OBJECTIVES[2], "token_mean")
        loss_single, grad_single = step(single, choice, OBJECTIVES[2], "token_mean")
        assert loss_single.dtype == torch.float32, name
        assert float(loss_single) == pytest.approx(float(loss), rel=1e-4, abs=1e-5), name
        assert torch.allclose(grad_single.double(), grad, atol=1e-5), name
