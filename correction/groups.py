"""Sums within prompt groups. Labels are arbitrary int64 and members need not be adjacent."""

import torch
from torch import Tensor


class Groups:
    """Membership of R responses in P prompt groups, made once from `group_R`.

    A dense [P, R] table instead of scatter-adds: R is small, and the sums have one fixed order on every device.
    """

    def __init__(self, group_R: Tensor) -> None:
        if group_R.dim() != 1 or group_R.dtype != torch.int64:
            raise TypeError(f"group labels must be 1-d int64, got {group_R.dtype} of shape {tuple(group_R.shape)}")
        self.label_P, self.index_R = torch.unique(group_R, return_inverse=True)
        self.member_PR = torch.arange(len(self.label_P), device=group_R.device)[:, None] == self.index_R[None, :]
        self.size_R = self.member_PR.sum(-1)[self.index_R]

    def _spread(self, value_R: Tensor, fill: float) -> Tensor:
        return value_R[None, :].masked_fill(~self.member_PR, fill)

    def sum(self, value_R: Tensor) -> Tensor:
        """Each response's group sum, [R]."""
        return self._spread(value_R, 0.0).sum(-1)[self.index_R]

    def mean(self, value_R: Tensor) -> Tensor:
        """Each response's group mean, [R]."""
        return self.sum(value_R) / self.size_R.to(value_R.dtype)

    def max(self, value_R: Tensor) -> Tensor:
        """Each response's group maximum, [R]."""
        return self._spread(value_R, float("-inf")).amax(-1)[self.index_R]

    def min(self, value_R: Tensor) -> Tensor:
        """Each response's group minimum, [R]."""
        return -self.max(-value_R)

    def logsumexp(self, value_R: Tensor) -> Tensor:
        """Each response's group log-sum-exp, [R]; -inf for a group of -inf only."""
        return self._spread(value_R, float("-inf")).logsumexp(-1)[self.index_R]
