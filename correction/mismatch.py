"""Engine mismatch: what sampled the tokens is not quite what trains on them, at equal weights. Log-ratio = `old -
mu`."""

import torch
from torch import Tensor

from correction.factor import Factor, make_factor
from correction.masked import check_known, response_mean, response_sum, row_blocks, sanitise
from correction.ratios import MismatchLogRatio, mismatch_log_ratio, plain, ratio

LARGEST_LOG_PROB = -1e-7
"""log(1 - p) needs p < 1: binary divergences clamp log-probs to this."""


def tis(
    log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, cap: float = 2.0, level: str = "token"
) -> Factor:
    """Truncated importance sampling: `min(exp(old - mu), cap)`, capped from above only; no token leaves the mask.

    level: "token"; "sequence", exp of the response's sum; "geometric", exp of the response's mean over masked-in
    tokens; the last two give one weight to every token of the response. ValueError for another level or a cap <= 0.
    Source: Yao et al. 2025 (truncated importance sampling); sequence level: Liu, Li et al. 2025. Default cap 2.
    Status: established.
    """
    if not cap > 0:
        raise ValueError(f"tis cap must be > 0, got {cap}")
    log_ratio_RT = plain(log_ratio_RT, MismatchLogRatio)
    check_known(mask_RT, log_ratio_RT)
    if level == "token":
        weight_RT = ratio(sanitise(log_ratio_RT, mask_RT))
    elif level == "sequence":
        weight_RT = ratio(response_sum(log_ratio_RT, mask_RT))[:, None].expand_as(log_ratio_RT)
    elif level == "geometric":
        weight_RT = ratio(response_mean(log_ratio_RT, mask_RT))[:, None].expand_as(log_ratio_RT)
    else:
        raise ValueError(f"tis level must be token, sequence or geometric, got {level!r}")
    return make_factor(weight_RT.clamp(max=cap), mask_RT, mask_RT)


def icepop(
    log_ratio_RT: Tensor | MismatchLogRatio, mask_RT: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Factor:
    """IcePop: keep a token and its ratio iff `low <= exp(old - mu) <= high`, both inclusive; outside, weight and
    gradient are 0.

    The test reads the raw ratio: a ratio clamped first would always pass. ValueError unless 0 <= low <= high.
    Source: Ling/Ring 2.6 report, eq. 5. Defaults 0.5 and 5. Status: established.
    """
    if not 0 <= low <= high:
        raise ValueError(f"icepop needs 0 <= low <= high, got low={low} high={high}")
    log_ratio_RT = plain(log_ratio_RT, MismatchLogRatio)
    check_known(mask_RT, log_ratio_RT)
    ratio_RT = sanitise(log_ratio_RT, mask_RT).exp()
    return make_factor(ratio_RT, (ratio_RT >= low) & (ratio_RT <= high), mask_RT)


def kpop(old_RT: Tensor, mu_RT: Tensor, mask_RT: Tensor, *, threshold: float, carry: str = "ratio") -> Factor:
    """KPop: keep a token iff the binary KL is <= `threshold` in both directions, D(p||q) and D(q||p) with p = e^old, q
    = e^mu.

    carry: "ratio", kept tokens weigh exp(old - mu); "one", they weigh 1 (the report defines only the mask).
    ValueError for another carry or a negative threshold.
    Source: Ling/Ring 2.6 report, section 3.2.3. No default threshold is printed there. Status: established (carry:
    reconstructed).
    """
    if carry not in ("ratio", "one"):
        raise ValueError(f"kpop carry must be ratio or one, got {carry!r}")
    if not threshold >= 0:
        raise ValueError(f"kpop threshold must be >= 0, got {threshold}")
    check_known(mask_RT, old_RT, mu_RT)
    weight_RT, keep_RT = torch.ones_like(old_RT), torch.empty_like(mask_RT)
    for rows in row_blocks(mask_RT):
        old, mu = (sanitise(one_RT.detach()[rows], mask_RT[rows]) for one_RT in (old_RT, mu_RT))
        keep_RT[rows] = (binary_kl(old, mu) <= threshold) & (binary_kl(mu, old) <= threshold)
        if carry == "ratio":
            weight_RT[rows] = ratio(mismatch_log_ratio(old, mu).value)
    return make_factor(weight_RT, keep_RT, mask_RT)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p log(p/q) + (1-p) log((1-p)/(1-q))` from log-probs; 0 at p = q, finite at p or q = 1."""
    log_p, log_q = log_p.clamp(max=LARGEST_LOG_PROB), log_q.clamp(max=LARGEST_LOG_PROB)
    rest_p, rest_q = -torch.expm1(log_p), -torch.expm1(log_q)
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())
