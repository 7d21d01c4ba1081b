"""Every number of `leeway whatif` against plain loops in Python floats, its two gradients against autograd through the model: one recipe
that weighs, masks and clips, on a batch that is stale and of another engine."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Config
from learner.logprobs import PolicyModel
from learner.whatif import Logged, compare
from tests.learner.test_whatif import logged_batch, row_log_probs, variant

LOW, HIGH, CLIP_LOW, CLIP_HIGH = 0.75, 1.5, 0.1, 0.15
RECIPE = {"objective": "ppo", "engine": "icepop", "engine_low": LOW, "engine_high": HIGH, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}


class Plain:
    """The same, token by token."""

    def __init__(self, logged: Logged) -> None:
        assert logged.prox_RT is not None
        lease = logged.lease
        rewards = [head.verdict.reward for head in lease.heads]  # type: ignore[union-attr]
        kept_sum, total_sum, wanted, active = 0.0, 0.0, 0, 0
        weights: list[float] = []
        whole: list[float] = []
        rows: list[tuple[float, list[float]]] = []
        for row, head in enumerate(lease.heads):
            group = [reward for other, reward in zip(lease.heads, rewards, strict=True) if other.order_id == head.order_id]
            advantage = rewards[row] - sum(group) / len(group)
            columns = (lease.payloads[row].mu, lease.anchors[head.rollout_id, 0].values, logged.prox_RT[row], logged.cur_RT[row])
            slopes, total = [], 0.0
            for token in range(head.response_len):
                mu, old, prox, cur = (float(column[token]) for column in columns)
                mismatch, r = math.exp(old - mu), math.exp(cur - old)
                kept = LOW <= mismatch <= HIGH
                free = r <= 1 + CLIP_HIGH if advantage > 0 else r >= 1 - CLIP_LOW
                slope = -advantage * r * mismatch if kept and free else 0.0
                weights.append(mismatch if kept else 0.0)
                slopes.append(slope)
                kept_sum += kept * math.exp(prox - mu)
                total_sum += math.exp(prox - mu)
                total += prox - mu
                wanted += advantage != 0
                active += slope != 0
            whole.append(math.exp(total))
            rows.append((advantage, slopes))
        tokens, mean = len(weights), sum(whole) / len(whole)
        self.own = [[slope / tokens for slope in slopes] for _, slopes in rows]
        self.exact = [[-advantage * ratio / mean / tokens] * len(slopes) for (advantage, slopes), ratio in zip(rows, whole, strict=True)]
        share = [weight / sum(weights) for weight in weights if weight]
        self.numbers = {
            "kept": sum(weight > 0 for weight in weights) / tokens, "kept_mass": kept_sum / total_sum, "active": active / wanted,
            "ess": sum(weights) ** 2 / (tokens * sum(weight**2 for weight in weights)),
            "weight_entropy": -sum(part * math.log(part) for part in share) / math.log(tokens)}
        self.exact_ess = sum(whole) ** 2 / (len(whole) * sum(ratio**2 for ratio in whole))


def gradient(policy: PolicyModel, logged: Logged, slopes: list[list[float]]) -> Tensor:
    """Straight through the model, row by row."""
    policy.zero_grad()
    for row, values in enumerate(slopes):
        if any(values):
            (row_log_probs(policy, logged.lease, row) * torch.tensor(values)).sum().backward()
    found = torch.cat([parameter.grad.flatten().double() for parameter in policy.parameters() if parameter.grad is not None])
    policy.zero_grad()
    return found


def test_every_number_is_that_of_plain_loops(config: Config, policy: PolicyModel) -> None:
    logged = logged_batch(config, policy, mismatch=0.2, drift=0.15)
    plain = Plain(logged)
    found = compare(logged, config, [variant(config, **RECIPE)], policy)
    (row,) = found.rows
    assert 0.3 < plain.numbers["kept"] < 0.95 and 0.3 < plain.numbers["active"] < plain.numbers["kept"]
    for name, value in plain.numbers.items():
        assert row[name] == pytest.approx(value, rel=1e-5), name
    assert abs(plain.numbers["kept_mass"] - plain.numbers["kept"]) > 1e-3
    assert found.exact_ess == pytest.approx(plain.exact_ess, rel=1e-4)
    own, exact = (gradient(policy, logged, slopes) for slopes in (plain.own, plain.exact))
    cosine = float(own @ exact / (own.norm() * exact.norm()))
    assert 0.2 < cosine < 0.99
    assert row["cosine"] == pytest.approx(cosine, abs=1e-4)
    assert row["norm_ratio"] == pytest.approx(float(own.norm() / exact.norm()), rel=1e-3)


def test_each_variant_is_compared_with_what_its_own_advantages_give_on_policy(config: Config, policy: PolicyModel) -> None:
    """Advantages of twice the size change both gradients of a variant, so neither number; the other variant's stay its own."""
    logged = logged_batch(config, policy, mismatch=0.2, drift=0.15)
    names: dict[str, dict[str, Any]] = {"centred": RECIPE, "scaled": {**RECIPE, "estimator": "grpo"}, "plain": {"objective": "score"}}
    together = compare(logged, config, [variant(config, name, **recipe) for name, recipe in names.items()], policy).rows
    for name, row in zip(names, together, strict=True):
        (alone,) = compare(logged, config, [variant(config, name, **names[name])], policy).rows
        assert (row["name"], row["cosine"]) == (name, pytest.approx(alone["cosine"], abs=1e-6))
        assert row["norm_ratio"] == pytest.approx(alone["norm_ratio"], rel=1e-5)
    assert len(np.unique(np.round([row["cosine"] for row in together], 4))) == 3
