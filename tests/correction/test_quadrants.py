"""The gradient of every objective in every clip quadrant, and which way each method turns when two policies change places, in numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correction.choice import CorrectionChoice
from correction.pipeline import Correction, correct
from correction.ratios import mismatch_log_ratio, total_log_ratio
from correction.reference import reference_kl
from correction.sis import sis_accept
from correction.table import PolicyTable
from learner.objective import OBJECTIVES, token_losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
OLD, MU = math.log(0.2), math.log(0.1)
"""The frozen probability is .2, so `sqrt(.05 / .2)` and its like make the interval of ratios .5 to 1.5; cur/mu is twice cur/old."""
CORNERS = [(3.0, 1.0), (0.4, 1.0), (3.0, -1.0), (0.4, -1.0), (1.1, 1.0), (1.1, -1.0)]
"""(ratio, advantage): far above, far below and inside, where no clip binds."""
FREE = (-3.0, -0.4, 3.0, 0.4, -1.1, 1.1)
PPO = (0.0, -0.4, 3.0, 0.0, -1.1, 1.1)
GRADIENTS: list[tuple[str, dict[str, Any], tuple[float, ...]]] = [
    ("score", {}, (-1.0, -1.0, 1.0, 1.0, -1.0, 1.0)),
    ("unit", {}, (-1.0, -1.0, 1.0, 1.0, -1.0, 1.0)),
    ("ppo", CLIP, PPO),
    ("ppo", {**CLIP, "dual": 2.5}, (0.0, -0.4, 0.0, 0.0, -1.1, 1.1)),
    ("ppo", {"clip_low": 1.0, "clip_high": math.inf}, FREE),
    ("gppo", CLIP, (-1.28, -0.4, 3.0, 0.8, -1.1, 1.1)),
    ("gppo", {**CLIP, "dual": 2.5}, (-1.28, -0.4, 0.0, 0.8, -1.1, 1.1)),
    ("gspo", CLIP, PPO),
    ("luspo", CLIP, PPO),
    ("cispo", {"cap": 2.0}, (-2.0, -0.4, 2.0, 0.4, -1.1, 1.1)),
    ("ripo", {"delta": 0.05}, PPO),
    ("fdiv", {"divergence": "chi2", "topology": "atomic", "delta": 0.025}, PPO),
    ("fdiv", {"divergence": "tv", "topology": "binary", "delta": 0.1}, PPO),
    ("fdiv", {"divergence": "abs_log", "topology": "mc", "delta": math.log(1.5)}, PPO),
    ("tapo", CLIP, PPO),
    ("minirl", {"clip_low": 0.2, "clip_high": 0.27, "cap": 5.0}, (0.0, -0.8, 5.0, 0.0, -2.2, 2.2)),
]


def slopes(objective: str, ratios: list[float], advantage: float, **hyper: Any) -> list[float]:
    """d loss / d cur of each token of one response."""
    base = torch.full((1, len(ratios)), OLD, dtype=torch.float64)
    cur = (base + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    if objective == "minirl":
        hyper["mu_RT"] = torch.full_like(base, MU)
    loss = token_losses(cur, base, torch.tensor([advantage], dtype=torch.float64), torch.ones_like(base, dtype=torch.bool),
                        objective=objective, **hyper)
    return torch.autograd.grad(loss.sum(), cur)[0][0].tolist()


def test_every_objective_has_its_quadrants() -> None:
    assert {name for name, *_ in GRADIENTS} == set(OBJECTIVES)


@pytest.mark.parametrize(("objective", "hyper", "expected"), GRADIENTS, ids=str)
def test_the_gradient_in_every_quadrant(objective: str, hyper: dict[str, Any], expected: tuple[float, ...]) -> None:
    found = [slopes(objective, [ratio], advantage, **hyper)[0] for ratio, advantage in CORNERS]
    assert found == pytest.approx(expected, abs=1e-12)
    twice = [slopes(objective, [ratio], 2 * advantage, **hyper)[0] for ratio, advantage in CORNERS]
    assert twice == pytest.approx([2 * value for value in expected], abs=1e-12)


@pytest.mark.parametrize(("objective", "times"), [("gspo", 1.0), ("luspo", 2.0)])
def test_a_responses_mean_decides_for_all_of_its_tokens(objective: str, times: float) -> None:
    """Ratios 6 and 1.5 have the geometric mean 3: clipped above, though 1.5 alone is another case; 2.2 and .55 have 1.1: free, both."""
    assert slopes(objective, [6.0, 1.5], 1.0, **CLIP) == [0.0, 0.0]
    assert slopes(objective, [6.0, 1.5], -1.0, **CLIP) == pytest.approx([3.0 * times] * 2)
    assert slopes(objective, [0.8, 0.2], -1.0, **CLIP) == [0.0, 0.0]
    assert slopes(objective, [0.8, 0.2], 1.0, **CLIP) == pytest.approx([-0.4 * times] * 2)
    assert slopes(objective, [2.2, 0.55], 1.0, **CLIP) == pytest.approx([-1.1 * times] * 2)


def test_a_prefix_decides_for_its_last_token() -> None:
    """Ratios 1.1, 9: the prefix of two has sqrt(9.9) = 3.15. At the second token the bounds are .2 and .28 over sqrt 2."""
    assert slopes("tapo", [1.1, 9.0], 1.0, **CLIP) == pytest.approx([-1.1, 0.0])
    assert slopes("tapo", [1.1, 9.0], -1.0, **CLIP) == pytest.approx([1.1, math.sqrt(9.9)])
    assert slopes("tapo", [1.1, 1.3], 1.0, **CLIP) == pytest.approx([-1.1, -math.sqrt(1.43)])  # 1.196 is below 1.198
    assert slopes("tapo", [1.1, 1.31], 1.0, **CLIP) == pytest.approx([-1.1, 0.0])  # 1.2004 is not
    assert slopes("tapo", [0.9, 0.8], -1.0, **CLIP) == pytest.approx([0.9, 0.0])  # .849 is below .859


# ---------------------------------------------------------------- two policies change places
ROWS, WIDTH = 4, 3
ONES = torch.ones(ROWS, WIDTH, dtype=torch.bool)
STEP = math.log(1.5)


def corrected(swap: bool, roles: tuple[str, str], choice: CorrectionChoice, sign: float = 1.0) -> Correction:
    """The first role finds every token 1.5 times as likely as the second does; with `swap` the second does. Columns beside them are -1."""
    columns = dict.fromkeys(("mu", "old", "prox"), torch.full((ROWS, WIDTH), -1.0, dtype=torch.float64))
    columns[roles[swap]] = columns[roles[swap]] + STEP
    table = PolicyTable(columns["mu"], columns["old"], columns["prox"], None, None, ONES, torch.zeros(ROWS, WIDTH, dtype=torch.int64),
                        torch.tensor([0, 0, 1, 1]))
    return correct(table, choice, torch.full((ROWS,), sign, dtype=torch.float64))


ENGINE, LAG, TOTAL = ("old", "mu"), ("prox", "old"), ("prox", "mu")
PROX: dict[str, Any] = {"base": "prox", "steps_per_update": 2}
# roles, choice, sign of the advantage, weight, and weight with the roles swapped; 0 is a token that is dropped
SWAPS: list[tuple[tuple[str, str], CorrectionChoice, float, float, float]] = [
    (ENGINE, CorrectionChoice(engine="tis", cap=9.0), 1, 1.5, 1 / 1.5),
    (ENGINE, CorrectionChoice(engine="tis", cap=9.0, level="sequence"), 1, 1.5**3, 1.5**-3),
    (ENGINE, CorrectionChoice(engine="tis", cap=9.0, level="geometric"), 1, 1.5, 1 / 1.5),
    (ENGINE, CorrectionChoice(engine="tis", cap=1.2), 1, 1.2, 1 / 1.5),  # a cap, and no floor
    (ENGINE, CorrectionChoice(engine="icepop"), 1, 1.5, 1 / 1.5),
    (ENGINE, CorrectionChoice(engine="icepop", low=0.9, high=2.0), 1, 1.5, 0.0),
    (ENGINE, CorrectionChoice(engine="icepop", low=0.5, high=1.2), 1, 0.0, 1 / 1.5),
    (ENGINE, CorrectionChoice(engine="kpop", threshold=1.0), 1, 1.5, 1 / 1.5),
    (ENGINE, CorrectionChoice(filter="sequence", filter_hyper={"low": 0.9, "high": 9.0}), 1, 1.0, 0.0),
    (ENGINE, CorrectionChoice(filter="geometric", filter_hyper={"low": 0.9, "high": 2.0}), 1, 1.0, 0.0),
    (ENGINE, CorrectionChoice(filter="k3", filter_hyper={"threshold": 0.08}), 1, 0.0, 1.0),  # r - 1 - log r: .0945 and .0721
    (ENGINE, CorrectionChoice(filter="carm", filter_hyper={"threshold": 1.6}), 1, 1.0, 1.0),  # of absolute values
    (ENGINE, CorrectionChoice(filter="veto", filter_hyper={"floor": 0.8}), 1, 1.0, 0.0),
    (LAG, CorrectionChoice(staleness="decoupled", **PROX), 1, 1.5, 1 / 1.5),
    (LAG, CorrectionChoice(staleness="decoupled", staleness_hyper={"cap": 1.2, "mode": "mask"}, **PROX), 1, 0.0, 1 / 1.5),
    (TOTAL, CorrectionChoice(staleness="opsm", staleness_hyper={"threshold": 0.1}), -1, 1.0, 0.0),
    (TOTAL, CorrectionChoice(staleness="opsm", staleness_hyper={"threshold": 0.1}), 1, 1.0, 1.0),  # right answers stay
    (TOTAL, CorrectionChoice(staleness="m2_mask", staleness_hyper={"budget": 0.1}), 1, 0.0, 1.0),
    (TOTAL, CorrectionChoice(staleness="m2_mask", staleness_hyper={"budget": 0.1}), -1, 1.0, 0.0),
    (TOTAL, CorrectionChoice(objective="score", group_mass_cap_per_response=9.0), 1, 1.5**3, 1.5**-3),
    (TOTAL, CorrectionChoice(objective="score", group_mass_cap_per_response=2.0), 1, 2.0, 1.5**-3),
]


@pytest.mark.parametrize(("roles", "choice", "sign", "weight", "swapped"), SWAPS,
                         ids=lambda value: next((name for name in (value.engine, value.filter, value.staleness) if name != "none"), "mass")
                         if isinstance(value, CorrectionChoice) else "")
def test_swapping_two_roles_turns_the_weight_over(roles: tuple[str, str], choice: CorrectionChoice, sign: float, weight: float,
                                                  swapped: float) -> None:
    for swap, expected in ((False, weight), (True, swapped)):
        found = corrected(swap, roles, choice, sign)
        assert found.weight_RT.flatten().tolist() == pytest.approx([expected] * (ROWS * WIDTH), rel=1e-12)
        assert bool(found.keep_RT.all() if expected else not found.keep_RT.any())


def test_swapping_prox_and_mu_moves_the_range_of_m2() -> None:
    """Right answers that became likelier are where a clip could bite; swapped, they are not."""
    choice = CorrectionChoice(staleness="m2_range", staleness_hyper={"budget": 0.04, "floor_low": 0.0, "floor_high": 0.0})
    assert corrected(False, TOTAL, choice).clip == pytest.approx((1 - math.exp(-0.2), math.exp(0.2) - 1))
    assert corrected(True, TOTAL, choice).clip == (1.0, math.inf)
    assert corrected(True, TOTAL, choice, -1.0).clip == pytest.approx((1 - math.exp(-0.2), math.exp(0.2) - 1))


def test_swapping_the_two_policies_of_sis_turns_its_acceptance_over() -> None:
    """The token was 2 of 3 to mu and is 1 of 3 now: a quarter of the envelope of the other. Swapped, it is itself the envelope."""
    ids, token = torch.tensor([[[0, 1]]]), torch.tensor([[0]])
    now, mu = (torch.tensor([[values]], dtype=torch.float64).log() for values in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    mask = torch.ones(1, 1, dtype=torch.bool)
    for draw, here, there in ((0.24, True, True), (0.26, False, True), (0.99, False, True)):
        uniform = torch.full((1, 1), draw, dtype=torch.float64)
        assert sis_accept(token, ids, now, mu, mask, uniform_RT=uniform).item() is here
        assert sis_accept(token, ids, mu, now, mask, uniform_RT=uniform).item() is there


# objective, what it takes, slope at cur/old = 1.1 with A = 1, and with the two swapped, at 1/1.1
OBJECTIVE_SWAPS: list[tuple[str, dict[str, Any], float, float]] = [
    ("ppo", CLIP, -1.1, -1 / 1.1), ("gppo", CLIP, -1.1, -1 / 1.1), ("gspo", CLIP, -1.1, -1 / 1.1), ("luspo", CLIP, -1.1, -1 / 1.1),
    ("cispo", {"cap": 5.0}, -1.1, -1 / 1.1), ("ripo", {}, -1.1, -1 / 1.1), ("tapo", CLIP, -1.1, -1 / 1.1),
    ("fdiv", {"divergence": "tv", "topology": "binary", "delta": 0.1}, -1.1, -1 / 1.1),
    ("ppo", {"clip_low": 0.05, "clip_high": 0.05}, 0.0, -1 / 1.1), ("gppo", {"clip_low": 0.05, "clip_high": 0.05}, -1.05, -1 / 1.1),
    ("minirl", {"clip_high": 0.05}, 0.0, -1.0),  # cur/mu is 1 here: only its gate reads old
]  # fmt: skip


@pytest.mark.parametrize(("objective", "hyper", "slope", "swapped"), OBJECTIVE_SWAPS, ids=str)
def test_swapping_cur_and_old_turns_the_ratio_over(objective: str, hyper: dict[str, Any], slope: float, swapped: float) -> None:
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    a, b = (torch.tensor([[value]], dtype=torch.float64) for value in (OLD + math.log(1.1), OLD))
    for now, base, expected in ((a, b, slope), (b, a, swapped)):
        cur = now.clone().requires_grad_()
        extra = {"mu_RT": now} if objective == "minirl" else {}
        loss = token_losses(cur, base, one, mask, objective=objective, **hyper, **extra)
        assert float(torch.autograd.grad(loss.sum(), cur)[0]) == pytest.approx(expected)


def test_swapping_mu_and_old_turns_minirls_weight_over() -> None:
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    a, b = (torch.tensor([[value]], dtype=torch.float64) for value in (OLD, OLD + math.log(1.1)))
    found = []
    for old, mu in ((a, b), (b, a)):
        cur = a.clone().requires_grad_()
        loss = token_losses(cur, old, one, mask, objective="minirl", mu_RT=mu)
        found.append(float(torch.autograd.grad(loss.sum(), cur)[0]))
    assert found == pytest.approx([-1 / 1.1, -1.0])  # cur/mu


@pytest.mark.parametrize(("estimator", "value", "swapped"), [
    ("k1", math.log(2), -math.log(2)), ("k2", math.log(2) ** 2 / 2, math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5, 1 - math.log(2))])
def test_swapping_cur_and_the_reference_turns_the_kl_over(estimator: str, value: float, swapped: float) -> None:
    """k2 is the same both ways, and its gradient is not."""
    a, b = (torch.tensor([[p]], dtype=torch.float64).log() for p in (0.5, 0.25))
    slopes = []
    for now, ref, expected in ((a, b, value), (b, a, swapped)):
        cur = now.clone().requires_grad_()
        kl = reference_kl(cur, ref, torch.ones(1, 1, dtype=torch.bool), estimator=estimator)
        assert float(kl.detach()) == pytest.approx(expected)
        slopes.append(float(torch.autograd.grad(kl.sum(), cur)[0]))
    expected_slopes = {"k1": [1.0, 1.0], "k2": [math.log(2), -math.log(2)], "k3": [0.5, -1.0]}
    assert slopes == pytest.approx(expected_slopes[estimator])


def test_the_mismatch_is_a_number(make_batch: Callable) -> None:
    """A weight that carried a gradient would be another objective."""


    b = make_batch()
    old, prox, mu = (getattr(b, name).clone().requires_grad_() for name in ("old", "prox", "mu"))
    assert not mismatch_log_ratio(old, mu).value.requires_grad
    assert not total_log_ratio(prox, mu).value.requires_grad


