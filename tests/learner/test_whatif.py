"""One batch under many recipes, on a tiny model: numbers against plain loops, gradients against autograd straight through the model."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Config
from learner.batch import Anchor, LeaseRows, tabulate
from learner.logprobs import PolicyModel
from learner.whatif import Compared, Logged, Variant, compare, exact_ess, length_buckets
from learner.whatif_gradients import Batch
from tests.support.leases import give_baselines, make_lease


def logged_batch(config: Config, policy: PolicyModel, *, mismatch: float = 0.0, drift: float = 0.0) -> Logged:
    """old and mu are the model's own log-probs, moved by so much noise: mu away from old, old away from prox."""
    lease = make_lease(config, rewards=[1.0, 0.0, 0.0, 1.0] * 2 + [0.0, 0.0, 0.0, 1.0] * 2)
    exact_RT = Batch(policy, lease, tabulate(lease), config.learner).log_probs()
    rng = np.random.default_rng(0)

    def moved(values: np.ndarray, by: float) -> np.ndarray:
        return np.minimum(values + by * rng.normal(size=len(values)), 0).astype(np.float32)

    for row, head in enumerate(lease.heads):
        old = moved(exact_RT[row, : head.response_len].numpy(), drift)
        lease.anchors[head.rollout_id, 0] = Anchor("resident", old)
        lease.payloads[row] = lease.payloads[row]._replace(mu=moved(old, mismatch))
    return Logged(lease, exact_RT, None, exact_RT, None, None, None)


def variant(config: Config, name: str = "v", **recipe: Any) -> Variant:
    tree = config.model_dump(mode="json")
    return Variant(name, Config.model_validate({**tree, "recipe": {**tree["recipe"], **recipe}}))


def compared(config: Config, policy: PolicyModel | None, logged: Logged, *variants: Variant) -> Compared:
    return compare(logged, config, list(variants), policy)


@pytest.mark.parametrize("recipe", [
    {"objective": "score", "aggregation": "constant", "constant": 6}, {"objective": "ppo"}, {"objective": "unit"}, {"objective": "cispo"},
    {"objective": "gspo", "aggregation": "sequence_mean"}, {"objective": "ppo", "engine": "tis"}, {"objective": "ppo", "filter": "veto"}])
