"""What must not matter to any method. The lists are checked against the code's own, so that a new method cannot be left out.

`test_invariances.py` looks closer at fewer combinations.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from configs.recipe_table import Recipe
from correction.choice import ENGINES, FILTERS, STALENESS, CorrectionChoice
from correction.masked import response_mean
from correction.pipeline import Correction, correct
from correction.reference import KL_ESTIMATORS, reference_kl
from correction.sis import counter_uniform, sis_accept
from correction.table import PolicyTable
from learner.advantage import ema_scaled_advantages, group_advantages, zcpo_coefficients
from learner.objective import AGGREGATIONS, OBJECTIVES, aggregate, denominator_of, token_losses

PROX: dict[str, Any] = {"base": "prox", "steps_per_update": 2}
CORRECTORS: dict[str, CorrectionChoice] = {
    "none": CorrectionChoice(),
    **{f"tis {level}": CorrectionChoice(engine="tis", level=level, cap=1.1) for level in ("token", "sequence", "geometric")},
    "icepop": CorrectionChoice(engine="icepop", low=0.8, high=1.25),
    **{f"kpop {carry}": CorrectionChoice(engine="kpop", threshold=0.01, carry=carry) for carry in ("ratio", "one")},
    "sequence": CorrectionChoice(engine="tis", filter="sequence", filter_hyper={"low": 0.5, "high": 2.0}),
    "geometric": CorrectionChoice(filter="geometric", filter_hyper={"low": 0.9, "high": 1.1}),
    "k3": CorrectionChoice(filter="k3", filter_hyper={"threshold": 0.05}),
    "carm": CorrectionChoice(filter="carm", filter_hyper={"threshold": 1.3}),
    "veto": CorrectionChoice(filter="veto", filter_hyper={"floor": 0.6}),
    "decoupled cap": CorrectionChoice(engine="tis", staleness="decoupled", staleness_hyper={"cap": 1.1}, **PROX),
    "decoupled mask": CorrectionChoice(staleness="decoupled", staleness_hyper={"cap": 1.1, "mode": "mask"}, **PROX),
    "m2_mask": CorrectionChoice(staleness="m2_mask", staleness_hyper={"budget": 0.01}),
    "m2_range": CorrectionChoice(staleness="m2_range", staleness_hyper={"budget": 0.01, "floor_low": 0.01, "floor_high": 0.01}),
    "opsm": CorrectionChoice(staleness="opsm", staleness_hyper={"threshold": 0.01}),
    "sis": CorrectionChoice(engine="icepop", low=0.8, high=1.25, staleness="sis"),
    "mass": CorrectionChoice(objective="score", group_mass_cap_per_response=1.0),
    "icepop and mass": CorrectionChoice(engine="icepop", low=0.8, high=1.25, objective="score", group_mass_cap_per_response=1.0),
}
CLIP = {"clip_low": 0.1, "clip_high": 0.12}
HYPER: dict[str, dict[str, Any]] = {
    "score": {}, "unit": {}, "ppo": {**CLIP, "dual": 1.5}, "gppo": {**CLIP, "dual": 1.5}, "gspo": CLIP, "luspo": CLIP, "tapo": CLIP,
    "cispo": {"cap": 1.1}, "ripo": {"delta": 0.005}, "fdiv": {"divergence": "kl", "topology": "binary", "delta": 0.005}, "minirl": {},
}  # fmt: skip
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_ema", "zcpo", "remax")
OVER_THE_BATCH = {"reinforce_pp", "reinforce_pp_ema", "m2_mask", "m2_range"}
"""By definition these read the whole batch: another group changes them."""
WIDTH, TOP = 9, 4

Case = dict[str, Tensor]
"""Columns [R, T] and [R, T, K], and values [R]: everything is indexed by the response."""


@pytest.fixture(name="case")
def _case(make_batch: Callable) -> Case:
    return make_case(make_batch, 0)


def make_case(make_batch: Callable, seed: int) -> Case:
    b, random = make_batch(seed=seed), torch.Generator().manual_seed(100 + seed)
    case = {name: getattr(b, name) for name in (*b.COLUMNS, "mask", "group", "reward")}
    shape = (*b.mask.shape, TOP)
    noise = torch.randn(2, *shape, generator=random, dtype=torch.float64)
    case["token"] = torch.randint(0, TOP + 1, b.mask.shape, generator=random)
    case["top_token"] = (case["token"][..., None] + torch.randint(0, 2, shape, generator=random) + torch.arange(TOP)) % (TOP + 2)
    case["top_mu"] = -2 + 0.3 * noise[0]
    case["top_now"] = case["top_mu"] + 0.3 * noise[1]
    case["uniform"] = counter_uniform(1, seed, torch.arange(len(b.mask)), WIDTH)
    case["kl"] = noise[0, ..., 0].abs() / 10
    case["greedy"] = (b.group == b.group[0]).double() - 0.25
    return case


POISONED = ("mu", "old", "prox", "cur", "ref", "kl", "top_mu", "top_now")
POISONS = (math.nan, math.inf, -math.inf, 1e9, -1e9)


def poisoned(case: Case, turn: int | None) -> Case:
    """0 in every masked slot, or poison: another one in each column, since one and the same would cancel in the difference of two."""
    found = dict(case)
    for place, name in enumerate(POISONED):
        mask = case["mask"][..., None] if case[name].dim() == 3 else case["mask"]
        found[name] = case[name].masked_fill(~mask, 0.0 if turn is None else POISONS[(place + turn) % len(POISONS)])
    return found


def advantages(case: Case, estimator: str) -> Tensor:
    rewards, group = case["reward"], case["group"]
    if estimator == "zcpo":
        return zcpo_coefficients(rewards, group, response_mean(case["kl"], case["mask"]))
    if estimator == "reinforce_pp_ema":
        return ema_scaled_advantages(rewards, group, 0.7)[0]
    greedy = case["greedy"] if estimator == "remax" else None
    return group_advantages(rewards, group, estimator=estimator, greedy_reward_R=greedy)


def accepted(case: Case, choice: CorrectionChoice) -> Tensor | None:
    if choice.staleness != "sis":
        return None
    return sis_accept(case["token"], case["top_token"], case["top_now"], case["top_mu"], case["mask"], uniform_RT=case["uniform"])


def corrected(case: Case, choice: CorrectionChoice, advantage: Tensor) -> Correction:
    version = torch.zeros(case["mask"].shape, dtype=torch.int64)
    table = PolicyTable(case["mu"], case["old"], case["prox"], case["cur"], case["ref"], case["mask"], version, case["group"])
    return correct(table, choice, advantage, accepted(case, choice))


def losses(case: Case, cur: Tensor, choice: CorrectionChoice, objective: str, advantage: Tensor, correction: Correction) -> Tensor:
    hyper = HYPER[objective] | ({"mu_RT": case["mu"]} if objective == "minirl" else {})
    if correction.clip is not None and "clip_low" in hyper:
        hyper = hyper | dict(zip(("clip_low", "clip_high"), correction.clip, strict=True))
    found = token_losses(cur, case["old"], advantage, case["mask"], objective=objective, accepted_RT=accepted(case, choice), **hyper)
    return found * correction.weight_RT


def outcome(case: Case, corrector: str = "icepop", objective: str = "ppo", mode: str = "token_mean", estimator: str = "grpo",
            kl: str = "k3") -> dict[str, Tensor]:
    """Advantages, weights, masks, loss and gradient of one optimizer step on the whole batch."""
    choice, advantage = CORRECTORS[corrector], advantages(case, estimator)
    correction, cur = corrected(case, choice, advantage), case["cur"].clone().requires_grad_()
    loss_RT = losses(case, cur, choice, objective, advantage, correction)
    loss = aggregate(loss_RT, correction.keep_RT, mode=mode, constant=7, count_mask_RT=case["mask"])
    loss = loss + 0.1 * aggregate(reference_kl(cur, case["ref"], case["mask"], estimator=kl), case["mask"], mode=mode, constant=7)
    (gradient,) = torch.autograd.grad(loss, cur)
    clip = torch.tensor(correction.clip or (0.0, 0.0))
    return {"advantage": advantage, "weight": correction.weight_RT, "keep": correction.keep_RT, "loss": loss.detach(), "clip": clip,
            "gradient": gradient}


BESIDES = list(zip(itertools.cycle(AGGREGATIONS), itertools.cycle(ESTIMATORS), itertools.cycle(KL_ESTIMATORS), range(84), strict=False))
"""Every aggregation beside every advantage beside every KL: 4, 7 and 3 have no common divisor."""


def combinations(corrector: str) -> list[tuple[str, str, str, str]]:
    """Each objective, with the rest in turn: (objective, mode, estimator, kl)."""
    start = 7 * list(CORRECTORS).index(corrector)
    return [(name, *BESIDES[(start + 5 * place) % 84][:3]) for place, name in enumerate(OBJECTIVES)]


def test_nothing_is_left_out() -> None:
    assert {choice.engine for choice in CORRECTORS.values()} == set(ENGINES)
    assert {choice.filter for choice in CORRECTORS.values()} == set(FILTERS)
    assert {choice.staleness for choice in CORRECTORS.values()} == set(STALENESS)
    assert set(HYPER) == set(OBJECTIVES)
    fields = Recipe.model_fields
    assert set(ESTIMATORS) == set(get_args(fields["estimator"].annotation))
    assert set(AGGREGATIONS) == set(get_args(fields["aggregation"].annotation))
    assert {*KL_ESTIMATORS, "full"} == set(get_args(fields["kl_estimator"].annotation))
    used = [one for corrector in CORRECTORS for one in combinations(corrector)]
    for place, names in enumerate((OBJECTIVES, AGGREGATIONS, ESTIMATORS, KL_ESTIMATORS)):
        assert {one[place] for one in used} == set(names)


@pytest.mark.parametrize("corrector", CORRECTORS)
def test_every_corrector_acts_on_this_batch(case: Case, corrector: str) -> None:
    """Otherwise nothing below would hold anything."""
    found = outcome(case, corrector)
    changed = bool((found["weight"] != case["mask"].double()).any()) or bool(found["clip"].any())
    assert changed == (corrector != "none")
    assert bool(found["weight"].any()) and bool(found["gradient"].any())


@pytest.mark.parametrize("turn", range(len(POISONS)))
@pytest.mark.parametrize("corrector", CORRECTORS)
def test_poison_in_masked_slots_changes_no_bit_under_any_objective(case: Case, corrector: str, turn: int) -> None:
    clean, dirty = poisoned(case, None), poisoned(case, turn)
    for beside in combinations(corrector):
        one, other = outcome(clean, corrector, *beside), outcome(dirty, corrector, *beside)
        for name in one:
            assert torch.equal(one[name], other[name]), (beside, name)
        assert bool(one["gradient"].isfinite().all())
        assert not bool(other["gradient"][~case["mask"]].any())


@pytest.mark.parametrize("corrector", CORRECTORS)
def test_row_order_and_group_labels_matter_to_nothing(case: Case, corrector: str) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = {name: value[order] for name, value in case.items()}
    shuffled["group"] = -1000 * shuffled["group"] + 17
    for beside in combinations(corrector):
        one, other = outcome(case, corrector, *beside), outcome(shuffled, corrector, *beside)
        for name in ("advantage", "weight", "keep", "gradient"):
            assert torch.allclose(one[name][order].double(), other[name].double(), atol=1e-12), (beside, name)
        assert float(other["loss"]) == pytest.approx(float(one["loss"]), abs=1e-12)


@pytest.mark.parametrize("corrector", CORRECTORS)
def test_padding_and_where_in_its_row_a_token_stands_matter_to_nothing(case: Case, corrector: str) -> None:
    """Every response's trainable tokens, in order, at other places of a wider row; junk everywhere else."""
    random, wide = torch.Generator().manual_seed(2), 16
    mask = torch.zeros(12, wide, dtype=torch.bool)
    for row, count in enumerate(case["mask"].sum(-1).tolist()):
        mask[row, torch.randperm(wide, generator=random)[:count]] = True
    moved = {}
    for name, value in case.items():
        if value.dim() == 1:
            moved[name] = value
            continue
        moved[name] = torch.full((12, wide, *value.shape[2:]), math.nan if value.is_floating_point() else 0).to(value.dtype)
        moved[name][mask] = value[case["mask"]]
    moved["mask"] = mask
    for beside in combinations(corrector):
        one, other = outcome(case, corrector, *beside), outcome(moved, corrector, *beside)
        for name in ("weight", "keep", "gradient"):
            assert torch.allclose(other[name][mask].double(), one[name][case["mask"]].double(), atol=1e-12), (beside, name)
        assert float(other["loss"]) == pytest.approx(float(one["loss"]), abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_and_ranks_share_one_denominator(case: Case, objective: str, mode: str) -> None:
    """Rows alone, two unequal parts, and whole groups on a rank each; original and kept counts."""
    choice, advantage, labels = CORRECTORS["icepop"], advantages(case, "grpo"), case["group"]
    correction = corrected(case, choice, advantage)
    splits = [[[row] for row in range(12)], [list(range(5)), list(range(5, 12))],
              [(labels == label).nonzero().flatten().tolist() for label in labels.unique()]]

    def part(rows: list[int], count: Tensor, denominator: float) -> tuple[float, Tensor]:
        here = {name: value[rows] for name, value in case.items()}
        cur, mine = here["cur"].clone().requires_grad_(), correction._replace(weight_RT=correction.weight_RT[rows])
        loss_RT = losses(here, cur, choice, objective, advantage[rows], mine)
        loss = aggregate(loss_RT, correction.keep_RT[rows], mode=mode, constant=7, count_mask_RT=count[rows], denominator=denominator)
        return float(loss.detach()), torch.autograd.grad(loss, cur)[0]

    for count in (case["mask"], correction.keep_RT):
        total = denominator_of(count, mode=mode, constant=7)
        value, gradient = part(list(range(12)), count, total)
        for split in splits:
            assert sum(denominator_of(count[rows], mode=mode, constant=7) for rows in split) == total
            parts = [part(rows, count, total) for rows in split]
            assert sum(one for one, _ in parts) == pytest.approx(value, abs=1e-12)
            for rows, (_, mine) in zip(split, parts, strict=True):
                assert torch.allclose(mine, gradient[rows], atol=1e-14)


@pytest.mark.parametrize("corrector", sorted(set(CORRECTORS) - OVER_THE_BATCH))
def test_another_group_changes_no_weight_and_no_tokens_loss(case: Case, corrector: str, make_batch: Callable) -> None:
    foreign = make_case(make_batch, 9)
    foreign["group"] = foreign["group"] + 10**6
    both, choice = {name: torch.cat([case[name], foreign[name]]) for name in case}, CORRECTORS[corrector]
    for estimator, objective in zip(itertools.cycle(sorted(set(ESTIMATORS) - OVER_THE_BATCH)), OBJECTIVES, strict=False):
        found = []
        for batch in (case, both):
            advantage = advantages(batch, estimator)
            correction = corrected(batch, choice, advantage)
            loss_RT = losses(batch, batch["cur"], choice, objective, advantage, correction)
            found.append((advantage[:12], correction.weight_RT[:12], correction.keep_RT[:12].double(), loss_RT[:12]))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, atol=1e-12), (estimator, objective)
