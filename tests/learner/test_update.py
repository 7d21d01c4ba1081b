"""One update through a real DeepSpeed engine: steps, skips, columns, and what the logged loss is made of."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Config
from learner.batch import Anchor, LeaseRows
from learner.deepspeed_engine import TrainEngine
from learner.update import Outcome
from tests.support.leases import anchored_by, column, make_engine, make_lease, score_rows_plainly, state_hash, tiny_config, update
from wire.errors import RunError
from wire.record import ANCHOR_SOURCES

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return tiny_config(folder)


@pytest.fixture
def engine(config: Config) -> TrainEngine:
    return make_engine(config)


def test_a_step_learns_and_its_learning_rate_decays_linearly(folder: Path) -> None:
    config = tiny_config(folder, learner={"updates": 5, "lr": 1e-3, "lr_final_ratio": 0.2})
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    rates, rewards = [], np.array([head.verdict.reward for head in lease.heads])  # type: ignore[union-attr]
    before = np.array([values.sum() for values in score_rows_plainly(engine, lease)])
    for _ in range(5):
        outcome = update(engine, config, lease)
        assert [step["stepped"] for step in outcome.steps] == [True]
        rates.append(outcome.metrics["lr"])
    after = np.array([values.sum() for values in score_rows_plainly(engine, lease)])
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])
    assert (after - before)[rewards == 1].mean() > 0 > (after - before)[rewards == 0].mean()
    assert engine.steps == 5


def test_the_learning_rate_rises_over_the_warm_up_and_then_decays(folder: Path) -> None:
    engine = make_engine(tiny_config(folder, learner={"updates": 5, "lr": 1e-3, "lr_final_ratio": 0.2, "lr_warmup_updates": 2}))
    assert [engine.lr_share(step) for step in range(6)] == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_lease_without_signal_changes_nothing(engine: TrainEngine, config: Config) -> None:
    update(engine, config, anchored_by(engine, make_lease(config, seed=1)))  # so that there is optimizer state to change
    before = state_hash(engine)
    outcome = update(engine, config, make_lease(config, rewards=[1.0] * 8 + [0.0] * 8))
    assert (outcome.skipped, outcome.columns, outcome.steps) == (True, [], [])
    assert state_hash(engine) == before


def test_a_lease_whose_only_signal_is_masked_is_skipped(folder: Path) -> None:
    config = tiny_config(folder, recipe={"engine": "icepop", "engine_low": 0.5, "engine_high": 2.0})
    engine = make_engine(config)
    rewards = [1.0, 0.0, 0.0, 0.0] + [0.0] * 12
    lease = make_lease(config, rewards=rewards)
    for sample in range(4):
        old = lease.anchors[f"o0.0.{sample}", 0].values
        lease.anchors[f"o0.0.{sample}", 0] = Anchor("resident", (lease.payloads[sample].mu - 3 * np.ones_like(old)).astype(np.float32))
    before = state_hash(engine)
    assert update(engine, config, lease).skipped
    assert state_hash(engine) == before


def test_a_minibatch_without_signal_is_passed_over_and_its_cur_recorded(folder: Path) -> None:
    config = tiny_config(folder, learner={"steps_per_update": 2})
    engine = make_engine(config)
    outcome = update(engine, config, anchored_by(engine, make_lease(config, rewards=[0.0, 1.0] * 4 + [1.0] * 8)))
    assert [step["stepped"] for step in outcome.steps] == [True, False]
    assert not outcome.skipped
    assert engine.steps == engine.scheduler.last_epoch == 1
    assert (column(outcome, "cur") < 0).all()


def test_with_one_step_prox_is_old_where_fresh_and_the_training_forward_where_stale(engine: TrainEngine, config: Config) -> None:
    lease = make_lease(config, version_in=2, versions=[2, 1])
    outcome = update(engine, config, lease)
    old, prox, cur = (column(outcome, name) for name in ("old", "prox", "cur"))
    fresh = np.repeat([head.spans[0].version == 2 for head in lease.heads], [head.response_len for head in lease.heads])
    assert (prox[fresh] == old[fresh]).all()
    assert (prox[~fresh] == cur[~fresh]).all()
    assert (prox[~fresh] != old[~fresh]).all()


def test_with_two_steps_prox_is_scored_and_differs_from_cur(folder: Path) -> None:
    config = tiny_config(folder, learner={"steps_per_update": 2})
    engine = make_engine(config)
    lease = make_lease(config, version_in=2, versions=[2, 1])
    scored = np.concatenate(score_rows_plainly(engine, lease))
    outcome = update(engine, config, lease)
    old, prox, cur = (column(outcome, name) for name in ("old", "prox", "cur"))
    lens = [head.response_len for head in lease.heads]
    fresh = np.repeat([head.spans[0].version == 2 for head in lease.heads], lens)
    assert (prox[fresh] == old[fresh]).all()
    assert prox[~fresh] == pytest.approx(scored[~fresh], abs=2e-6)
    second = np.repeat([group >= 2 for group in lease.group_of], lens) & ~fresh
    assert np.abs(cur - prox)[~second & ~fresh].max() < 2e-6  # before any step
    assert np.abs(cur - prox)[second].mean() > 1e-3  # after the first
    assert outcome.metrics["update_ratio"]["mean_abs"] > 0


def test_missing_tokens_are_recorded_as_such_and_not_trained_on(engine: TrainEngine, config: Config) -> None:
    lease = make_lease(config)
    lease.anchors["o1.0.2", 0] = Anchor("missing", np.zeros(0, np.float32))
    outcome = update(engine, config, lease)
    source, keep, old, weight = (column(outcome, name) for name in ("old_source", "keep", "old", "weight"))
    missing = source == ANCHOR_SOURCES.index("missing")
    assert missing.sum() == lease.heads[6].response_len == outcome.metrics["tokens_missing"]
    assert np.isnan(old[missing]).all()
    assert not keep[missing].any()
    assert not weight[missing].any()
    assert keep[~missing].all()


@pytest.mark.parametrize("recipe", [
    {"objective": "ppo", "engine": "tis", "engine_cap": 1.02, "clip_low": 0.02, "clip_high": 0.03},
    {"objective": "ppo", "engine": "icepop", "engine_low": 0.97, "engine_high": 1.04, "clip_low": 0.02, "clip_high": 0.03,
     "aggregation": "sequence_mean", "denominator": "kept"},
])
def test_the_logged_loss_is_what_a_plain_loop_makes_of_the_columns(folder: Path, recipe: dict[str, Any]) -> None:
    config = tiny_config(folder, recipe=recipe)
    engine = make_engine(config)
    lease = make_lease(config)
    for head, values in zip(lease.heads, score_rows_plainly(engine, lease), strict=True):
        rng = np.random.default_rng(head.sample)
        lease.anchors[head.rollout_id, 0] = Anchor("resident", np.minimum(values + rng.normal(0, 0.03, len(values)), 0).astype(np.float32))
    for index, payload in enumerate(lease.payloads):
        rng = np.random.default_rng(index)
        old = lease.anchors[lease.heads[index].rollout_id, 0].values
        lease.payloads[index] = payload._replace(mu=np.minimum(old + rng.normal(0, 0.03, len(old)), 0).astype(np.float32))
    outcome = update(engine, config, lease)
    assert outcome.steps[0]["loss"] == pytest.approx(plain_loss(lease, outcome, config), rel=2e-6)
    share = outcome.metrics["capped"] if config.recipe.engine == "tis" else outcome.metrics["masked"]
    assert 0 < share < 1
    assert 0 < outcome.metrics["clipped"] < 1


def plain_loss(lease: LeaseRows, outcome: Outcome, config: Config) -> float:
    """Loop by loop in Python floats, from columns and rollouts alone."""
    recipe, at, per_response, tokens, total = config.recipe, 0, [], 0, 0.0
    old, cur = column(outcome, "old"), column(outcome, "cur")
    for index, head in enumerate(lease.heads):
        group = [h.verdict.reward for h in lease.heads if h.order_id == head.order_id]  # type: ignore[union-attr]
        advantage = head.verdict.reward - sum(group) / len(group)  # type: ignore[union-attr]
        losses, counted = [], 0
        for token in range(head.response_len):
            mismatch = math.exp(float(old[at]) - float(lease.payloads[index].mu[token]))
            kept = recipe.engine == "tis" or recipe.engine_low <= mismatch <= recipe.engine_high
            weight = min(mismatch, recipe.engine_cap) if recipe.engine == "tis" else mismatch
            ratio = math.exp(float(cur[at]) - float(old[at]))
            clipped = min(max(ratio, 1 - recipe.clip_low), 1 + recipe.clip_high)
            if kept:
                losses.append(-weight * min(ratio * advantage, clipped * advantage))
            counted += kept if recipe.denominator == "kept" else 1
            at += 1
        total, tokens = total + sum(losses), tokens + counted
        if counted:
            per_response.append(sum(losses) / counted)
    return total / tokens if recipe.aggregation == "token_mean" else sum(per_response) / len(per_response)


def test_shuffled_rewards_are_a_seeded_permutation(folder: Path) -> None:
    config = tiny_config(folder, task={"shuffle_rewards": True}, recipe={"aggregation": "constant", "constant": 6})
    rewards = [1.0] * 8 + [0.0] * 8  # no contrast within any group, until they are shuffled
    first = update(make_engine(config), config, make_lease(config, rewards=rewards))
    again = update(make_engine(config), config, make_lease(config, rewards=rewards))
    assert not first.skipped
    assert first.columns == again.columns
    assert first.metrics["reward"] == 0.5


def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(engine: TrainEngine, config: Config) -> None:
    lease = anchored_by(engine, make_lease(config))
    with torch.no_grad():
        next(engine.policy.parameters())[3:] = torch.nan
    with pytest.raises(RunError, match="stopped before anything was published"):
        update(engine, config, lease)
    assert engine.steps == 0


def test_an_infinite_gradient_ends_the_run(engine: TrainEngine, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, backward = anchored_by(engine, make_lease(config)), engine.backward
    monkeypatch.setattr(engine, "backward", lambda loss, last: backward(loss * float("inf"), last=last))
    with pytest.raises(RunError, match="gradient norm is (nan|inf)"):
        update(engine, config, lease)
