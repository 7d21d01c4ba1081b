"""The proximal anchor as a running average of the learner's weights. It fills prox, never old.

Source: PPO-EWMA, Hilton et al. 2021, arXiv 2110.00641, as revised in "Missing Old Logits", arXiv 2605.12070.
Status: reconstructed.
"""

from torch import Tensor


def ewma_beta(window: int) -> float:
    """`W / (W + 2)`: puts the anchor in the middle of a staleness window of W versions. ValueError for W < 0."""
    if window < 0:
        raise ValueError(f"a staleness window is >= 0, got {window}")
    return window / (window + 2)


def ewma_step(anchor: Tensor, mass: float, weights: Tensor, *, beta: float) -> tuple[Tensor, float]:
    """(anchor, mass) after one more version: anchor = sum of beta^age * weights / sum of beta^age. Start with mass
    0."""
    mass = beta * mass + 1
    return anchor + (weights - anchor) / mass, mass
