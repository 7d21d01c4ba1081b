"""KL to a reference policy, estimated per token on sampled tokens. The reference has its own role, never old's."""

from torch import Tensor

from correction.masked import check_mask, sanitise
from correction.ratios import LOG_RATIO_LIMIT

KL_ESTIMATORS = ("k1", "k2", "k3")


def reference_kl(cur_RT: Tensor, ref_RT: Tensor, mask_RT: Tensor, *, estimator: str) -> Tensor:
    """Estimate of KL(cur || ref) per token, [R, T], differentiable in cur only; 0 in masked slots.

    With d = ref - cur: k1 `-d`, k2 `d^2 / 2`, k3 `e^d - d - 1` (d at most 20: flat above). As a loss on
    on-policy tokens, k2 has the gradient of KL(cur || ref), k3 that of KL(ref || cur), and k1 a gradient of mean zero:
    k1 belongs in the reward. On stale data each needs the total ratio as a weight, multiplied outside.
    Source: Schulman 2020, "Approximating KL divergence"; k3: GRPO, arXiv 2402.03300. Status: established.
    ValueError for another estimator.
    """
    check_mask(mask_RT, cur_RT, ref_RT)
    gap_RT = sanitise(ref_RT.detach() - cur_RT, mask_RT)
    if estimator == "k1":
        return -gap_RT
    if estimator == "k2":
        return gap_RT.square() / 2
    if estimator == "k3":
        gap_RT = gap_RT.clamp(max=LOG_RATIO_LIMIT)  # both terms: with the exp alone, the other's slope would push cur further away
        return gap_RT.expm1() - gap_RT
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)} (full needs the whole vocabulary)")
