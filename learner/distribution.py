"""What one forward can say beside the log-prob of the sampled token: entropy and KL over the whole vocabulary, log-probs of other tokens.

Instances are handed to `PolicyModel.forward`, which calls them with its head, hidden states, targets and temperatures. Suffixes: `_N`
response tokens of all rows end to end, `_V` vocabulary, `_K` tokens asked for, `_C` channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Terms = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""(head, hidden_NH, target_N, temperature_N) -> values [C, N]"""
CHUNK = 1 << 25
"""Logits at a time: 128 MB in float32, and a few tensors of that size. With a gradient, chunks are computed again in the backward pass."""
LOG_PROB, ENTROPY, KL = 0, 1, 2
"""Channels of `WholeVocabulary`."""


class WholeVocabulary:
    """[3, N], float32: log-prob of the target, entropy, and KL(current || reference), 0 without a reference; all at the row's temperature.

    The reference is given as its head and its hidden states at the same positions; it gets no gradient.
    """

    def __init__(self, reference_head: nn.Module | None = None, reference_hidden_NH: Tensor | None = None) -> None:
        self.head, self.hidden_NH = reference_head, reference_hidden_NH

    def __call__(self, head: nn.Module, hidden_NH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        other_NH = hidden_NH.detach() if self.hidden_NH is None else self.hidden_NH
        parts = zip(*(value.split(rows_of(head)) for value in (hidden_NH, target_N, temperature_N, other_NH)), strict=True)
        if len(target_N) <= rows_of(head) or not torch.is_grad_enabled():
            return torch.cat([self.chunk(head, *part) for part in parts], -1)
        return torch.cat([checkpoint(self.chunk, head, *part, use_reentrant=False) for part in parts], -1)

    def chunk(self, head: nn.Module, hidden_NH: Tensor, target_N: Tensor, temperature_N: Tensor, other_NH: Tensor) -> Tensor:
        log_NV = log_softmax(head, hidden_NH, temperature_N)
        prob_NV = log_NV.exp()
        kl_N = torch.zeros_like(temperature_N)
        if self.head is not None:
            with torch.no_grad():
                reference_NV = log_softmax(self.head, other_NH, temperature_N)
            kl_N = (prob_NV * (log_NV - reference_NV)).sum(-1)
        return torch.stack([log_NV.gather(-1, target_N[:, None]).squeeze(-1), -(prob_NV * log_NV).sum(-1), kl_N])


class AtTokens:
    """[K, N], float32: log-probs of the tokens `token_NK` at each position."""

    def __init__(self, token_NK: Tensor) -> None:
        self.token_NK = token_NK

    def __call__(self, head: nn.Module, hidden_NH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        parts = zip(*(value.split(rows_of(head)) for value in (hidden_NH, temperature_N, self.token_NK)), strict=True)
        return torch.cat([log_softmax(head, hidden, temperature).gather(-1, token) for hidden, temperature, token in parts]).T


def rows_of(head: nn.Module) -> int:
    return max(1, CHUNK // head.out_features)


def log_softmax(head: nn.Module, hidden_NH: Tensor, temperature_N: Tensor) -> Tensor:
    return (head(hidden_NH).float() / temperature_N[:, None]).log_softmax(-1)
