"""The loss of one micro-batch: objective with its weights, KL to the reference, entropy. Every divisor is the optimizer step's."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Config, Recipe
from correction.masked import masked_mean, sanitise
from correction.ratios import ratio
from correction.reference import reference_kl
from correction.surrogates import Surrogate
from learner.distribution import ENTROPY, KL
from learner.objective import WITHOUT_BASE, aggregate, denominator_of, surrogate, token_losses
from learner.prepare import Prepared

RIPO_DELTA = 0.05


class Divisors(NamedTuple):
    """What the step's loss, its KL and its entropy are divided by, over all ranks and micro-batches."""

    loss: float
    kl: float
    entropy: float


def hyper_parameters(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments of the recipe's objective, as far as they are the same for every update."""
    clip = {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
    match recipe.objective:
        case "score" | "unit":
            return {}
        case "ppo" | "gppo":
            return clip | {"dual": recipe.dual_clip}
        case "cispo":
            return {"cap": recipe.cap}
        case "minirl":
            return clip | {"cap": recipe.cap}
        case "ripo":
            return {"delta": RIPO_DELTA if recipe.delta is None else recipe.delta, "cap": recipe.ratio_bound}
        case "fdiv":
            return {"divergence": recipe.divergence, "topology": recipe.topology, "delta": recipe.delta, "cap": recipe.ratio_bound}
        case "tapo":
            return clip | {"decay": recipe.position_decay, "floor": recipe.position_floor}
    return clip


def count_mask(recipe: Recipe, ready: Prepared) -> Tensor:
    return ready.table.mask_RT if recipe.denominator == "original" else ready.correction.keep_RT


def kl_mask(recipe: Recipe, ready: Prepared) -> Tensor:
    return ready.table.mask_RT if recipe.kl_mask == "original" else ready.correction.keep_RT


def divisors(recipe: Recipe, ready: Prepared, rows: list[int]) -> Divisors:
    masks = count_mask(recipe, ready), kl_mask(recipe, ready), ready.table.mask_RT
    return Divisors(*(denominator_of(mask[rows], mode=recipe.aggregation, constant=recipe.constant) for mask in masks))


def objective_losses(recipe: Recipe, ready: Prepared, rows: list[int], cur: Tensor) -> Tensor:
    """[rows, T], before correction weights."""
    return token_losses(cur, **objective_inputs(recipe, ready, rows, cur.device))


def objective_inputs(recipe: Recipe, ready: Prepared, rows: list[int], device: torch.device) -> dict[str, Any]:
    """What `token_losses` and `surrogate` take beside cur."""
    table = ready.table
    base_RT = None
    if recipe.objective not in WITHOUT_BASE:
        base = table.old_RT if recipe.base == "old" else ready.prox_RT
        assert base is not None  # prepare() scores prox when it is the base
        base_RT = base[rows].to(device)
    hyper = hyper_parameters(recipe)
    if ready.correction.clip is not None:
        hyper["clip_low"], hyper["clip_high"] = ready.correction.clip
    if recipe.objective == "minirl":
        hyper["mu_RT"] = table.mu_RT[rows].to(device)
    accepted_RT = None if ready.accepted_RT is None else ready.accepted_RT[rows].to(device)
    return {"base_RT": base_RT, "advantage_R": ready.advantage_R[rows].to(device), "mask_RT": table.mask_RT[rows].to(device),
            "objective": recipe.objective, "accepted_RT": accepted_RT, **hyper}


def micro_loss(config: Config, ready: Prepared, rows: list[int], cur: Tensor, count_RT: Tensor, denominator: float) -> Tensor:
    """This micro-batch's part of the step's objective."""
    if not rows:
        return cur.sum()
    recipe, device = config.recipe, cur.device
    loss_RT = objective_losses(recipe, ready, rows, cur)
    weight_RT, keep_RT = ready.correction.weight_RT[rows].to(device), ready.correction.keep_RT[rows].to(device)
    return aggregate(loss_RT * weight_RT, keep_RT, mode=recipe.aggregation, constant=recipe.constant,
                     count_mask_RT=count_RT[rows].to(device), denominator=denominator)


def regularisers(config: Config, ready: Prepared, rows: list[int], cur: Tensor, whole: Tensor | None, step: Divisors) -> Tensor:
    """This micro-batch's part of the KL to the reference and of the entropy bonus; exactly 0 where the recipe has neither.

    whole: channels of `WholeVocabulary` as [3, rows, T], where the recipe reads them.
    """
    recipe, device, total = config.recipe, cur.device, torch.zeros((), device=cur.device)
    if not rows:
        return total
    mode, constant = recipe.aggregation, recipe.constant
    if recipe.kl > 0 and recipe.kl_in == "loss":
        mask_RT = kl_mask(recipe, ready)[rows].to(device)
        kl_RT = token_kl(recipe, ready, rows, cur, whole)
        if recipe.kl_weight == "total":
            kl_RT = kl_RT * ratio(sanitise(cur.detach() - ready.table.mu_RT[rows].to(device), mask_RT))
        total = total + recipe.kl * aggregate(kl_RT, mask_RT, mode=mode, constant=constant, denominator=step.kl)
    if recipe.entropy:
        assert whole is not None
        mask_RT = ready.table.mask_RT[rows].to(device)
        total = total - recipe.entropy * aggregate(whole[ENTROPY], mask_RT, mode=mode, constant=constant, denominator=step.entropy)
    return total


def token_kl(recipe: Recipe, ready: Prepared, rows: list[int], cur: Tensor, whole: Tensor | None) -> Tensor:
    """KL(cur || ref) of each token, [rows, T], differentiable in the policy; 0 in masked slots."""
    mask_RT = ready.table.mask_RT[rows].to(cur.device)
    if recipe.kl_estimator == "full" and whole is not None:
        return sanitise(whole[KL], mask_RT)
    assert ready.ref_RT is not None
    estimator = "k3" if recipe.kl_estimator == "full" else recipe.kl_estimator
    return reference_kl(cur, ready.ref_RT[rows].to(cur.device), mask_RT, estimator=estimator)


def whole_surrogate(recipe: Recipe, ready: Prepared, cur_RT: Tensor) -> Surrogate:
    """The objective of every token of the lease, before correction weights: what of it is clipped is measured on this."""
    return surrogate(cur_RT, **objective_inputs(recipe, ready, list(range(len(cur_RT))), cur_RT.device))


def loss_measures(config: Config, ready: Prepared, slope_RT: Tensor, cur_RT: Tensor, whole_CRT: Tensor | None) -> dict[str, Any]:
    """active: share of the trainable tokens with an advantage that are kept and have a gradient. kl, entropy: means over the trainable
    tokens."""
    recipe, mask_RT = config.recipe, ready.table.mask_RT
    wanted_RT = mask_RT & (ready.advantage_R != 0)[:, None]
    active_RT = wanted_RT & (slope_RT != 0) & ready.correction.keep_RT
    found: dict[str, Any] = {"active": int(active_RT.sum()) / max(1, int(wanted_RT.sum()))}
    if ready.start_kl_RT is not None:
        found["kl"] = float(masked_mean(ready.start_kl_RT, mask_RT))
    elif ready.ref_RT is not None:
        whole = None if recipe.kl_estimator != "full" else whole_CRT
        kl_RT = token_kl(recipe, ready, list(range(len(cur_RT))), cur_RT, whole)
        found["kl"] = float(masked_mean(kl_RT, mask_RT))
    if recipe.entropy is not None and whole_CRT is not None:
        found["entropy"] = float(masked_mean(whole_CRT[ENTROPY], mask_RT))
    if ready.accepted_RT is not None:
        found["sis_accepted"] = ready.correction.counts["sis_accepted"] / max(1, int(mask_RT.sum()))
    if ready.correction.clip is not None:
        low, high = ready.correction.clip
        found |= {"clip_low": low, "clip_high": high if high < torch.inf else None}
    return found
