"""What a recipe carries from update to update: the reward's running scale and the running average of the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import checkpoint
from learner.deepspeed_engine import digest_state
from tests.support.leases import anchored_by, column, make_engine, make_lease, score_rows_plainly, tiny_config, update

pytestmark = pytest.mark.deepspeed
EWMA: dict[str, Any] = {"base": "prox", "prox": "ewma", "ewma_window": 2, "ewma_reset": 0.0}  # beta = 2 / 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def snapshot(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_state().items()}


def test_the_reward_scale_moves_with_steps_only(folder: Path) -> None:
    config = tiny_config(folder, recipe={"estimator": "reinforce_pp_ema", "ema_decay": 0.5})
    engine = make_engine(config)
    assert update(engine, config, make_lease(config, rewards=[1.0] * 16)).skipped
    assert engine.memory.reward_moment is None
    update(engine, config, anchored_by(engine, make_lease(config)))
    assert engine.memory.reward_moment == pytest.approx(0.25)
    update(engine, config, anchored_by(engine, make_lease(config, rewards=[0.0, 4.0] * 8)))
    assert engine.memory.reward_moment == pytest.approx(0.5 * 0.25 + 0.5 * 4.0)
    assert engine.memory.summary() == {"reward_moment": engine.memory.reward_moment}


def test_prox_is_scored_under_the_average_of_the_versions(folder: Path) -> None:
    config = tiny_config(folder, recipe=EWMA)
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    states = [snapshot(engine)]
    for _ in range(3):
        outcome = update(engine, config, lease)
        assert outcome.metrics["prox_reset"] is False
        states.append(snapshot(engine))
    mean = {name: (states[2][name] + 0.5 * states[1][name] + 0.25 * states[0][name]) / 1.75 for name in states[0]}
    live = digest_state(engine.full_state())
    with engine.holding(mean):
        expected = np.concatenate(score_rows_plainly(engine, lease))
    assert column(outcome, "prox") == pytest.approx(expected, abs=2e-4)  # of the third update: versions 0 to 2
    assert np.abs(column(outcome, "prox") - column(outcome, "cur")).mean() > 1e-3
    assert column(outcome, "old").tobytes() == b"".join(lease.anchors[head.rollout_id, 0].values.tobytes() for head in lease.heads)
    for name, tensor in engine.memory.anchor.items():
        assert torch.allclose(tensor, (states[3][name] + 0.5 * states[2][name] + 0.25 * states[1][name] + 0.125 * states[0][name]) / 1.875,
                              rtol=1e-4, atol=1e-6)
    assert digest_state(engine.full_state()) == live


def test_the_average_starts_again_where_too_few_tokens_are_active(folder: Path) -> None:
    config = tiny_config(folder, recipe={**EWMA, "ewma_reset": 1.0, "clip_low": 1e-6, "clip_high": 1e-6})
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    resets = [update(engine, config, lease).metrics["prox_reset"] for _ in range(2)]
    assert resets == [False, True] or resets == [True, True]
    assert all(torch.equal(tensor, engine.memory.anchor[name]) for name, tensor in engine.full_state().items())
    assert engine.memory.anchor_mass == 1.0


@pytest.mark.parametrize("recipe", [EWMA, {"estimator": "reinforce_pp_ema"}, {}], ids=["ewma", "scale", "nothing"])
def test_a_checkpoint_carries_it_bit_for_bit(folder: Path, tmp_path: Path, recipe: dict[str, Any]) -> None:
    config = tiny_config(folder, recipe=recipe)
    engine = make_engine(config)
    leases = [anchored_by(engine, make_lease(config, seed=seed, rewards=[0.0, 1.0 + seed] * 8)) for seed in range(4)]
    for lease in leases[:2]:
        update(engine, config, lease)
    saved = checkpoint.save(engine, tmp_path, 2, update=2, weights_digest="w", ledger_head="h", seed=0)
    assert saved is not None
    assert ("memory.json" in saved.saved.files) == bool(recipe)
    straight = [update(engine, config, lease) for lease in leases[2:]]
    fresh = make_engine(config)
    checkpoint.load(fresh, tmp_path, checkpoint.read(tmp_path, tmp_path / saved.path))
    resumed = [update(fresh, config, lease) for lease in leases[2:]]
    assert [outcome.columns for outcome in resumed] == [outcome.columns for outcome in straight]
    assert fresh.memory.summary() == engine.memory.summary()
    assert digest_state(fresh.full_state()) == digest_state(engine.full_state())
