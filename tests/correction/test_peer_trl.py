"""TRL's GRPO loss and ours on the same log-probs: value and gradient. Where TRL differs, the difference is what is tested.

TRL's `_compute_loss` runs as it is, on a stand-in for the trainer that answers with given log-probs.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.load import validate
from correction.mismatch import tis
from correction.ratios import total_log_ratio
from correction.reference import reference_kl
from correction.staleness import opsm
from learner.chunked_head import selected_log_probs
from learner.distribution import ENTROPY, KL, LOG_PROB, WholeVocabulary
from learner.loss import divisors, regularisers
from learner.objective import aggregate, token_losses

pytest.importorskip("trl", reason="trl is not installed")
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

pytestmark = pytest.mark.peer

ROWS, TOKENS = 6, 9
LENGTHS = torch.tensor([9, 1, 4, 7, 9, 2])
MASK = torch.arange(TOKENS) < LENGTHS[:, None]
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def columns() -> tuple[Tensor, ...]:
    """mu, old, ref, cur, advantage; the last column differentiable, ratios far on both sides of every clip."""
    generator = torch.Generator().manual_seed(3)
    mu = -4 * torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    old, ref, cur = (mu + 0.4 * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64) for _ in range(3))
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.0, 2.0], dtype=torch.float64)
    return mu, old, ref, cur.requires_grad_(), advantage


def entropies(cur: Tensor) -> Tensor:
    """Any function of cur, so that an entropy's gradient can be compared."""
    return -cur.exp() * cur


