"""What TRL makes of a batch before the loss, and what we make of it: advantages, reward shaping, weights for the engine's mismatch.

TRL's `_generate_and_score_completions` runs as it is, on a stand-in for the trainer that answers with given rewards and log-probs.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.factor import Factor
from correction.filters import sequence_filter
from correction.masked import response_sum
from correction.mismatch import icepop, tis
from correction.reference import reference_kl
from learner.advantage import group_advantages, overlong_penalty
from learner.objective import aggregate, denominator_of, token_losses

pytest.importorskip("trl", reason="trl is not installed")
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.correction.test_peer_trl import CLIP, LENGTHS, MASK, ROWS, TOKENS, assert_same, columns, our_loss, trl_loss

pytestmark = pytest.mark.peer
N = 3
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.25, 2.0, 2.0, -1.0], dtype=torch.float64)


def scored(trainer_class: Any, rewards: Tensor, n: int, **settings: Any) -> dict[str, Tensor]:
    """TRL's batch: what its loss reads. mu in float32, because TRL gets it as numbers."""
    mu, old, ref, _, _ = columns()
    model, completions = SimpleNamespace(training=True, is_gradient_checkpointing=False), [[1] * int(length) for length in LENGTHS]
    sampling = [mu[row, : len(ids)].tolist() for row, ids in enumerate(completions)]
    made: tuple[Any, ...] = ([[1]] * ROWS, completions, [""] * ROWS)
    if trainer_class is GRPOTrainer:
        made = ([[1]] * ROWS, completions, None, [""] * ROWS, sampling, None, None, None)
    trainer = SimpleNamespace(**{
        "model": model, "ref_model": "ref", "environment_factories": None, "environments": None, "tools": None, "pad_to_multiple_of": None,
        "_generate": lambda prompts: made, "_tokenizer": SimpleNamespace(pad_token_id=0), "mask_truncated_completions": False,
        "_get_per_token_logps_and_entropies": lambda model, *args, **kwargs: (ref if model == "ref" else old, None, None),
        "_calculate_rewards": lambda *args: rewards[:, None], "reward_weights": torch.ones(1), "reward_func_names": ["reward"],
        "num_generations": n, "num_iterations": 1, "beta": 0.0, "reward_clip_range": None, "normalize_advantages": False,
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "log_multimodal": False,
        "use_vllm": False, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": None,
        "args": SimpleNamespace(per_device_train_batch_size=ROWS, steps_per_generation=1, gradient_accumulation_steps=1,
                                gradient_checkpointing_kwargs=None),
        "accelerator": SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1, gather=lambda value: value,
                                       reduce=lambda value, reduction: value),
        "_metrics": defaultdict(lambda: defaultdict(list)), "_pending_extra_logs": {}, "_pending_metrics": {},
        "_logs": defaultdict(list, {"rewards": defaultdict(list), "extra": defaultdict(list)}), **settings})
    found: dict[str, Tensor] = trainer_class._generate_and_score_completions(trainer, [{"prompt": ""}] * ROWS)
    return found


# ---------------------------------------------------------------- advantages and shaping
def test_dr_grpo_is_their_unscaled_advantage() -> None:
    theirs = scored(GRPOTrainer, REWARDS, N, scale_rewards="none")["advantages"]
    assert torch.allclose(group_advantages(REWARDS, GROUP, estimator="dr_grpo"), theirs, rtol=0, atol=1e-14)


def test_their_group_deviation_is_the_samples_ours_the_populations() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    theirs = scored(GRPOTrainer, rewards, 6, scale_rewards="group")["advantages"]
    ours = group_advantages(rewards, group, estimator="grpo")
    assert (float(theirs[0]), float(ours[0])) == pytest.approx((2.0407, 2.2361), abs=1e-4)
    ratio = ours / theirs
    assert torch.allclose(ratio, torch.full_like(ratio, (6 / 5) ** 0.5), atol=3e-4)
    theirs, ours = scored(GRPOTrainer, REWARDS, N)["advantages"], group_advantages(REWARDS, GROUP, estimator="grpo")
    assert torch.allclose(ours / theirs, torch.full_like(ours, (3 / 2) ** 0.5), atol=3e-4)


