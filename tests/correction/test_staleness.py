"""Staleness correctors, SIS and its randomness, the anchor, the f-divergence bounds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from correction.bounds import DIVERGENCES, TOPOLOGIES, fdiv_bounds, fdiv_estimate, ripo_bounds
from correction.mismatch import binary_kl
from correction.sis import counter_uniform, sis_accept
from correction.staleness import decoupled, m2_mask, m2_range, opsm, prefix_log_ratio


def tensor(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def every(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_decoupled_caps_or_masks() -> None:
    x = tensor(0.001, 1.0, 4.9, 5.1).log()
    assert decoupled(x, every(x)).weight_RT[0].tolist() == pytest.approx([0.001, 1.0, 4.9, 5.0])
    masked = decoupled(x, every(x), mode="mask")
    assert masked.weight_RT[0].tolist() == pytest.approx([0.001, 1.0, 4.9, 0.0])
    assert masked.keep_RT[0].tolist() == [True, True, True, False]


def test_opsm_drops_negative_responses_that_drifted_away_from_the_behaviour() -> None:
    total = torch.tensor([[-0.6, -0.6], [-0.6, -0.6], [0.6, 0.6], [-0.4, -0.4]])
    advantage = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    keep = opsm(total, advantage, every(total)).keep_RT
    assert keep.tolist() == [[False, False], [True, True], [True, True], [True, True]]


def test_m2_mask_drops_the_largest_of_the_pushed_tokens_until_the_budget_is_met() -> None:
    x = tensor(0.1, 0.5, 0.2, math.nan, 0.3, -0.9)
    mask = torch.tensor([[True, True, True, False, True, True]])
    up = torch.ones(1)
    # squares .01 .25 .04 .09: means of the smallest 1, 2, 3, 4 are .01 .025 .0467 .0975; the last token's gradient leads back
    assert m2_mask(x, up, mask).keep_RT[0].tolist() == [True, False, True, False, False, True]
    assert m2_mask(x, up, mask, budget=0.05).keep_RT[0].tolist() == [True, False, True, False, True, True]
    assert m2_mask(x, up, mask, budget=1e-9).keep_RT[0].tolist() == [False, False, False, False, False, True]
    assert m2_mask(x, up, mask, budget=0.0976).keep_RT.equal(mask)
    assert m2_mask(-x, -up, mask).keep_RT.equal(m2_mask(x, up, mask).keep_RT)
    assert m2_mask(x, -up, mask).keep_RT[0].tolist() == [True, True, True, False, True, False]  # now only the last one is pushed
    assert m2_mask(x, 0 * up, mask).keep_RT.equal(mask)
    assert not bool(m2_mask(x, up, torch.zeros_like(mask)).keep_RT.any())


def test_m2_mask_takes_one_mean_over_all_responses_of_the_batch() -> None:
    x = torch.tensor([[0.3, 0.01], [-0.01, -0.01]], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0])
    assert m2_mask(x, advantage, every(x), budget=0.0226).keep_RT.tolist() == [[True, True], [True, True]]  # (.09 + .0003) / 4
    assert m2_mask(x, advantage, every(x), budget=0.0225).keep_RT.tolist() == [[False, True], [True, True]]


def test_m2_range_meets_the_budget_where_the_clip_bites() -> None:
    x = torch.tensor([[0.9, -0.9], [0.8, -0.7], [0.1, -0.1]], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0])
    biting = torch.tensor([0.9, 0.7, 0.1], dtype=torch.float64)
    low, high = m2_range(x, advantage, every(x), floor_low=0.0, floor_high=0.0)
    width = math.log1p(high)
    assert low == pytest.approx(1 - math.exp(-width))
    assert float(biting.clamp(max=width).square().mean()) == pytest.approx(0.04)
    assert m2_range(x, advantage, every(x)) == (0.3, 0.5)  # the floors
    assert m2_range(x, advantage, every(x), budget=1.0) == (1.0, math.inf)
    assert m2_range(x, torch.zeros(3), every(x)) == (1.0, math.inf)


def test_prefix_log_ratio_skips_masked_tokens() -> None:
    x, mask = tensor(0.2, math.nan, 0.4, -0.3), torch.tensor([[True, False, True, True]])
    assert prefix_log_ratio(x, mask)[0, mask[0]].tolist() == pytest.approx([0.2, 0.3, 0.1])


def test_counter_draws_do_not_depend_on_order_or_split() -> None:
    rows = torch.arange(64)
    draws = counter_uniform(7, 3, rows, 40)
    assert torch.equal(counter_uniform(7, 3, rows.flip(0), 40).flip(0), draws)
    assert torch.equal(counter_uniform(7, 3, rows[10:20], 25), draws[10:20, :25])
    for seed, update, others in ((8, 3, rows), (7, 4, rows), (7, 3, rows + 64)):
        assert not bool((counter_uniform(seed, update, others, 40) == draws).any())


def test_counter_draws_are_uniform() -> None:
    draws = counter_uniform(0, 0, torch.arange(1000), 100).flatten()
    assert 0 <= float(draws.min()) and float(draws.max()) < 1
    expected = len(draws) / 50
    chi2 = float((torch.histc(draws, 50, 0, 1) - expected).square().sum() / expected)
    assert chi2 < 85.4  # 49 degrees of freedom, p = 1e-3
    corr = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
    assert abs(float(corr)) < 0.015


def test_counter_draws_are_pinned() -> None:
    """A rerun on another machine or release must draw the same."""
    assert counter_uniform(1, 2, torch.tensor([3]), 5)[0, 4].item() == python_uniform(1, 2, 3, 4)
    far = counter_uniform(-5, 2**40, torch.tensor([-(2**50)]), 1)
    assert far[0, 0].item() == python_uniform(-5, 2**40, -(2**50), 0)


def python_uniform(*keys: int) -> float:
    """splitmix64 over the keys with unbounded integers."""
    wrap = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & wrap
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        return z ^ (z >> 31)

    state = keys[0] & wrap
    for key in keys[1:]:
        state = mix(state) ^ (key & wrap)
    return (mix(state) >> 11) / (1 << 53)


VOCABULARY = 6


def accept_many(now: Tensor, mu: Tensor, k: int, draws: int) -> tuple[Tensor, Tensor]:
    """Tokens sampled from mu, and which of them SIS accepts, [1, draws]."""
    tokens = torch.multinomial(mu, draws, replacement=True, generator=torch.Generator().manual_seed(0))[None]
    top = mu.topk(k)
    ids = top.indices.expand(1, draws, k)
    accept = sis_accept(
        tokens, ids, now.log()[ids], mu.log()[ids], torch.ones(1, draws, dtype=torch.bool),
        uniform_RT=counter_uniform(1, 0, torch.tensor([0]), draws),
    )  # fmt: skip
    return tokens, accept


@pytest.mark.parametrize("k", [VOCABULARY, 3])
def test_sis_accepted_tokens_follow_the_current_policy(k: int) -> None:
    now = torch.tensor([0.35, 0.25, 0.15, 0.12, 0.08, 0.05], dtype=torch.float64)
    mu = torch.tensor([0.22, 0.30, 0.20, 0.13, 0.10, 0.05], dtype=torch.float64)
    tokens, accept = accept_many(now, mu, k, 60_000)
    counts = torch.bincount(tokens[accept], minlength=VOCABULARY).double()
    target = torch.zeros_like(now).index_copy(0, mu.topk(k).indices, now[mu.topk(k).indices])
    expected = target / target.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi2 = float(((counts - expected)[inside].square() / expected[inside]).sum())
    assert chi2 < {6: 20.5, 3: 13.8}[k]  # 5 and 2 degrees of freedom, p = 1e-3
    envelope = float((now / mu)[mu.topk(k).indices].max())
    assert float(accept.double().mean()) == pytest.approx(float(target.sum()) / envelope, abs=0.01)


def test_sis_always_accepts_on_policy_and_never_outside_the_top_k_or_the_mask() -> None:
    ids = torch.tensor([[[4, 7, 0], [4, 7, 0], [4, 7, 0]]])
    mu = torch.tensor([[[-0.7, -1.2, -math.inf]] * 3])
    tokens, mask = torch.tensor([[4, 9, 7]]), torch.tensor([[True, True, False]])
    draw = torch.full((1, 3), 0.999999)
    assert sis_accept(tokens, ids, mu.nan_to_num(neginf=math.nan), mu, mask, uniform_RT=draw).tolist() == [
        [True, False, False]
    ]


def test_ripo_bounds_golden_numbers() -> None:
    old = tensor(0.8, 0.1, 0.01, 1e-6).log()
    low, high = ripo_bounds(old, delta=0.05, cap=10.0)
    assert high[0].tolist() == pytest.approx([1.25, 1.7071, 3.2361, 10.0], abs=5e-5)
    assert low[0].tolist() == pytest.approx([0.75, 0.2929, 0.0, 0.0], abs=5e-5)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_fdiv_bounds_are_the_ends_of_the_legal_interval(divergence: str, topology: str) -> None:
    old, delta, cap = tensor(0.95, 0.5, 0.1, 0.003).log(), 0.02, 8.0
    low, high = fdiv_bounds(old, divergence=divergence, topology=topology, delta=delta, cap=cap)
    inside = lambda r: fdiv_estimate(r, old, divergence=divergence, topology=topology) <= delta  # noqa: E731
    assert bool((inside(low.clamp(min=1e-8)) & inside(high)).all())
    limit = torch.minimum(torch.full_like(old, cap), 1 / old.exp()) if topology == "binary" else torch.tensor(cap)
    assert bool((~inside(high * 1.000001) | (high >= limit * 0.999999)).all())
    assert bool((~inside(low * 0.999999) | (low == 0)).all())
    assert bool(((low < 1) & (high > 1)).all())


def test_fdiv_binary_stops_at_probability_one() -> None:
    old = tensor(0.95, 0.4).log()
    for divergence in ("kl", "tv", "chi2"):
        high = fdiv_bounds(old, divergence=divergence, topology="binary", delta=2.0, cap=2.0)[1]
        assert high[0].tolist() == pytest.approx([1 / 0.95, 2.0]), divergence


def test_fdiv_identities() -> None:
    old, ratio = tensor(0.7, 0.3, 0.02).log(), tensor(1.2, 0.5, 1.8)
    new = old + ratio.log()
    estimate = lambda f, topology: fdiv_estimate(ratio, old, divergence=f, topology=topology)  # noqa: E731
    assert torch.allclose(estimate("kl", "binary"), binary_kl(new, old), atol=1e-12)
    assert torch.allclose(estimate("reverse_kl", "binary"), binary_kl(old, new), atol=1e-12)
    assert torch.allclose(estimate("tv", "binary"), (new.exp() - old.exp()).abs(), atol=1e-12)
    low, high = fdiv_bounds(old, divergence="chi2", topology="atomic", delta=0.025, cap=10.0)
    ripo_low, ripo_high = ripo_bounds(old, delta=0.05, cap=10.0)
    assert torch.allclose(high, ripo_high, rtol=1e-9) and torch.allclose(low, ripo_low, atol=1e-8)
    low, high = fdiv_bounds(old, divergence="abs_log", topology="mc", delta=0.2, cap=10.0)
    assert torch.allclose(high, torch.full_like(old, math.exp(0.2)))
    assert torch.allclose(low * high, torch.ones_like(old))


def test_bad_settings_are_refused(make_batch: Callable) -> None:
    x = torch.zeros(1, 2)
    for call in (
        lambda: decoupled(x, every(x), cap=0.0),
        lambda: decoupled(x, every(x), mode="both"),
        lambda: m2_mask(x, torch.ones(len(x)), every(x), budget=0.0),
        lambda: ripo_bounds(x, delta=0.0, cap=10.0),
        lambda: fdiv_bounds(x, divergence="kl", topology="mc", delta=0.1, cap=1.0),
        lambda: fdiv_bounds(x, divergence="js", topology="mc", delta=0.1, cap=2.0),
        lambda: fdiv_bounds(x, divergence="kl", topology="ternary", delta=0.1, cap=2.0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError, match="row numbers must be int64"):
        counter_uniform(0, 0, torch.zeros(2), 3)
