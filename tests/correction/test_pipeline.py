"""Stackings that are refused, roles that must not be swapped, and what the pipeline counts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from correction.groupmass import cap_group_mass
from correction.mismatch import icepop, tis
from correction.pipeline import CorrectionChoice, check_stacking, correct
from correction.ratios import (
    MismatchLogRatio,
    PolicyLogRatio,
    clamped_count,
    mismatch_log_ratio,
    policy_log_ratio,
    response_log_ratio,
    total_log_ratio,
)
from correction.staleness import decoupled, m2_mask, m2_range, opsm
from correction.table import PolicyTable

REFUSED = [
    ({"engine": "tiss"}, "unknown engine corrector 'tiss'; known: none, tis, icepop, kpop"),
    ({"objective": "gapo"}, "unknown objective 'gapo'"),
    ({"base": "cur"}, "unknown base 'cur'; known: old, prox"),
    ({"engine": "kpop"}, "kpop needs a threshold"),
    ({"group_mass_cap_per_response": 1.5, "objective": "ppo"}, "cap_group_mass weighs by the total ratio and ppo"),
    ({"group_mass_cap_per_response": 1.5, "objective": "unit"}, "cap_group_mass weighs by the total ratio and unit"),
    ({"group_mass_cap_per_response": 0.5, "objective": "score"}, "must be >= 1"),
    ({"group_mass_cap_per_response": 1.5, "objective": "score", "engine": "tis"}, "tis only weighs"),
    ({"objective": "score", "engine": "tis"}, "tis only weighs"),
    ({"objective": "minirl", "engine": "tis"}, "tis only weighs"),
    ({"objective": "minirl", "base": "prox", "steps_per_update": 2}, "reads the frozen old probability"),
    ({"objective": "ripo", "base": "prox", "steps_per_update": 2}, "reads the frozen old probability"),
    ({"staleness": "decoupled"}, "cur/old holds that ratio already"),
    ({"staleness": "decoupled", "objective": "score"}, "not for score"),
    ({"staleness": "sis", "engine": "tis"}, "correct the engine twice"),
    ({"staleness": "sis", "objective": "score"}, "leaves rejected tokens to an objective on cur/old"),
    ({"objective": "unit", "steps_per_update": 2}, "one optimizer step per update"),
    ({"base": "prox"}, "never clips at one optimizer step"),
    ({"base": "prox", "objective": "cispo"}, "never clips at one optimizer step"),
    ({"base": "prox", "staleness": "decoupled"}, "never clips at one optimizer step"),
    ({"objective": "luspo"}, "luspo multiplies by the response's length itself"),
    ({"staleness": "m2_range", "objective": "gspo"}, "m2_range sets the clip of ppo"),
    ({"prox_source": "ewma"}, "set base to prox"),
    ({"prox_source": "ewma", "base": "prox", "objective": "score"}, "set base to prox"),
]
ALLOWED: list[dict[str, Any]] = [
    {},
    {"engine": "tis", "level": "sequence"},
    {"engine": "icepop", "objective": "unit"},
    {"engine": "icepop", "objective": "score", "group_mass_cap_per_response": 1.2},
    {"engine": "icepop", "staleness": "sis"},
    {"engine": "kpop", "threshold": 0.03, "objective": "gspo"},
    {"base": "prox", "prox_source": "ewma", "engine": "tis", "staleness": "decoupled"},
    {"base": "prox", "steps_per_update": 4, "engine": "tis", "staleness": "decoupled"},
    {"objective": "unit", "staleness": "decoupled", "engine": "tis"},
    {"objective": "minirl", "engine": "icepop"},
    {"objective": "luspo", "aggregation": "sequence_mean"},
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_stacking(CorrectionChoice(**settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_correcting_itself_refuses_them_too(settings: dict[str, Any], message: str, make_batch: Callable) -> None:
    """Whoever calls the pure functions without a config is told the same."""
    b = make_batch()
    with pytest.raises(ValueError, match=message):
        correct(table(b), CorrectionChoice(**settings), b.advantage, torch.zeros_like(b.mask))


@pytest.mark.parametrize("settings", ALLOWED)
def test_allowed(settings: dict[str, Any]) -> None:
    check_stacking(CorrectionChoice(**settings))


def table(b: Any, **columns: Any) -> PolicyTable:
    version = torch.zeros(b.mask.shape, dtype=torch.int64)
    columns = {"mu_RT": b.mu, "old_RT": b.old, "prox_RT": b.prox, "cur_RT": b.cur, "ref_RT": None} | columns
    return PolicyTable(**columns, mask_RT=b.mask, version_RT=version, group_R=b.group)


def test_a_corrector_takes_its_own_ratio_or_a_tensor_and_no_other(make_batch: Callable) -> None:
    b = make_batch()
    mismatch, total = mismatch_log_ratio(b.old, b.mu), total_log_ratio(b.prox, b.mu)
    policy = policy_log_ratio(b.cur, b.old)
    for wrong in (policy, total):
        for corrector in (tis, icepop):
            with pytest.raises(TypeError, match="wanted a MismatchLogRatio or a tensor, got a"):
                corrector(wrong, b.mask)
    for wrong in (mismatch, total):
        with pytest.raises(TypeError, match="wanted a PolicyLogRatio"):
            decoupled(wrong, b.mask)
    for wrong in (mismatch, policy):
        with pytest.raises(TypeError, match="wanted a TotalLogRatio"):
            cap_group_mass(response_log_ratio(wrong, b.mask), b.group, cap=4.0)
        with pytest.raises(TypeError, match="wanted a TotalLogRatio"):
            m2_mask(wrong, b.advantage, b.mask)
        with pytest.raises(TypeError, match="wanted a TotalLogRatio"):
            opsm(wrong, b.advantage, b.mask)
    assert torch.equal(tis(mismatch, b.mask).weight_RT, tis(b.old - b.mu, b.mask).weight_RT)


def test_the_product_of_the_factors_is_the_total_ratio(make_batch: Callable) -> None:
    b = make_batch()
    choice = CorrectionChoice(
        engine="tis", cap=1e6, staleness="decoupled", staleness_hyper={"cap": 1e6}, base="prox", steps_per_update=2
    )
    weight = correct(table(b), choice).weight_RT * (b.cur - b.prox).exp()
    assert torch.allclose(weight[b.mask], (b.cur - b.mu).exp()[b.mask], rtol=1e-12)


def test_swapping_mu_and_old_turns_the_weight_over(make_batch: Callable) -> None:
    """A token likelier in the engine than in the trainer weighs less than 1, and swapped more than 1."""
    b = make_batch()
    likelier_in_engine = replace(b, old=b.mu - 0.5)
    choice = CorrectionChoice(engine="tis")
    weight = correct(table(likelier_in_engine), choice).weight_RT[b.mask]
    swapped = correct(table(replace(b, mu=b.mu - 0.5, old=b.mu)), choice).weight_RT[b.mask]
    assert torch.allclose(weight, torch.tensor(0.6065306597, dtype=torch.float64))
    assert torch.allclose(swapped, torch.tensor(1.6487212707, dtype=torch.float64))


def test_old_and_prox_have_their_own_correctors(make_batch: Callable) -> None:
    """Another engine at fixed weights moves the mismatch only; an update at a fixed engine moves staleness only."""
    b = make_batch()
    choice = CorrectionChoice(engine="tis", cap=1e6, staleness="decoupled", base="prox", steps_per_update=2)
    before = correct(table(b), choice).factors
    other_engine = correct(table(replace(b, mu=b.mu - 0.1)), choice).factors
    assert bool((other_engine["engine"].weight_RT > before["engine"].weight_RT)[b.mask].all())
    assert torch.equal(other_engine["staleness"].weight_RT, before["staleness"].weight_RT)
    updated = correct(table(replace(b, prox=b.prox - 0.1)), choice).factors
    assert torch.equal(updated["engine"].weight_RT, before["engine"].weight_RT)
    assert bool((updated["staleness"].weight_RT <= before["staleness"].weight_RT)[b.mask].all())


def test_with_the_total_ratio_engine_correctors_mask_and_do_not_weigh(make_batch: Callable) -> None:
    b = make_batch()
    choice = CorrectionChoice(
        engine="icepop", low=0.8, high=1.25, objective="score", group_mass_cap_per_response=1.0
    )
    result = correct(table(b), choice)
    mass = cap_group_mass(
        response_log_ratio(total_log_ratio(b.prox, b.mu), b.mask), b.group, cap=4.0
    )  # the mass of the original mask
    keep = icepop(mismatch_log_ratio(b.old, b.mu), b.mask, low=0.8, high=1.25).keep_RT
    assert 0 < int(keep.sum()) < int(b.mask.sum())
    assert torch.equal(result.keep_RT, keep)
    assert torch.allclose(result.weight_RT, torch.where(keep, mass[:, None], 0.0), atol=1e-12)


def test_what_sis_accepts_takes_no_engine_weight_but_is_masked_by_it(make_batch: Callable) -> None:
    b = make_batch()
    engine = icepop(mismatch_log_ratio(b.old, b.mu), b.mask, low=0.8, high=1.25)
    accepted = torch.arange(b.mask.numel()).reshape(b.mask.shape) % 2 == 0
    result = correct(table(b), CorrectionChoice(engine="icepop", low=0.8, high=1.25, staleness="sis"), accepted_RT=accepted)
    assert torch.equal(result.keep_RT, engine.keep_RT)
    assert torch.equal(result.weight_RT, torch.where(accepted & engine.keep_RT, 1.0, engine.weight_RT))
    assert result.counts["sis_accepted"] == int((accepted & engine.keep_RT).sum())


@pytest.mark.parametrize(("name", "hyper"), [("opsm", {"threshold": 0.05}), ("m2_mask", {"budget": 0.05})])
def test_what_drops_for_staleness_reads_prox_over_mu_and_not_prox_over_old(
    name: str, hyper: dict[str, float], make_batch: Callable
) -> None:
    b = make_batch()
    b = replace(b, advantage=-b.advantage.abs())
    found = correct(table(b), CorrectionChoice(staleness=name, staleness_hyper=hyper), b.advantage).factors["staleness"]
    by_mu, by_old = (
        opsm(b.prox - base, b.advantage, b.mask, **hyper) if name == "opsm" else m2_mask(b.prox - base, b.advantage, b.mask, **hyper)
        for base in (b.mu, b.old)
    )
    assert torch.equal(found.keep_RT, by_mu.keep_RT)
    assert not torch.equal(by_mu.keep_RT, by_old.keep_RT)


def test_m2_range_gives_a_clip_and_masks_nothing(make_batch: Callable) -> None:
    b = make_batch()
    choice = CorrectionChoice(staleness="m2_range", staleness_hyper={"budget": 1e-4, "floor_low": 1e-3, "floor_high": 1e-3})
    result = correct(table(b), choice, b.advantage)
    assert torch.equal(result.keep_RT, b.mask)
    assert result.clip == m2_range(b.prox - b.mu, b.advantage, b.mask, budget=1e-4, floor_low=1e-3, floor_high=1e-3)
    assert result.clip != m2_range(b.prox - b.old, b.advantage, b.mask, budget=1e-4, floor_low=1e-3, floor_high=1e-3)
    assert correct(table(b), CorrectionChoice()).clip is None


def test_a_response_without_a_token_has_no_mass(make_batch: Callable) -> None:
    b = make_batch(rows=4, groups=1)
    mask = b.mask.clone()
    mask[0] = False
    choice = CorrectionChoice(objective="score", group_mass_cap_per_response=1.0)
    result = correct(table(replace(b, mask=mask, prox=b.mu + 1.0 * (b.mu < -1) - 1e-3)), choice)
    weight_R = result.weight_RT.amax(-1)
    assert weight_R[0] == 0.0
    assert float(weight_R.sum()) == pytest.approx(3.0)  # cap 1 x 3 present
    assert result.counts["group_mass_capped"] == int(mask.sum())


def test_counts() -> None:
    column = torch.tensor([[-3.0, -3.0, -3.0, -30.0, -3.0]], dtype=torch.float64)
    old = torch.tensor([[-3.0, -1.0, -5.0, -0.5, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    version, group = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    t = PolicyTable(column, old, None, None, None, mask, version, group)
    assert correct(t, CorrectionChoice(engine="tis")).counts == {
        "tokens": 4, "kept": 4, "capped": 2, "engine_masked": 0, "engine_capped": 2
    }  # fmt: skip
    assert correct(t, CorrectionChoice(engine="icepop")).counts == {
        "tokens": 4, "kept": 1, "capped": 0, "engine_masked": 3
    }  # fmt: skip
    prox = torch.tensor([[-3.0, -1.0, -0.5, -0.5, -1.0]], dtype=torch.float64)  # prox/old: 1, 1, e^4.5, 1
    stale = PolicyTable(column, old, prox, None, None, mask, version, group)
    both = CorrectionChoice(engine="tis", staleness="decoupled", base="prox", steps_per_update=2)
    assert correct(stale, both).counts == {
        "tokens": 4, "kept": 4, "capped": 3, "engine_masked": 0, "engine_capped": 2, "staleness_masked": 0, "staleness_capped": 1
    }  # fmt: skip
    dropped = replace(both, filter="veto", filter_hyper={"floor": 0.5}, staleness_hyper={"cap": 100.0})
    assert correct(stale, dropped).counts["capped"] == 0  # the veto drops the response: what is dropped is not capped
    assert correct(stale, replace(both, staleness_hyper={"cap": 100.0})).counts["staleness_capped"] == 0
    twice = correct(PolicyTable(column - 3, column, column + 2, None, None, mask & (column > -4), version, group), both).counts
    assert (twice["engine_capped"], twice["staleness_capped"], twice["capped"]) == (3, 3, 3)  # one token, cut by both: counted once


def test_a_missing_column_is_named(make_batch: Callable) -> None:
    b = make_batch()
    with pytest.raises(ValueError, match="tis needs old log-probs, and this batch has none"):
        correct(table(b, old_RT=None), CorrectionChoice(engine="tis"))
    with pytest.raises(ValueError, match="cap_group_mass needs prox"):
        correct(table(b, prox_RT=None), CorrectionChoice(objective="score", group_mass_cap_per_response=1.0))
    with pytest.raises(ValueError, match="opsm needs the advantages"):
        correct(table(b), CorrectionChoice(staleness="opsm"))
    for staleness in ("m2_mask", "m2_range"):
        with pytest.raises(ValueError, match=f"{staleness} needs the advantages"):
            correct(table(b), CorrectionChoice(staleness=staleness))
    with pytest.raises(ValueError, match="sis needs the accepted tokens"):
        correct(table(b), CorrectionChoice(staleness="sis"))


def test_table_refuses_what_is_no_policy_table(make_batch: Callable) -> None:
    b = make_batch()
    first = (0, 0)
    positive, infinite = b.mu.clone(), b.mu.clone()
    positive[first], infinite[first] = 0.1, -torch.inf
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "mu has 1 trainable tokens", {"mu_RT": positive}),
        (ValueError, "old has 1 trainable tokens", {"old_RT": infinite}),
        (ValueError, "prox carries a gradient", {"prox_RT": b.prox.clone().requires_grad_()}),
        (ValueError, "old shares memory with cur", {"old_RT": b.cur.detach()}),
        (ValueError, "does not match the mask", {"cur_RT": b.cur[:, 1:]}),
        (TypeError, "old is torch.float32, mu is torch.float64", {"old_RT": b.old.float()}),
    ]
    for kind, message, columns in bad:
        with pytest.raises(kind, match=message):
            table(b, **columns)
    with pytest.raises(TypeError, match="mask must be bool"):
        table(replace(b, mask=b.mask.long()))
    with pytest.raises(ValueError, match=r"group_R has shape \(11,\) for 12 responses"):
        table(replace(b, group=b.group[1:]))
    assert table(b, cur_RT=b.cur.clone().requires_grad_()).column("cur", needed_by="the loss").requires_grad


def test_clamped_count_is_of_tokens_and_reads_the_mask() -> None:
    one, other = torch.tensor([[20.0, 20.1, -20.1, 99.0, 0.0]]), torch.tensor([[0.0, 20.1, 0.0, math.nan, -20.1]])
    mask = torch.tensor([[True, True, True, False, True]])
    assert clamped_count([MismatchLogRatio(one)], mask) == 2
    assert clamped_count([MismatchLogRatio(one), PolicyLogRatio(other)], mask) == 3
    assert clamped_count([], mask) == 0