def test_on_policy_every_gradient_is_the_on_policy_one(config: Config, policy: PolicyModel, recipe: dict[str, Any]) -> None:
    found = compared(config, policy, logged_batch(config, policy), variant(config, **recipe))
    (row,) = found.rows
    assert found.note is None and found.exact_ess == pytest.approx(1.0)
    assert row["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert row["norm_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert (row["ess"], row["kept"], row["kept_mass"], row["active"]) == (pytest.approx(1.0), 1.0, pytest.approx(1.0), 1.0)
    assert row["weight_entropy"] == pytest.approx(1.0)


def test_numbers_of_a_mask_are_those_of_a_plain_loop(config: Config, policy: PolicyModel) -> None:
    logged = logged_batch(config, policy, mismatch=0.3)
    found = compared(config, None, logged, variant(config, engine="icepop", engine_low=0.8, engine_high=1.2))
    (row,) = found.rows
    assert found.note == "no gradients: the weights that the update began from are not retained"
    weights, kept, by_length = [], [], {bucket: [] for bucket in found.buckets}
    for head, payload in zip(logged.lease.heads, logged.lease.payloads, strict=True):
        ratios = np.exp(logged.lease.anchors[head.rollout_id, 0].values.astype(float) - payload.mu)
        inside = (ratios >= 0.8) & (ratios <= 1.2)
        weights += list(np.where(inside, ratios, 0.0))
        kept += list(np.where(inside, ratios, np.nan))
        next(part for (low, high), part in by_length.items() if low <= head.response_len <= high).extend(~inside)
    weight = np.array(weights)
    share = weight[weight > 0] / weight.sum()
    assert 0.2 < row["kept"] < 0.8
    assert row["kept"] == pytest.approx(np.isfinite(kept).mean())
    assert row["ess"] == pytest.approx(weight.sum() ** 2 / (len(weight) * (weight**2).sum()), rel=1e-5)
    assert row["weight_entropy"] == pytest.approx(-(share * np.log(share)).sum() / np.log(len(weight)), rel=1e-5)
    assert row["masked_by_length"] == pytest.approx([np.mean(part) for part in by_length.values()])


def test_gradients_are_those_of_autograd_through_the_model(config: Config, policy: PolicyModel) -> None:
    lease = logged_batch(config, policy).lease
    table = tabulate(lease)
    slopes = torch.randn(2, *table.mu_RT.shape, generator=torch.Generator().manual_seed(1))
    found = Batch(policy, lease, table, config.learner).gradients(slopes)
    for index in range(2):
        policy.zero_grad()
        for row in range(len(lease.heads)):
            log_probs = row_log_probs(policy, lease, row)
            (log_probs * slopes[index, row, : len(log_probs)]).sum().backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        assert float((found[index] - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    policy.zero_grad()


def row_log_probs(policy: PolicyModel, lease: LeaseRows, row: int) -> torch.Tensor:
    one = lease.row(row)
    ids = torch.from_numpy(one.ids.astype(np.int64))
    logits = policy.model(ids[None]).logits[0] / one.temperature
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][one.prompt_len - 1 :]


def test_correcting_brings_the_gradient_nearer_to_the_on_policy_one(config: Config, policy: PolicyModel) -> None:
    logged = logged_batch(config, policy, mismatch=0.25)
    score = {"objective": "score", "aggregation": "constant", "constant": 6}
    found = compared(config, policy, logged, variant(config, "none", **score), variant(config, "mass", **score, group_mass_cap=100.0))
    none, mass = found.rows
    assert mass["cosine"] == pytest.approx(1.0, abs=1e-4)  # never capped: exact whole-response ratios
    assert none["cosine"] < 0.99
    assert found.exact_ess is not None and found.exact_ess < 0.95


def test_what_the_record_does_not_hold_is_refused_with_the_reason(config: Config, policy: PolicyModel) -> None:
    tree = config.model_dump(mode="json")

    def other(name: str, **tables: dict[str, Any]) -> Variant:
        return Variant(name, Config.model_validate({**tree, **{table: {**tree[table], **values} for table, values in tables.items()}}))

    zcpo = other("zcpo", recipe={"estimator": "zcpo"}, learner={"reference": "initial"})
    sis = other("sis", recipe={"staleness": "sis"}, sampling={"top_logprobs": 3})
    ewma, broken = variant(config, "ewma", prox="ewma", base="prox"), Variant("broken", "recipe.x = 1: cannot be")
    found = compared(config, None, logged_batch(config, policy), zcpo, sis, ewma, broken, variant(config, "plain"))
    assert [row["name"] for row in found.rows] == ["plain"]
    assert [name for name, _ in found.refused] == ["zcpo", "sis", "ewma", "broken"]
    assert "reference policy's column" in found.refused[0][1]
    assert "draws of SIS" in found.refused[1][1]
    assert "running average" in found.refused[2][1]


def test_remax_is_tried_where_the_run_sampled_greedy_responses(config: Config, policy: PolicyModel) -> None:
    logged, remax = logged_batch(config, policy), variant(config, "remax", estimator="remax")
    assert compared(config, None, logged, remax).refused == [("remax", "needs a greedy response per group, which this run did not sample")]
    give_baselines(logged.lease, config, [1.0, 1.0, 0.0, 0.0])
    (row,) = compared(config, None, logged, remax).rows
    assert (row["ess"], row["kept"], row["active"]) == (pytest.approx(1.0), 1.0, 1.0)


@pytest.mark.parametrize(("lens", "buckets"), [
    ([1, 2, 3, 4], [(1, 1), (2, 2), (3, 3), (4, 4)]), ([5, 5, 5], [(5, 5)]), ([1, 1, 1, 9], [(1, 1), (9, 9)]),
    ([10, 2, 7, 30, 4, 8, 15, 3], [(2, 3), (4, 7), (8, 10), (15, 30)])])
def test_length_buckets(lens: list[int], buckets: list[tuple[int, int]]) -> None:
    assert length_buckets(torch.tensor(lens)) == buckets


def test_the_effective_sample_size_of_long_responses_is_that_of_ratios_beyond_the_clamp(config: Config) -> None:
    lease = make_lease(config)
    table = tabulate(lease)
    total = torch.tensor([-25.0, -30.0] + [-90.0] * 14)  # log prox/mu of whole responses
    prox_RT = table.mu_RT + torch.where(table.mask_RT, (total / table.response_lens_R)[:, None], 0.0)
    weights = [1.0, math.exp(-5)]
    assert exact_ess(table, prox_RT) == pytest.approx(sum(weights) ** 2 / (16 * sum(weight**2 for weight in weights)), rel=1e-4)
