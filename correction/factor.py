"""What a corrector returns."""

from typing import NamedTuple

import torch
from torch import Tensor


class Factor(NamedTuple):
    """A detached weight and a keep mask, both [R, T]. The weight is exactly 0 where keep is False; keep implies
    mask."""

    weight_RT: Tensor
    keep_RT: Tensor


def make_factor(weight_RT: Tensor, keep_RT: Tensor, mask_RT: Tensor) -> Factor:
    """A Factor that holds its invariants whatever the inputs hold in dropped slots."""
    keep_RT = keep_RT & mask_RT
    zero = torch.zeros((), dtype=weight_RT.dtype, device=weight_RT.device)
    return Factor(torch.where(keep_RT, weight_RT, zero).detach(), keep_RT)
