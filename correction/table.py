"""The policy table: every trained token's log-probs by role, checked once so that no corrector has to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.masked import check_mask

POSITIVE_SLACK = 1e-5
"""A log-prob may exceed 0 by float32 rounding, not by more."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTable:
    """Log-prob columns [R, T] of one batch, all of one float dtype. Masked slots may hold anything.

    mu: the engine's, as sampled. old: the trainer's under the very version that sampled the token, exact or None.
    prox: the trainer's under the version the update began from (or an EWMA anchor), or None. cur: the learner's, the
    only column that may carry a gradient; None before the training forward. ref: a reference policy's, or None. mask:
    trainable tokens. version_RT: int64 weight version that sampled each token. group_R: int64 label of each response's
    prompt group.

    Construction raises TypeError for a wrong dtype and ValueError for a wrong shape, a value in the mask that is no
    log-prob, a gradient on a column other than cur, or an old that shares memory with cur: current log-probs never
    stand in for old ones.
    """

    mu_RT: Tensor
    old_RT: Tensor | None
    prox_RT: Tensor | None
    cur_RT: Tensor | None
    ref_RT: Tensor | None
    mask_RT: Tensor
    version_RT: Tensor
    group_R: Tensor

    def __post_init__(self) -> None:
        check_mask(self.mask_RT, self.version_RT)
        if self.version_RT.dtype != torch.int64 or self.group_R.dtype != torch.int64:
            raise TypeError("version_RT and group_R must be int64")
        if self.group_R.shape != self.mask_RT.shape[:1]:
            raise ValueError(f"group_R has shape {tuple(self.group_R.shape)} for {len(self.mask_RT)} responses")
        for role in ("mu", "old", "prox", "cur", "ref"):
            column_RT = getattr(self, f"{role}_RT")
            if column_RT is not None:
                self._check_column(role, column_RT)
        old_RT, cur_RT = self.old_RT, self.cur_RT
        if old_RT is not None and cur_RT is not None and old_RT.numel() and old_RT.data_ptr() == cur_RT.data_ptr():
            raise ValueError("old shares memory with cur: current log-probs never stand in for old ones")

    def _check_column(self, role: str, column_RT: Tensor) -> None:
        check_mask(self.mask_RT, column_RT)
        if column_RT.dtype != self.mu_RT.dtype or not column_RT.is_floating_point():
            raise TypeError(f"{role} is {column_RT.dtype}, mu is {self.mu_RT.dtype}: all columns need one float dtype")
        if role != "cur" and column_RT.requires_grad:
            raise ValueError(f"{role} carries a gradient; only cur may")
        legal_RT = column_RT.isfinite() & (column_RT <= POSITIVE_SLACK)
        bad = int(torch.count_nonzero(~legal_RT & self.mask_RT))
        if bad:
            raise ValueError(f"{role} has {bad} trainable tokens whose value is not a finite log-prob <= 0")

    def column(self, role: str, *, needed_by: str) -> Tensor:
        """The column of a role; ValueError, naming who wants it, when the table has none."""
        column_RT = getattr(self, f"{role}_RT")
        if column_RT is None:
            raise ValueError(f"{needed_by} needs {role} log-probs, and this batch has none")
        return column_RT
