"""One recipe's correctors applied to a policy table: once per update, on complete groups, before the batch is split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from correction import filters
from correction.choice import TOTAL_RATIO_OBJECTIVES, CorrectionChoice, check_stacking
from correction.factor import Factor, make_factor
from correction.groupmass import cap_group_mass
from correction.groups import Groups
from correction.masked import sanitise
from correction.mismatch import icepop, kpop, tis
from correction.ratios import (
    MismatchLogRatio,
    mismatch_log_ratio,
    policy_log_ratio,
    response_log_ratio,
    total_log_ratio,
)
from correction.staleness import DECOUPLED_CAP, decoupled, m2_mask, m2_range, opsm
from correction.table import PolicyTable

FILTER_FUNCTIONS: dict[str, Callable[..., Factor]] = {
    "sequence": filters.sequence_filter,
    "geometric": filters.geometric_filter,
    "k3": filters.k3_filter,
    "carm": filters.carm,
    "veto": filters.veto,
}


class Correction(NamedTuple):
    """What the correctors say about a batch.

    weight_RT: product of all weights, detached, 0 where keep is False. keep_RT: mask and every corrector's keep.
    factors: each corrector's own Factor, by "engine", "filter", "staleness", "group_mass".
    counts: tokens by name, for the metrics: tokens, kept, <factor>_masked, <factor>_capped of a factor with a cap,
    capped (kept tokens whose weight any cap cut), sis_accepted.
    clip: (clip_low, clip_high) that m2_range set in place of the recipe's; None otherwise.
    """

    weight_RT: Tensor
    keep_RT: Tensor
    factors: dict[str, Factor]
    counts: dict[str, int]
    clip: tuple[float, float] | None = None


def correct(
    table: PolicyTable,
    choice: CorrectionChoice,
    advantage_R: Tensor | None = None,
    accepted_RT: Tensor | None = None,
) -> Correction:
    """Weights and masks of a whole batch. The table must hold complete groups; cur is not read.

    Engine correctors and filters read old/mu; with an objective on the total ratio only their masks count. Group mass
    reads prox/mu over the original mask; a response without a trainable token is not present. opsm, m2_mask and m2_range
    need advantages. sis needs its acceptance (`correction.sis`), which also goes into `token_losses`: an accepted token
    follows the current policy already, so no weight goes with it, but a mask of the engine still counts.
    ValueError for a refused stacking or a missing column.
    """
    check_stacking(choice)
    mask_RT = table.mask_RT
    counts = {"tokens": int(mask_RT.sum())}
    factors: dict[str, Factor] = {}
    at_cap: dict[str, Tensor] = {}
    if choice.engine != "none":
        factors["engine"] = _engine(table, choice)
        if choice.engine == "tis":
            at_cap["engine"] = factors["engine"].weight_RT >= choice.cap
    if choice.filter != "none":
        mismatch = _mismatch(table, choice.filter)
        factors["filter"] = FILTER_FUNCTIONS[choice.filter](mismatch, mask_RT, **choice.filter_hyper)
    clip = None
    if choice.staleness == "m2_range":
        total = total_log_ratio(table.column("prox", needed_by="m2_range"), table.mu_RT)
        clip = m2_range(total, _needed(advantage_R, "m2_range"), mask_RT, **choice.staleness_hyper)  # type: ignore[arg-type]
    elif choice.staleness not in ("none", "sis"):
        factors["staleness"] = _staleness(table, choice, advantage_R)
        if choice.staleness == "decoupled":
            at_cap["staleness"] = factors["staleness"].weight_RT >= choice.staleness_hyper.get("cap", DECOUPLED_CAP)
    if choice.group_mass_cap_per_response is not None:
        factors["group_mass"], at_cap["group_mass"] = _group_mass(table, choice.group_mass_cap_per_response)

    keep_RT = mask_RT.clone()
    weight_RT = torch.ones((), dtype=table.mu_RT.dtype, device=table.mu_RT.device)
    for name, factor in factors.items():
        keep_RT &= factor.keep_RT
        counts[f"{name}_masked"] = counts["tokens"] - int(factor.keep_RT.sum())
        if name != "engine" or choice.objective not in TOTAL_RATIO_OBJECTIVES:
            weight_RT = weight_RT * factor.weight_RT
    if choice.staleness == "sis":
        accepted_RT = _needed(accepted_RT, "sis") & keep_RT
        counts["sis_accepted"] = int(accepted_RT.sum())
        weight_RT = torch.where(accepted_RT, 1.0, weight_RT)
    capped_RT = torch.zeros_like(mask_RT)
    for name, at_cap_RT in at_cap.items():
        counts[f"{name}_capped"] = int((at_cap_RT & mask_RT).sum())
        capped_RT |= at_cap_RT
    counts["capped"] = int((capped_RT & keep_RT).sum())
    counts["kept"] = int(keep_RT.sum())
    return Correction(sanitise(weight_RT, keep_RT), keep_RT, factors, counts, clip)


def _needed(value: Tensor | None, by: str) -> Tensor:
    if value is None:
        raise ValueError(f"{by} needs the {'accepted tokens' if by == 'sis' else 'advantages'}")
    return value


def _mismatch(table: PolicyTable, needed_by: str) -> MismatchLogRatio:
    return mismatch_log_ratio(table.column("old", needed_by=needed_by), table.mu_RT)


def _engine(table: PolicyTable, choice: CorrectionChoice) -> Factor:
    if choice.engine == "tis":
        return tis(_mismatch(table, "tis"), table.mask_RT, cap=choice.cap, level=choice.level)
    if choice.engine == "icepop":
        return icepop(_mismatch(table, "icepop"), table.mask_RT, low=choice.low, high=choice.high)
    assert choice.threshold is not None  # check_stacking
    old_RT = table.column("old", needed_by="kpop")
    return kpop(old_RT, table.mu_RT, table.mask_RT, threshold=choice.threshold, carry=choice.carry)


def _staleness(table: PolicyTable, choice: CorrectionChoice, advantage_R: Tensor | None) -> Factor:
    prox_RT = table.column("prox", needed_by=choice.staleness)
    hyper: dict[str, Any] = dict(choice.staleness_hyper)
    if choice.staleness == "decoupled":
        lag = policy_log_ratio(prox_RT, table.column("old", needed_by="decoupled"))
        return decoupled(lag, table.mask_RT, **hyper)
    total = total_log_ratio(prox_RT, table.mu_RT)
    if choice.staleness == "m2_mask":
        return m2_mask(total, _needed(advantage_R, "m2_mask"), table.mask_RT, **hyper)
    return opsm(total, _needed(advantage_R, "opsm"), table.mask_RT, **hyper)


def _group_mass(table: PolicyTable, cap_per_response: float) -> tuple[Factor, Tensor]:
    """The factor, and which tokens belong to a group whose mass was cut."""
    mask_RT, groups = table.mask_RT, Groups(table.group_R)
    total = total_log_ratio(table.column("prox", needed_by="cap_group_mass"), table.mu_RT)
    present_R = mask_RT.any(-1)
    log_ratio_R = response_log_ratio(total, mask_RT).value.masked_fill(~present_R, -torch.inf)
    cap_R = groups.sum(present_R.to(log_ratio_R.dtype)).clamp(min=1.0) * cap_per_response
    weight_R = cap_group_mass(log_ratio_R, table.group_R, cap=cap_R)
    cut_R = groups.logsumexp(log_ratio_R) > cap_R.log()
    return make_factor(weight_R[:, None].expand_as(table.mu_RT), mask_RT, mask_RT), mask_RT & cut_R[:, None]
