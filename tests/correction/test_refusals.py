"""Arguments with which a function could not do what it says are refused by name, not computed with."""

import math
from collections.abc import Callable

import pytest
import torch

from correction.filters import carm, geometric_filter, k3_filter, sequence_filter, veto
from correction.mismatch import icepop, kpop, tis
from correction.reference import reference_kl
from correction.sis import sis_accept
from correction.staleness import decoupled, m2_mask, m2_range, opsm
from learner.advantage import group_advantages, zcpo_coefficients
from learner.objective import aggregate, token_losses

MASK = torch.ones(2, 3, dtype=torch.bool)
TOKEN = torch.ones(2, 3, dtype=torch.int64)
ZERO, ONE, GROUP = torch.zeros(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64)


def loss(objective: str, **hyper: float) -> Callable[[], object]:
    return lambda: token_losses(ZERO, ZERO, ONE, MASK, objective=objective, **hyper)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: opsm(ZERO, ONE[:1], MASK), "advantage has shape (1,) for 2 responses"),
    (lambda: m2_mask(ZERO, ONE[:1], MASK), "advantage has shape (1,) for 2 responses"),
    (lambda: m2_range(ZERO, ONE[:1], MASK), "advantage has shape (1,) for 2 responses"),
    (lambda: opsm(ZERO, ONE, MASK, threshold=-0.1), "opsm threshold must be >= 0, got -0.1"),
    (lambda: m2_range(ZERO, ONE, MASK, budget=0.0), "m2_range needs budget > 0"),
    (lambda: m2_range(ZERO, ONE, MASK, floor_low=-0.1), "floors >= 0"),
    (lambda: m2_range(ZERO, ONE, MASK, floor_high=math.nan), "floors >= 0"),
    (lambda: veto(ZERO, MASK, floor=1.0), "veto needs 0 < floor < 1, got 1.0"),
    (lambda: reference_kl(ZERO, ZERO, MASK, estimator="full"), "full needs the whole vocabulary"),
    (lambda: group_advantages(ONE, GROUP, estimator="zcpo"), "of their own: ema_scaled_advantages, zcpo_coefficients"),
    (lambda: zcpo_coefficients(ONE, GROUP, ONE, beta=-1.0), "zcpo beta must be >= 0, got -1.0"),
    (lambda: aggregate(ZERO, MASK, mode="token_mean", denominator=0.0), "token_mean needs a denominator > 0, got 0.0"),
    (lambda: aggregate(ZERO, MASK, mode="token_mean", denominator=math.nan), "denominator > 0, got nan"),
    (loss("cispo", cap=-1.0), "cispo cap must be > 0, got -1.0"),
    (loss("ppo", clip_low=-0.2, clip_high=0.2), "clip_low >= 0 and clip_high >= 0, got an interval of 1.2 to 1.2"),
    (loss("ppo", clip_low=math.nan, clip_high=0.2), "got an interval of nan to 1.2"),
    (loss("gppo", clip_low=0.2, clip_high=-0.1), "got an interval of 0.8 to 0.9"),
    (loss("gspo", clip_low=0.2, clip_high=-0.1), "got an interval of 0.8 to 0.9"),
    (loss("tapo", clip_low=0.2, clip_high=-0.1), "got an interval of 0.8 to 0.9"),
    (lambda: token_losses(ZERO, ZERO, ONE, MASK, objective="minirl", mu_RT=ZERO, clip_low=-0.2), "got an interval of 1.2 to 1.27"),
    (lambda: token_losses(ZERO, ZERO, ONE, MASK, objective="minirl", mu_RT=ZERO, cap=0.0), "minirl cap must be > 0, got 0.0"),
])
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("call", [
    tis, icepop, lambda old_RT, mask_RT: kpop(old_RT, ZERO, mask_RT, threshold=1.0),
    lambda mu_RT, mask_RT: kpop(ZERO, mu_RT, mask_RT, threshold=1.0),
    lambda x_RT, mask_RT: sequence_filter(x_RT, mask_RT, low=0.5, high=2.0),
    lambda x_RT, mask_RT: geometric_filter(x_RT, mask_RT, low=0.5, high=2.0), lambda x_RT, mask_RT: k3_filter(x_RT, mask_RT, threshold=1.0),
    lambda x_RT, mask_RT: carm(x_RT, mask_RT, threshold=2.0), veto, decoupled, lambda x_RT, mask_RT: decoupled(x_RT, mask_RT, mode="mask"),
    lambda x_RT, mask_RT: opsm(x_RT, -ONE, mask_RT), lambda x_RT, mask_RT: m2_mask(x_RT, ONE, mask_RT),
    lambda x_RT, mask_RT: m2_range(x_RT, ONE, mask_RT),
    lambda now_RT, mask_RT: sis_accept(TOKEN, TOKEN[..., None], now_RT[..., None], ZERO[..., None], mask_RT, uniform_RT=ZERO),
    lambda mu_RT, mask_RT: sis_accept(TOKEN, TOKEN[..., None], ZERO[..., None], mu_RT[..., None], mask_RT, uniform_RT=ZERO),
])  # fmt: skip
def test_nan_in_a_trainable_slot_is_refused_and_in_a_masked_one_ignored(call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """A comparison with NaN is False: the token, or its whole response, would be dropped in silence."""
    hole_RT = ZERO.clone()
    hole_RT[1, 2] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        call(hole_RT, MASK)
    call(hole_RT, MASK & ~hole_RT.isnan())