def trl_loss(loss_type: str, *, level: str = "token", high: float = 0.28, delta: float | None = None, beta: float = 0.0,
             engine_weight: Tensor | None = None, opsm_threshold: float | None = None, weigh_kl: bool = False,
             entropy: float = 0.0, advantage: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Value, and gradient with respect to cur."""
    mu, old, ref, cur, given = columns()
    advantage = given if advantage is None else advantage
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (cur, entropies(cur), None), entropy_coef=entropy,
        use_adaptive_entropy=False,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, aux_loss_enabled=False, top_entropy_quantile=1.0, loss_type=loss_type,
        importance_sampling_level=level, epsilon_low=0.2, epsilon_high=high, beta=beta, off_policy_mask_threshold=opsm_threshold,
        use_vllm=engine_weight is not None, vllm_importance_sampling_correction=True, max_completion_length=TOKENS + 3,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=entropy != 0, model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=weigh_kl, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, reduce=lambda value, reduction: value,
                                    gather=lambda value: value))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    inputs: dict[str, Any] = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": MASK.double(),
        "advantages": advantage, "old_per_token_logps": old, "ref_per_token_logps": ref, "sampling_per_token_logps": mu,
        "importance_sampling_ratio": engine_weight, "num_items_in_batch": MASK.sum()}
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert cur.grad is not None
    return loss.detach(), cur.grad


def our_loss(objective: str, mode: str, *, weight: Tensor | float = 1.0, keep: Tensor = MASK, kl: float = 0.0,
             **hyper: Any) -> tuple[Tensor, Tensor]:
    _, old, ref, cur, advantage = columns()
    losses = token_losses(cur, old, advantage, MASK, objective=objective, **hyper) * weight
    constant = TOKENS + 3 if mode == "constant" else None
    loss = aggregate(losses, keep, mode=mode, constant=constant, count_mask_RT=MASK)
    if kl:
        loss = loss + kl * aggregate(reference_kl(cur, ref, MASK, estimator="k3"), MASK, mode=mode, constant=constant)
    loss.backward()
    assert cur.grad is not None
    return loss.detach(), cur.grad


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert float(theirs[0].abs()) > 1e-3
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize(("loss_type", "mode"), [
    ("grpo", "sequence_mean"), ("bnpo", "token_mean"), ("dapo", "token_mean"), ("dr_grpo", "constant")])
def test_ppo_clip_under_every_aggregation(loss_type: str, mode: str) -> None:
    assert_same(our_loss("ppo", mode, **CLIP), trl_loss(loss_type))


def test_their_delta_is_our_dual_clip() -> None:
    assert_same(our_loss("ppo", "token_mean", **CLIP, dual=1.5), trl_loss("dapo", delta=1.5))


def test_their_cispo_epsilon_high_is_our_absolute_cap() -> None:
    assert_same(our_loss("cispo", "token_mean", cap=1.3), trl_loss("cispo", high=1.3))


def test_gspo_and_luspo() -> None:
    assert_same(our_loss("gspo", "sequence_mean", **CLIP), trl_loss("grpo", level="sequence"))
    assert_same(our_loss("luspo", "sequence_mean", **CLIP), trl_loss("luspo", level="sequence"))


def test_their_luspo_on_tokens_is_ppo_summed_over_each_response() -> None:
    """`length_weighted`: no division by a length."""
    assert_same(our_loss("ppo", "length_weighted", **CLIP), trl_loss("luspo"))


def test_k3_to_the_reference() -> None:
    assert_same(our_loss("ppo", "sequence_mean", **CLIP, kl=0.04), trl_loss("grpo", beta=0.04))


def our_regularisers(mode: str, **recipe: Any) -> tuple[Tensor, Tensor]:
    """KL and entropy of the learner's own loss; mu is old, so that cur/mu is TRL's ratio."""
    _, old, ref, cur, _ = columns()
    config = validate({"model": {"path": "m"}, "task": {"train": "t"}, "learner": {"reference": "initial"},
                       "recipe": {"aggregation": mode, **recipe}})
    table = SimpleNamespace(mask_RT=MASK, mu_RT=old)
    ready: Any = SimpleNamespace(table=table, ref_RT=ref, correction=SimpleNamespace(keep_RT=MASK))
    rows, whole = list(range(ROWS)), torch.stack([cur, entropies(cur), cur])
    loss = regularisers(config, ready, rows, cur, whole, divisors(config.recipe, ready, rows))
    (slope,) = torch.autograd.grad(loss, cur)
    return loss.detach(), slope


def both(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return one[0] + other[0], one[1] + other[1]


def test_their_kl_times_the_ratio_has_our_value_and_the_ratios_own_gradient_beside_ours() -> None:
    """`use_bias_correction_kl` lets the ratio carry a gradient; kl_weight = "total" holds it fixed."""
    _, old, ref, cur, _ = columns()
    value, slope = trl_loss("dapo", beta=0.3, weigh_kl=True)
    ours = both(our_loss("ppo", "token_mean", **CLIP), our_regularisers("token_mean", kl=0.3, kl_weight="total"))
    assert float((value - ours[0]).abs()) < 1e-12
    frozen = reference_kl(cur, ref, MASK, estimator="k3").detach()
    (live,) = torch.autograd.grad(0.3 * aggregate(frozen * (cur - old).exp(), MASK, mode="token_mean"), cur)
    assert float(live.abs().max()) > 1e-3
    assert float((slope - ours[1] - live).abs().max()) < 1e-12


def test_their_entropy_bonus_is_ours_per_token() -> None:
    assert_same(both(our_loss("ppo", "token_mean", **CLIP), our_regularisers("token_mean", entropy=0.2)), trl_loss("dapo", entropy=0.2))
    ours = both(our_loss("ppo", "sequence_mean", **CLIP), our_regularisers("sequence_mean", entropy=0.2))
    assert float((ours[0] - trl_loss("grpo", entropy=0.2)[0]).abs()) > 1e-3  # ours follows the aggregation, theirs is a token mean always


def test_their_delta_caps_a_positive_advantage_too_where_it_is_below_the_clip() -> None:
    """The same as the dual clip only while delta > 1 + epsilon_high."""
    assert_same(our_loss("ppo", "token_mean", **CLIP, dual=1.29), trl_loss("dapo", delta=1.29))
    ours, theirs = our_loss("ppo", "token_mean", **CLIP, dual=1.1), trl_loss("dapo", delta=1.1)
    _, old, _, cur, advantage = columns()
    capped = MASK & (advantage > 0)[:, None] & ((cur - old).detach().exp() > 1.1)
    assert not bool(theirs[1][capped].any())
    assert bool(ours[1][capped].any())  # up to the clip at 1.28
    assert float((ours[1] - theirs[1])[~capped].abs().max()) < 1e-12


def test_an_engine_weight_multiplies_the_loss() -> None:
    mu, old, _, _, _ = columns()
    factor = tis(old - mu, MASK, cap=1.2)
    ours = our_loss("ppo", "token_mean", **CLIP, weight=factor.weight_RT, keep=factor.keep_RT)
    assert_same(ours, trl_loss("dapo", engine_weight=factor.weight_RT))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 10.0])
def test_off_policy_sequence_masking(threshold: float) -> None:
    mu, _, _, cur, advantage = columns()
    factor = opsm(total_log_ratio(cur, mu), advantage, MASK, threshold=threshold)
    theirs = GRPOTrainer.get_off_policy_mask(advantage[:, None], cur, mu, MASK.double(), threshold)
    assert factor.keep_RT.tolist() == ((theirs > 0) & MASK).tolist()
    assert_same(our_loss("ppo", "sequence_mean", **CLIP, keep=factor.keep_RT), trl_loss("grpo", opsm_threshold=threshold))


# ---------------------------------------------------------------- the head's terms
def logits_and_reference() -> tuple[nn.Linear, nn.Linear, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    head, other = (nn.Linear(6, 11, bias=False, dtype=torch.float64) for _ in range(2))
    for one in (head, other):
        one.weight.data = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    hidden, ref = (torch.randn(7, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return head, other, hidden.requires_grad_(), ref, torch.randint(11, (7,), generator=generator)


def test_selected_log_probs_and_entropy() -> None:
    """Ours in float32 by design (`learner/distribution.py`); the chunked head in float64."""
    head, _, hidden, _, target = logits_and_reference()
    temperature = torch.full((7,), 0.7, dtype=torch.float64)
    theirs, entropy = selective_log_softmax_and_entropy(head(hidden)[None], target[None], temperature=0.7)
    theirs, entropy = theirs[0], entropy[0]
    assert torch.allclose(selective_log_softmax(head(hidden), target, temperature=0.7), theirs, rtol=0, atol=1e-12)
    ours, chunked = WholeVocabulary()(head, hidden, target, temperature), selected_log_probs(hidden, head.weight, target, temperature)
    slope = torch.linspace(-1, 1, 7, dtype=torch.float64)
    wanted = torch.autograd.grad(theirs @ slope, hidden, retain_graph=True)[0]
    assert torch.allclose(chunked, theirs, rtol=0, atol=1e-12)
    assert torch.allclose(torch.autograd.grad(chunked @ slope, hidden)[0], wanted, rtol=0, atol=1e-12)
    for channel, value in ((LOG_PROB, theirs), (ENTROPY, entropy)):
        assert torch.allclose(ours[channel].double(), value, rtol=0, atol=1e-5)
        mine, their = (torch.autograd.grad(one @ slope.to(one.dtype), hidden, retain_graph=True)[0] for one in (ours[channel], value))
        assert torch.allclose(mine, their, rtol=0, atol=1e-5)
        assert float(their.abs().max()) > 0.01


def test_their_reverse_kl_of_distillation_is_our_kl_over_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """`beta = 1` is KL(student || teacher): student the policy, teacher the reference."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    head, other, hidden, ref, target = logits_and_reference()
    temperature = torch.ones(7, dtype=torch.float64)
    ours = WholeVocabulary(other, ref)(head, hidden, target, temperature)[KL]
    theirs = GKDTrainer.generalized_jsd_loss(head(hidden)[None], other(ref)[None].detach(), beta=1, reduction="sum")
    swapped = GKDTrainer.generalized_jsd_loss(head(hidden)[None], other(ref)[None].detach(), beta=0, reduction="sum")
    assert float(ours.sum().detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert float(swapped.detach()) != pytest.approx(float(theirs.detach()), rel=0.05)
    mine, their = (torch.autograd.grad(one.sum(), hidden)[0] for one in (ours, theirs))
    assert torch.allclose(mine, their, rtol=0, atol=1e-5)
