"""Masking primitives. Everything that reads a masked tensor goes through here, so that junk in masked slots never
matters."""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS = 1 << 15, 1 << 22
"""Row-wise work is done on so many elements at a time: its temporaries then stay small, and on a CPU in the cache."""


def check_mask(mask_RT: Tensor, *columns_RT: Tensor) -> None:
    """Raise TypeError unless the mask is bool, ValueError unless every column has its shape."""
    if mask_RT.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask_RT.dtype}")
    for column_RT in columns_RT:
        if column_RT.shape != mask_RT.shape:
            raise ValueError(f"shape {tuple(column_RT.shape)} does not match the mask's {tuple(mask_RT.shape)}")


def check_known(mask_RT: Tensor, *columns_RT: Tensor) -> None:
    """`check_mask`, and ValueError for NaN in a masked-in slot: compared with a bound it is False, so that the token
    would be dropped in silence."""
    check_mask(mask_RT, *columns_RT)
    for column_RT in columns_RT:
        if count := int(torch.count_nonzero(column_RT.isnan() & mask_RT)):
            raise ValueError(f"{count} trainable tokens have NaN for a log-prob or log-ratio")


def check_advantage(advantage_R: Tensor, mask_RT: Tensor) -> None:
    """ValueError unless there is one advantage per response: another shape would broadcast in silence."""
    if advantage_R.shape != mask_RT.shape[:1]:
        raise ValueError(f"advantage has shape {tuple(advantage_R.shape)} for {len(mask_RT)} responses")


def sanitise(value_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """The value where mask is True and 0 elsewhere, with exactly zero gradient there.

    It has to come before any exp or log: `where(mask, exp(x), 0)` still sends NaN backwards through the branch not
    taken.
    """
    return torch.where(mask_RT, value_RT, torch.zeros((), dtype=value_RT.dtype, device=value_RT.device))


def response_sum(value_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Sum over a response's masked-in tokens, [R]; accumulated in float64, because long sums get compared with tight
    thresholds."""
    return sanitise(value_RT, mask_RT).sum(-1, dtype=torch.float64).to(value_RT.dtype)


def response_mean(value_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Mean over a response's masked-in tokens, [R]; 0 for a response without any."""
    return response_sum(value_RT, mask_RT) / mask_RT.sum(-1).clamp(min=1).to(value_RT.dtype)


def masked_mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over all masked-in elements, scalar; 0 when there are none."""
    if mask is None:
        mask = torch.ones_like(value, dtype=torch.bool)
    check_mask(mask, value)
    return sanitise(value, mask).sum() / mask.sum().clamp(min=1)


def row_blocks(table_RT: Tensor) -> Iterator[slice]:
    """Slices of rows that cover the table, for work that reads one row at a time."""
    elements = GPU_BLOCK_ELEMENTS if table_RT.is_cuda else BLOCK_ELEMENTS
    size = max(1, elements // max(1, table_RT.shape[-1]))
    for start in range(0, len(table_RT), size):
        yield slice(start, start + size)
