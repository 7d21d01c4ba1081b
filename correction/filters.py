"""Engine-mismatch filters that judge a whole response: keep all of it at weight 1, or none of it.

Log-ratio = `old - mu`. Combine with `tis` for a weight: tis(level="sequence") times `sequence_filter` is masked
importance sampling. A sum rejects long responses at equal quality per token; the mean-based filters do not.
"""

import math

import torch
from torch import Tensor

from correction.factor import Factor, make_factor
from correction.masked import check_known, response_mean, response_sum, sanitise
from correction.ratios import LOG_RATIO_LIMIT, MismatchLogRatio, plain


def sequence_filter(
    log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, low: float, high: float
) -> Factor:
    """Keep a response iff `low <= exp(sum of log-ratios) <= high`, inclusive.

    Source: Seq-MIS, Liu, Li et al. 2025. Usual high 2 to 10. Status: established.
    """
    log_ratio_RT = _checked(log_ratio_RT, mask_RT)
    return _within(response_sum(log_ratio_RT, mask_RT), low, high, mask_RT, log_ratio_RT)


def geometric_filter(
    log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, low: float = 0.999, high: float = 1.001
) -> Factor:
    """Keep a response iff `low <= exp(mean log-ratio) <= high`, inclusive. Errors of opposite sign cancel: see `carm`.

    Source: Geo-RS, Liu, Li et al. 2025. Status: established.
    """
    log_ratio_RT = _checked(log_ratio_RT, mask_RT)
    return _within(response_mean(log_ratio_RT, mask_RT), low, high, mask_RT, log_ratio_RT)


def carm(log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, threshold: float) -> Factor:
    """Keep a response iff `exp(mean |log-ratio|) <= threshold` (>= 1), so that signed errors cannot cancel.

    Source: CARM, arXiv 2610.02039. No default. Status: reconstructed.
    """
    log_ratio_RT = _checked(log_ratio_RT, mask_RT)
    return _within(response_mean(log_ratio_RT.abs(), mask_RT), 1.0, threshold, mask_RT, log_ratio_RT)


def k3_filter(
    log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, threshold: float = 0.01
) -> Factor:
    """Keep a response iff the mean of `ratio - 1 - log ratio` over its tokens is <= threshold.

    Source: K3-RS, Liu, Li et al. 2025 (.001 to .01). Status: established. ValueError for a threshold < 0.
    """
    if not threshold >= 0:
        raise ValueError(f"k3 filter threshold must be >= 0, got {threshold}")
    log_ratio_RT = _checked(log_ratio_RT, mask_RT)
    k3_RT = torch.expm1(log_ratio_RT.clamp(max=LOG_RATIO_LIMIT)) - log_ratio_RT
    return _kept(response_mean(k3_RT, mask_RT) <= threshold, mask_RT, log_ratio_RT)


def veto(log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, floor: float = 1e-4) -> Factor:
    """Drop a response if any of its tokens has `exp(log-ratio) < floor`: the trainer would hardly ever say that token.

    Source: Liu, Li et al. 2025. Status: established. ValueError unless 0 < floor < 1.
    """
    if not 0 < floor < 1:
        raise ValueError(f"veto needs 0 < floor < 1, got {floor}")
    log_ratio_RT = _checked(log_ratio_RT, mask_RT)
    return _kept(~(log_ratio_RT < math.log(floor)).any(-1), mask_RT, log_ratio_RT)


def _checked(log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor) -> Tensor:
    log_ratio_RT = plain(log_ratio_RT, MismatchLogRatio).detach()
    check_known(mask_RT, log_ratio_RT)
    return sanitise(log_ratio_RT, mask_RT)


def _within(log_value_R: Tensor, low: float, high: float, mask_RT: Tensor, like_RT: Tensor) -> Factor:
    if not 0 < low <= high:
        raise ValueError(f"a filter needs 0 < low <= high, got low={low} high={high}")
    return _kept((log_value_R >= math.log(low)) & (log_value_R <= math.log(high)), mask_RT, like_RT)


def _kept(keep_R: Tensor, mask_RT: Tensor, like_RT: Tensor) -> Factor:
    return make_factor(torch.ones_like(like_RT), keep_R[:, None].expand_as(mask_RT), mask_RT)
