"""Token losses and their aggregation. Losses are to be minimised; correctors' weights are multiplied in between."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from correction import surrogates
from correction.masked import check_advantage, check_mask, row_blocks, sanitise

OBJECTIVES: dict[str, Callable[..., surrogates.Surrogate]] = {
    "score": surrogates.score,
    "unit": surrogates.unit,
    "ppo": surrogates.ppo,
    "gppo": surrogates.gppo,
    "gspo": surrogates.gspo,
    "luspo": surrogates.luspo,
    "cispo": surrogates.cispo,
    "ripo": surrogates.ripo,
    "fdiv": surrogates.fdiv,
    "tapo": surrogates.tapo,
    "minirl": surrogates.minirl,
}
WITHOUT_BASE = ("score", "unit")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant", "length_weighted")


def token_losses(cur_RT: Tensor, base_RT: Tensor | None, advantage_R: Tensor, mask_RT: Tensor, **choice: Any) -> Tensor:
    """Loss of each token, [R, T], differentiable in cur only; exactly 0, in value and gradient, in masked slots. See `surrogate`."""
    found = surrogate(cur_RT, base_RT, advantage_R, mask_RT, **choice)
    return _WithSlope.apply(cur_RT, found.value_RT, found.slope_RT)


@torch.no_grad()
def surrogate(
    cur_RT: Tensor,
    base_RT: Tensor | None,
    advantage_R: Tensor,
    mask_RT: Tensor,
    *,
    objective: str,
    accepted_RT: Tensor | None = None,
    **hyper: Any,
) -> surrogates.Surrogate:
    """Loss of each token, its slope with respect to cur, and the side of the bound whose slope that is, [R, T]; 0 in masked slots.

    base is old or prox, whichever the recipe clips against; `score` and `unit` do without. mask is the original
    response mask: lengths and response means run over it. accepted_RT: tokens that SIS accepted take the `unit`
    objective instead. objective and its keyword arguments `hyper`: a function of `correction.surrogates`.
    ValueError for an unknown objective or a missing base, TypeError for an unknown argument or a mask that is not bool.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    check_advantage(advantage_R, mask_RT)
    if base_RT is None:
        if objective not in WITHOUT_BASE:
            raise ValueError(f"objective {objective} needs base log-probs (old or prox)")
        base_RT = cur_RT
    check_mask(mask_RT, cur_RT, base_RT)
    if accepted_RT is not None:
        check_mask(accepted_RT, mask_RT)
    wide = torch.promote_types(cur_RT.dtype, advantage_R.dtype)
    whole = surrogates.Surrogate(*(torch.empty_like(cur_RT, dtype=dtype, requires_grad=False) for dtype in (wide, wide, torch.int8)))
    for rows in row_blocks(mask_RT):
        part = _some_rows(cur_RT, base_RT, advantage_R, mask_RT, accepted_RT, objective, hyper, rows)
        for table_RT, one_RT in zip(whole, part, strict=True):
            table_RT[rows] = one_RT
    return whole


def _some_rows(cur_RT: Tensor, base_RT: Tensor, advantage_R: Tensor, mask_RT: Tensor, accepted_RT: Tensor | None, objective: str,
               hyper: dict[str, Any], rows: slice) -> surrogates.Surrogate:
    """An objective reads no other row."""
    mask_RT, advantage_R1 = mask_RT[rows], advantage_R[rows, None]
    here = {name: value[rows] if isinstance(value, Tensor) else value for name, value in hyper.items()}
    value_RT, slope_RT, side_RT = OBJECTIVES[objective](
        sanitise(cur_RT[rows], mask_RT), sanitise(base_RT[rows], mask_RT), advantage_R1, mask_RT, **here
    )
    if accepted_RT is not None:
        value_RT, slope_RT = (torch.where(accepted_RT[rows], -advantage_R1, one_RT) for one_RT in (value_RT, slope_RT))
        side_RT = sanitise(side_RT, ~accepted_RT[rows])
    return surrogates.Surrogate(*(sanitise(one_RT, mask_RT) for one_RT in (value_RT, slope_RT, side_RT)))


class _WithSlope(torch.autograd.Function):
    """A value that was computed outside of autograd, and its derivative with respect to the first argument."""

    @staticmethod
    def forward(ctx: Any, cur_RT: Tensor, value_RT: Tensor, slope_RT: Tensor) -> Tensor:
        ctx.save_for_backward(slope_RT)
        return value_RT

    @staticmethod
    def backward(ctx: Any, grad_RT: Tensor) -> tuple[Tensor, None, None]:
        (slope_RT,) = ctx.saved_tensors
        return grad_RT * slope_RT, None, None


def aggregate(
    loss_RT: Tensor,
    mask_RT: Tensor,
    *,
    mode: str,
    constant: float | None = None,
    count_mask_RT: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Scalar loss. The numerator runs over mask; counts run over count_mask (default: mask).

    token_mean       sum of the losses / counted tokens
    sequence_mean    sum over responses of (sum of its losses / its counted tokens) / responses with a counted token
    constant         sum of the losses / (responses x constant)
    length_weighted  sum of the losses / responses with a counted token: each response's mean times its length
    `denominator` replaces the last divisor: for each micro-batch of each rank, the optimizer step's total of
    `denominator_of`. Masked slots may hold anything. ValueError for an unknown mode, or with nothing to divide by.
    Sources: DAPO (token_mean), GRPO (sequence_mean), Dr. GRPO (constant); length_weighted is LUSPO's for any
    objective. Status: established.
    """
    check_mask(mask_RT, loss_RT)
    count_mask_RT = mask_RT if count_mask_RT is None else count_mask_RT
    check_mask(count_mask_RT, loss_RT)
    if denominator is None:
        denominator = denominator_of(count_mask_RT, mode=mode, constant=constant)
        if not denominator > 0:
            raise ValueError(f"{mode} has no counted token to divide by: skip the step instead")
    elif mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    elif isinstance(denominator, float | int) and not denominator > 0:
        raise ValueError(f"{mode} needs a denominator > 0, got {denominator}: skip the step instead")
    total_R = sanitise(loss_RT, mask_RT).sum(-1)
    if mode == "sequence_mean":
        count_R = count_mask_RT.sum(-1)
        total_R = sanitise(total_R / count_R.clamp(min=1).to(loss_RT.dtype), count_R > 0)
    return total_R.sum() / denominator


def denominator_of(count_mask_RT: Tensor, *, mode: str, constant: float | None = None) -> float:
    """What `aggregate` divides by on this slice; additive over micro-batches and ranks. ValueError as there."""
    if mode == "token_mean":
        return float(count_mask_RT.sum())
    if mode in ("sequence_mean", "length_weighted"):
        return float(count_mask_RT.any(-1).sum())
    if mode == "constant":
        if constant is None or not constant > 0:
            raise ValueError(f"aggregation constant needs a constant > 0, got {constant}")
        return float(len(count_mask_RT) * constant)
    raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
