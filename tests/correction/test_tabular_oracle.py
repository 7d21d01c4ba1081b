"""Tabular policies whose every sequence is enumerated: expectations are exact sums, not samples.

Vocabulary 4 with token 0 as the end token, length <= 3: 40 sequences of ragged length. F is any function of one.
"""

import itertools

import pytest
import torch
from torch import Tensor

from correction.diagnostics import k3
from correction.groupmass import cap_group_mass
from correction.mismatch import icepop, tis
from correction.ratios import mismatch_log_ratio, response_log_ratio, total_log_ratio
from correction.reference import reference_kl
from correction.staleness import decoupled
from learner.advantage import group_advantages
from learner.objective import aggregate, token_losses

VOCABULARY, LENGTH = 4, 3


def _sequences() -> list[tuple[int, ...]]:
    ended = [
        (*body, 0)
        for n in range(LENGTH)
        for body in itertools.product(range(1, VOCABULARY), repeat=n)
    ]
    return ended + list(itertools.product(range(1, VOCABULARY), repeat=LENGTH))


SEQUENCES = _sequences()
PREFIXES = sorted({s[:t] for s in SEQUENCES for t in range(len(s))})
PREFIX_RT = torch.tensor([[PREFIXES.index(s[:t]) if t < len(s) else 0 for t in range(LENGTH)] for s in SEQUENCES])
TOKEN_RT = torch.tensor([[s[t] if t < len(s) else 0 for t in range(LENGTH)] for s in SEQUENCES])
MASK_RT = torch.tensor([[t < len(s) for t in range(LENGTH)] for s in SEQUENCES])
RANDOM = torch.Generator().manual_seed(0)
LOGITS = torch.randn(len(PREFIXES), VOCABULARY, generator=RANDOM, dtype=torch.float64)
F_R = torch.randn(len(SEQUENCES), generator=RANDOM, dtype=torch.float64)


def drifted(scale: float) -> Tensor:
    return LOGITS + scale * torch.randn(LOGITS.shape, generator=RANDOM, dtype=torch.float64)


MU, OLD, PROX = drifted(0.3), drifted(0.3), drifted(0.5)


def token_log_probs(logits: Tensor) -> Tensor:
    """[R, T], NaN where the sequence has ended."""
    return logits.log_softmax(-1)[PREFIX_RT, TOKEN_RT].masked_fill(~MASK_RT, torch.nan)


def probability(logits: Tensor) -> Tensor:
    return torch.where(MASK_RT, token_log_probs(logits), 0.0).sum(-1).exp()


def expectation(logits: Tensor, weight_R: Tensor | float = 1.0) -> float:
    return float((probability(logits) * weight_R * F_R).sum())


def test_the_sequences_are_all_there_are() -> None:
    assert len(SEQUENCES) == 1 + 3 + 9 + 27
    for logits in (MU, OLD, PROX):
        assert float(probability(logits).sum()) == pytest.approx(1.0, abs=1e-14)


def test_uncapped_sequence_weight_is_unbiased() -> None:
    mismatch = mismatch_log_ratio(token_log_probs(OLD), token_log_probs(MU))
    weight_R = tis(mismatch, MASK_RT, level="sequence", cap=1e9).weight_RT[:, 0]
    assert expectation(MU, weight_R) == pytest.approx(expectation(OLD), abs=1e-10)


def test_the_product_of_token_weights_is_unbiased() -> None:
    """Engine times staleness, token by token, carries an expectation under mu over to prox."""
    mu, old, prox = (token_log_probs(logits) for logits in (MU, OLD, PROX))
    engine = tis(mismatch_log_ratio(old, mu), MASK_RT, cap=1e9).weight_RT
    staleness = decoupled(prox - old, MASK_RT, cap=1e9).weight_RT
    weight_R = torch.where(MASK_RT, engine * staleness, 1.0).prod(-1)
    assert expectation(MU, weight_R) == pytest.approx(expectation(PROX), abs=1e-10)


def exact_gradient() -> Tensor:
    """d E_prox[F] / d logits."""
    logits = PROX.clone().requires_grad_()
    return torch.autograd.grad((probability(logits) * F_R).sum(), logits)[0]


def sampled_gradient(weight_R: Tensor) -> Tensor:
    """E_mu of the score objective's gradient, each sequence weighted by its probability and `weight_R`."""
    logits = PROX.clone().requires_grad_()
    loss_RT = token_losses(token_log_probs(logits), None, F_R, MASK_RT, objective="score")
    weight_RT = (probability(MU) * weight_R)[:, None].expand_as(loss_RT)
    loss = aggregate(loss_RT * weight_RT, MASK_RT, mode="constant", denominator=1.0)
    return -torch.autograd.grad(loss, logits)[0]


def total_R() -> Tensor:
    return response_log_ratio(total_log_ratio(token_log_probs(PROX), token_log_probs(MU)), MASK_RT).value


def test_the_score_gradient_with_the_total_ratio_is_unbiased() -> None:
    assert torch.allclose(sampled_gradient(total_R().exp()), exact_gradient(), atol=1e-10)


