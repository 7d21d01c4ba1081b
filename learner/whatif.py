"""One recorded batch under many recipes: what each would have weighed and masked, and where its gradient would have pointed.

Needs no engine: columns come from the update's record, the policy from the version store. What a recipe would need beside the record
(a reference policy, a running average, top log-probs) is not made up: it is refused with the reason.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.needs import scores_prox
from configs.schema import Config
from correction.diagnostics import effective_sample_size, kept_mass, weight_entropy
from correction.pipeline import correct
from correction.ratios import response_log_ratio, total_log_ratio
from correction.table import PolicyTable
from learner.batch import LeaseRows, Table, tabulate
from learner.logprobs import PolicyModel
from learner.loss import count_mask, divisors, micro_loss
from learner.objective import aggregate, token_losses
from learner.prepare import Prepared, correction_choice, trainable
from learner.rewards import make_advantages
from learner.whatif_gradients import Batch, alike

MOST_GRADIENT_BYTES = 2 << 30
"""All variants' gradients are held at once; beyond this they are left out."""
BUCKETS = 4


class Variant(NamedTuple):
    """A recipe to try: a whole config, or the line that says why there is none."""

    name: str
    config: Config | str


class Logged(NamedTuple):
    """An update as recorded. Columns [R, T], float32; None where the record has none. `prox_RT` is under version_in, whatever anchor the
    run itself used: `averaged_RT` is its running average, if it had one."""

    lease: LeaseRows
    prox_RT: Tensor | None
    averaged_RT: Tensor | None
    cur_RT: Tensor
    ref_RT: Tensor | None
    start_kl_RT: Tensor | None
    accepted_RT: Tensor | None


class Compared(NamedTuple):
    """`rows`: plain numbers by variant. `refused`: name and reason. `buckets`: response lengths. `exact_ess`: effective sample size of the
    whole-response ratios behind the on-policy gradient. `note`: why there are no gradients, or None."""

    rows: list[dict[str, Any]]
    refused: list[tuple[str, str]]
    buckets: list[tuple[int, int]]
    exact_ess: float | None
    note: str | None


def compare(logged: Logged, config: Config, variants: Sequence[Variant], policy: PolicyModel | None) -> Compared:
    """`config`: the run's. `policy`: version_in's weights; without it there are no gradients.

    Gradients are taken where the first optimizer step stands, over the whole batch, without KL and entropy terms. Each is compared with
    what its own advantages and aggregation give on-policy: the score function weighed by the exact, uncapped ratio prox/mu of the response,
    scaled to mean 1.
    """
    table = tabulate(logged.lease)
    buckets = length_buckets(table.response_lens_R)
    note = no_gradients(logged, policy, len(variants))
    batch = None if note is not None or policy is None else Batch(policy, logged.lease, table, config.learner)
    cur_RT = logged.cur_RT if batch is None else batch.log_probs()
    rows, slopes, refused = [], [], []
    for variant in variants:
        try:
            if isinstance(variant.config, str):
                raise ValueError(variant.config)
            ready = prepare(logged, variant.config, cur_RT)
        except ValueError as error:
            refused.append((variant.name, str(error)))
            continue
        slope_RT = loss_slope(variant.config, ready, cur_RT)
        rows.append({"name": variant.name, **numbers(ready, logged.prox_RT, slope_RT, buckets)})
        if batch is not None:
            slopes += [slope_RT, on_policy_slope(variant.config, ready, logged, cur_RT)]
    if batch is not None and slopes:
        gradient_VP = batch.gradients(torch.stack(slopes))
        for row, own_P, exact_P in zip(rows, gradient_VP[::2], gradient_VP[1::2], strict=True):
            row |= alike(own_P, exact_P)
    return Compared(rows, refused, buckets, None if logged.prox_RT is None else exact_ess(table, logged.prox_RT), note)


def no_gradients(logged: Logged, policy: PolicyModel | None, variants: int) -> str | None:
    """Why there are none."""
    if policy is None:
        return "no gradients: the weights that the update began from are not retained"
    if logged.prox_RT is None:
        return "no gradients: the record has no log-probs under the version that the update began from"
    need = 2 * variants * 4 * sum(parameter.numel() for parameter in policy.parameters())
    if need > MOST_GRADIENT_BYTES:
        return f"no gradients: {variants} of them would take {need / 2**30:.0f} GiB for this model"
    return None