def test_their_batch_deviation_holds_what_lies_between_the_groups_and_reinforce_pp_does_not() -> None:
    theirs = scored(GRPOTrainer, REWARDS, N, scale_rewards="batch")["advantages"]
    ours = group_advantages(REWARDS, GROUP, estimator="reinforce_pp")
    ratio = ours / theirs
    assert torch.allclose(ratio, torch.full_like(ratio, float(ratio[0])), rtol=1e-12)  # one number for the batch, as in ours
    assert float(ratio[0]) == pytest.approx(1.13747, abs=1e-5)
    apart = REWARDS + 10.0 * GROUP
    further = scored(GRPOTrainer, apart, N, scale_rewards="batch")["advantages"]
    assert float((further / theirs)[0]) < 0.3
    assert torch.allclose(group_advantages(apart, GROUP, estimator="reinforce_pp"), ours, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_with_k1_in_the_reward(beta: float) -> None:
    _, old, ref, _, _ = columns()
    rewards = REWARDS - beta * response_sum(reference_kl(old, ref, MASK, estimator="k1"), MASK)
    theirs = scored(RLOOTrainer, REWARDS, N, beta=beta)["advantages"]
    assert float(theirs.abs().max()) > 0.5
    assert torch.allclose(group_advantages(rewards, GROUP, estimator="rloo"), theirs, rtol=0, atol=1e-12)


def rloo_slope(cur: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """TRL's RLOO loss differentiated."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (cur, torch.zeros(ROWS, TOKENS), None), epsilon_low=0.2,
        epsilon_high=0.2, aux_loss_enabled=False, model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(reduce=lambda value, reduction: value, gather=lambda value: value))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": MASK.double(),
              "advantages": advantage, "old_logps": (old * MASK).sum(1)}
    (slope,) = torch.autograd.grad(RLOOTrainer._compute_loss(trainer, None, inputs), cur)
    return slope


def test_their_rloo_clips_the_whole_responses_ratio_and_ours_has_none() -> None:
    """On-policy both are the score function; TRL goes flat where the product of a response leaves 1 -+ .2."""
    _, old, _, cur, advantage = columns()

    def ours(cur: Tensor) -> Tensor:
        loss = aggregate(token_losses(cur, None, advantage, MASK, objective="score"), MASK, mode="length_weighted")
        return torch.autograd.grad(loss, cur)[0]

    same = old.clone().requires_grad_()
    assert float(ours(same).abs().max()) > 0.1
    assert float((ours(same) - rloo_slope(same, old, advantage)).abs().max()) < 1e-12
    product = torch.where(MASK, cur - old, 0.0).sum(1).exp()
    flat = (advantage > 0) & (product > 1.2) | (advantage < 0) & (product < 0.8)
    assert bool(flat.any()) and not bool(flat.all())
    theirs = rloo_slope(cur, old, advantage)
    assert not bool(theirs[flat].any())
    assert bool((ours(cur)[flat][MASK[flat]] != 0).all())


def test_soft_overlong_punishment() -> None:
    lengths = [1, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)([[0] * length for length in lengths])
    ours = overlong_penalty(torch.tensor(lengths, dtype=torch.float64), limit=100, cache=20)
    assert ours.tolist() == pytest.approx(theirs, abs=1e-14)
    assert theirs[:3] == [0.0, 0.0, 0.0] and theirs[4] == -0.5 and theirs[-2:] == [-1.0, -1.0]


# ---------------------------------------------------------------- the engine's mismatch
def dropped_sequences(x: Tensor) -> Factor:
    """Masked sequence importance sampling: the product as the weight, and nothing outside the bounds."""
    keep = sequence_filter(x, MASK, low=0.6, high=1.7).keep_RT
    return Factor(torch.where(keep, tis(x, MASK, cap=1.7, level="sequence").weight_RT, 0.0), keep)


MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "token_truncate": ({"clip_max": 1.2}, lambda x: tis(x, MASK, cap=1.2)),
    "token_mask": ({"clip_min": 0.7, "clip_max": 1.3}, lambda x: icepop(x, MASK, low=0.7, high=1.3)),
    "sequence_truncate": ({"clip_max": 1.4}, lambda x: tis(x, MASK, cap=1.4, level="sequence")),
    "sequence_mask": ({"clip_min": 0.6, "clip_max": 1.7}, dropped_sequences),
}


@pytest.mark.parametrize("mode", MODES)
def test_their_own_weight_for_the_engine_is_ours_and_so_is_the_loss(mode: str) -> None:
    bounds, ours = MODES[mode]
    mu, old, _, _, _ = columns()
    settings = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    found = scored(GRPOTrainer, REWARDS, N, use_vllm=True, vllm_importance_sampling_mode=mode, **settings)
    theirs = found["importance_sampling_ratio"]
    factor = ours(old - mu.float().double())
    weight = factor.weight_RT[MASK]
    assert 0 < int((weight == weight.max()).sum()) < len(weight)
    assert float((theirs.expand(ROWS, TOKENS)[MASK] - weight).abs().max()) < 1e-12
    if "mask" in mode:
        assert 0 < int(factor.keep_RT.sum()) < int(MASK.sum())
    mine = our_loss("ppo", "token_mean", **CLIP, weight=factor.weight_RT, keep=factor.keep_RT)
    assert_same(mine, trl_loss("dapo", engine_weight=theirs))


def test_the_whole_way_from_rewards_to_the_gradient() -> None:
    """Rewards, the engine's log-probs and both policies in: TRL's batch and loss, and ours."""
    mu, old, _, cur, _ = columns()
    batch = scored(GRPOTrainer, REWARDS, N, use_vllm=True, scale_rewards="none", vllm_importance_sampling_mode="token_truncate",
                   vllm_importance_sampling_clip_max=1.2)
    advantage = group_advantages(REWARDS, GROUP, estimator="dr_grpo")
    weight = tis(old - mu.float().double(), MASK, cap=1.2).weight_RT
    loss = aggregate(token_losses(cur, old, advantage, MASK, objective="ppo", **CLIP) * weight, MASK, mode="token_mean")
    (slope,) = torch.autograd.grad(loss, cur)
    theirs = trl_loss("dapo", engine_weight=batch["importance_sampling_ratio"], advantage=batch["advantages"])
    assert_same((loss.detach(), slope), theirs)


# ---------------------------------------------------------------- what is masked, and split
def test_truncated_completions_are_masked_and_their_rewards_count() -> None:
    """TRL sees a response without an end token, we a finish reason of "length". Its baseline holds their rewards, as ours does."""
    cut = torch.tensor([False, True, False, False, True, False])
    ends = [9 if truncated else 2 for truncated in cut.tolist()]
    completions = [[1] * (int(length) - 1) + [end] for length, end in zip(LENGTHS, ends, strict=True)]
    made = ([[1]] * ROWS, completions, None, [""] * ROWS, None, None, None, None)
    found = scored(GRPOTrainer, REWARDS, N, scale_rewards="none", mask_truncated_completions=True, eos_token_ids=[2],
                   _generate=lambda prompts: made)
    ours = MASK & ~cut[:, None]
    assert found["completion_mask"].bool().tolist() == ours.tolist()
    assert torch.allclose(found["advantages"], group_advantages(REWARDS, GROUP, estimator="dr_grpo"), atol=1e-14)
    assert int(found["num_items_in_batch"]) == int(ours.sum())


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3)])
def test_micro_batches_share_their_denominator_as_ours_do(sizes: tuple[int, ...]) -> None:
    """`num_items_in_batch` is TRL's count over the whole step, `denominator_of` ours: any split has the gradient of the whole."""
    _, old, _, cur, advantage = columns()
    whole = trl_loss("dapo")
    total, value, at = sum(denominator_of(MASK[rows], mode="token_mean") for rows in torch.arange(ROWS).split(list(sizes))), 0.0, 0
    for size in sizes:
        part = slice(at, at + size)
        loss = aggregate(token_losses(cur[part], old[part], advantage[part], MASK[part], objective="ppo", **CLIP), MASK[part],
                         mode="token_mean", denominator=total)
        loss.backward()
        value, at = value + float(loss.detach()), at + size
    assert value == pytest.approx(float(whole[0]), abs=1e-12)
    assert cur.grad is not None and float((cur.grad - whole[1]).abs().max()) < 1e-12