def test_swapping_the_roles_biases_the_gradient() -> None:
    assert not torch.allclose(sampled_gradient((-total_R()).exp()), exact_gradient(), atol=1e-3)


def biases(weights: list[Tensor]) -> list[float]:
    exact = exact_gradient()
    return [float((sampled_gradient(weight_R) - exact).norm()) for weight_R in weights]


def falls_to_zero(values: list[float]) -> bool:
    return values[0] > 1e-2 and values[-1] < 1e-10 and all(a >= b - 1e-12 for a, b in itertools.pairwise(values))


def test_the_bias_of_tis_vanishes_as_its_cap_opens() -> None:
    total = token_log_probs(PROX) - token_log_probs(MU)
    caps = (0.25, 1.0, 2.0, 4.0, 100.0)
    weights = [tis(total, MASK_RT, level="sequence", cap=cap).weight_RT[:, 0] for cap in caps]
    assert falls_to_zero(biases(weights))


def test_the_bias_of_icepop_vanishes_as_its_bounds_open() -> None:
    total = token_log_probs(PROX) - token_log_probs(MU)
    weights = []
    for bound in (1.02, 1.5, 3.0, 100.0):
        weight_RT = icepop(total, MASK_RT, low=1 / bound, high=bound).weight_RT
        weights.append(torch.where(MASK_RT, weight_RT, 1.0).prod(-1))
    bias = biases(weights)
    assert bias[0] > 1e-2
    assert bias[-1] < 1e-10
    assert bias[-2] < bias[0]


PAIR_P2 = torch.cartesian_prod(torch.arange(len(SEQUENCES)), torch.arange(len(SEQUENCES)))
PAIR_GROUP = torch.arange(len(PAIR_P2))[:, None].expand(-1, 2).reshape(-1)


def pair_expectation(value_N: Tensor) -> Tensor:
    """E over independent pairs from mu of the pair's mean value."""
    probability_P = probability(MU)[PAIR_P2].prod(-1)
    return (probability_P * value_N.view(-1, 2).mean(-1)).sum()


def test_group_mass_is_unbiased_with_room_and_its_bias_grows_as_the_cap_falls() -> None:
    """Every pair of sequences is a group of two."""
    flat = PAIR_P2.reshape(-1)
    exact = expectation(PROX)
    bias = [
        abs(float(pair_expectation(cap_group_mass(total_R()[flat], PAIR_GROUP, cap=cap) * F_R[flat])) - exact)
        for cap in (1e9, 4.0, 2.0)
    ]
    assert bias[0] < 1e-10
    assert bias[0] < bias[1] < bias[2]


def test_leave_one_out_baseline_leaves_the_gradient_unbiased() -> None:
    """On-policy pairs: rloo's expected gradient is the exact one; without the leave-one-out factor, half of it."""
    flat = PAIR_P2.reshape(-1)
    weight_N = probability(PROX)[PAIR_P2].prod(-1)[:, None].expand(-1, 2).reshape(-1) / 2
    gradients = {}
    for estimator in ("rloo", "dr_grpo"):
        advantage_N = group_advantages(F_R[flat], PAIR_GROUP, estimator=estimator)
        logits = PROX.clone().requires_grad_()
        loss_NT = token_losses(token_log_probs(logits)[flat], None, advantage_N, MASK_RT[flat], objective="score")
        loss = aggregate(loss_NT * weight_N[:, None], MASK_RT[flat], mode="constant", denominator=1.0)
        gradients[estimator] = -torch.autograd.grad(loss, logits)[0]
    assert torch.allclose(gradients["rloo"], exact_gradient(), atol=1e-10)
    assert torch.allclose(gradients["dr_grpo"], exact_gradient() / 2, atol=1e-10)


def first_token(logits: Tensor) -> Tensor:
    """Log-probs of the first token's whole vocabulary, [1, V]."""
    return logits.log_softmax(-1)[PREFIXES.index(())][None]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (first_token(p).exp() * (first_token(p) - first_token(q))).sum()


def test_k3_has_the_kl_from_sampler_to_trainer_as_its_expectation() -> None:
    x = first_token(OLD) - first_token(MU)
    each = torch.stack([k3(x[:, v]) for v in range(VOCABULARY)])
    assert float((first_token(MU).exp()[0] * each).sum()) == pytest.approx(float(kl(MU, OLD)), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_expectations(estimator: str) -> None:
    """Values of k1 and k3 are unbiased for KL(cur || ref); k2's gradient is that KL's, k3's is KL(ref || cur)'s."""
    logits = PROX.clone().requires_grad_()
    cur, ref = first_token(logits), first_token(MU)
    each = reference_kl(cur, ref, torch.ones_like(cur, dtype=torch.bool), estimator=estimator)
    value = (cur.detach().exp() * each).sum()
    if estimator != "k2":
        assert value.item() == pytest.approx(kl(PROX, MU).item(), abs=1e-12)
    slope = torch.autograd.grad(value, logits)[0]
    wanted = {"k1": 0.0 * logits.sum(), "k2": kl(logits, MU), "k3": kl(MU, logits)}[estimator]
    assert torch.allclose(slope, torch.autograd.grad(wanted, logits)[0], atol=1e-12)