# ---------------------------------------------------------------- one variant
def prepare(logged: Logged, config: Config, cur_RT: Tensor) -> Prepared:
    """ValueError, in words for people, for what the record does not hold or what does not go together."""
    lease, recipe = logged.lease, config.recipe
    table = trainable(lease, config)
    reads_ref = recipe.estimator == "zcpo" or recipe.kl > 0 and recipe.kl_in == "reward"
    whole = recipe.estimator == "zcpo" or reads_ref and recipe.kl_estimator == "full"
    if reads_ref and (logged.start_kl_RT is None if whole else logged.ref_RT is None):
        raise ValueError("needs the reference policy's column, which this run did not record")
    if recipe.staleness == "sis" and logged.accepted_RT is None:
        raise ValueError("needs the draws of SIS over the engine's top log-probs, which this run did not record")
    prox_RT = logged.averaged_RT if recipe.prox == "ewma" else logged.prox_RT
    if recipe.prox == "ewma" and prox_RT is None:
        raise ValueError("needs a running average of the weights, which this run did not keep")
    if prox_RT is None and scores_prox(config):
        raise ValueError("needs prox under version_in, which this run did not record")
    advantage_R = make_advantages(lease, config, table, logged.ref_RT, logged.start_kl_RT, None).advantage_R
    policy = PolicyTable(mu_RT=table.mu_RT, old_RT=table.old_RT, prox_RT=prox_RT, cur_RT=None, ref_RT=None, mask_RT=table.mask_RT,
                         version_RT=table.version_RT, group_R=table.group_R)
    accepted_RT = logged.accepted_RT if recipe.staleness == "sis" else None
    correction = correct(policy, correction_choice(config), advantage_R, accepted_RT)
    return Prepared(table, advantage_R, cur_RT if prox_RT is None else prox_RT, correction, accepted_RT=accepted_RT)


def loss_slope(config: Config, ready: Prepared, cur_RT: Tensor) -> Tensor:
    """d loss / d cur, [R, T], of the corrected objective over the whole batch."""
    rows, cur_RT = list(range(len(cur_RT))), cur_RT.clone().requires_grad_()
    loss = micro_loss(config, ready, rows, cur_RT, count_mask(config.recipe, ready), max(divisors(config.recipe, ready, rows).loss, 1.0))
    (slope_RT,) = torch.autograd.grad(loss, cur_RT)
    return slope_RT


def on_policy_slope(config: Config, ready: Prepared, logged: Logged, cur_RT: Tensor) -> Tensor:
    """The same of the score function under exact ratios; every trainable token, no clip, no cap."""
    assert logged.prox_RT is not None  # no_gradients()
    table, recipe = ready.table, config.recipe
    weight_R = exact_weights(table, logged.prox_RT)
    cur_RT = cur_RT.clone().requires_grad_()
    losses_RT = token_losses(cur_RT, None, ready.advantage_R, table.mask_RT, objective="score") * weight_R[:, None]
    loss = aggregate(losses_RT, table.mask_RT, mode=recipe.aggregation, constant=recipe.constant)
    (slope_RT,) = torch.autograd.grad(loss, cur_RT)
    return slope_RT


def numbers(ready: Prepared, prox_RT: Tensor | None, slope_RT: Tensor, buckets: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """ess, weight_entropy: of the weights over all trainable tokens. kept: share of tokens; kept_mass: of the ratios' sum (prox/mu).
    active: share of the tokens with an advantage that still have a gradient. masked_by_length: share masked, per bucket."""
    table, keep_RT, weight_RT = ready.table, ready.correction.keep_RT, ready.correction.weight_RT
    mask_RT, tokens = table.mask_RT, max(1, int(table.mask_RT.sum()))
    wanted_RT = mask_RT & (ready.advantage_R != 0)[:, None]
    return {
        "ess": float(effective_sample_size(weight_RT, mask_RT)), "weight_entropy": weight_entropy(weight_RT, mask_RT),
        "kept": int(keep_RT.sum()) / tokens,
        "kept_mass": None if prox_RT is None else kept_mass(total_log_ratio(prox_RT, table.mu_RT), keep_RT, mask_RT),
        "active": int((wanted_RT & (slope_RT != 0)).sum()) / max(1, int(wanted_RT.sum())),
        "masked_by_length": [masked_share(keep_RT, mask_RT & inside(table, low, high)) for low, high in buckets]}


def masked_share(keep_RT: Tensor, mask_RT: Tensor) -> float | None:
    tokens = int(mask_RT.sum())
    return 1 - int((keep_RT & mask_RT).sum()) / tokens if tokens else None


def inside(table: Table, low: int, high: int) -> Tensor:
    return ((table.response_lens_R >= low) & (table.response_lens_R <= high))[:, None]


def length_buckets(lens_R: Tensor) -> list[tuple[int, int]]:
    """At most four ranges of response lengths, each with about as many responses; equal lengths are never parted."""
    lens = sorted(lens_R.tolist())
    tops = sorted({lens[math.ceil(len(lens) * (i + 1) / BUCKETS) - 1] for i in range(BUCKETS)})
    lows = [lens[0], *(min(length for length in lens if length > top) for top in tops[:-1])]
    return list(zip(lows, tops, strict=True))


def exact_ess(table: Table, prox_RT: Tensor) -> float:
    return float(effective_sample_size(exact_weights(table, prox_RT), table.mask_RT.any(-1)))


def exact_weights(table: Table, prox_RT: Tensor) -> Tensor:
    """prox/mu of whole responses, [R], scaled to mean 1 (which it has in expectation): sums over long responses leave the range of exp."""
    present_R = table.mask_RT.any(-1)
    log_ratio_R = response_log_ratio(total_log_ratio(prox_RT, table.mu_RT), table.mask_RT).value
    return log_ratio_R.masked_fill(~present_R, -torch.inf).softmax(0) * present_R.sum()
