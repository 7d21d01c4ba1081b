"""Log-probs of given tokens straight from hidden states, without a table of all logits: a language model's head in chunks of rows.

Suffixes: `_NH` token x hidden, `_VH` vocabulary x hidden, `_N` token, `_CV` token of one chunk x vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK_LOGITS = 1 << 24
"""Logits of one chunk: 64 MB in float32, and the working copies of it as much again."""
LEAST_ROWS = 256
"""A chunk of fewer rows leaves a GPU waiting for the weight: a large vocabulary gets larger chunks instead."""


def chunk_rows(vocabulary: int) -> int:
    """Rows of a chunk. Depends on the vocabulary alone: with the number of tokens it decides the shape of every product, hence the bits."""
    return max(LEAST_ROWS, CHUNK_LOGITS // vocabulary)


def selected_log_probs(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """`log_softmax(hidden @ weight.T / temperature)` at the targets, [N], float32 (float64 of float64), differentiable in the first two.

    Logits are made in the dtype of the weight, everything after them in the result's; the weight's gradient is summed in it, too. The
    backward pass makes each chunk's logits again, so peak memory is a few chunks and one gradient of the weight. No double backward.
    """
    return _SelectedLogProbs.apply(hidden_NH, weight_VH, target_N, temperature_N)


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature_C: Tensor) -> Tensor:
    wide = torch.promote_types(weight_VH.dtype, torch.float32)
    return linear(hidden_CH, weight_VH).to(wide).div_(temperature_C[:, None])


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        size = chunk_rows(len(weight_VH))
        chosen, normalisers = [], []
        for hidden_CH, target_C, temperature_C in zip(*(t.split(size) for t in (hidden_NH, target_N, temperature_N)), strict=True):
            logits_CV = _logits(hidden_CH, weight_VH, temperature_C)
            chosen.append(logits_CV.gather(-1, target_C[:, None]).squeeze(-1))
            top_C1 = logits_CV.amax(-1, keepdim=True)
            normalisers.append(logits_CV.sub_(top_C1).exp_().sum(-1).log_().add_(top_C1.squeeze(-1)))
            del logits_CV  # before the next chunk's: never two at a time
        normaliser_N = torch.cat(normalisers)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, temperature_N, normaliser_N)
        return torch.cat(chosen) - normaliser_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_NH, weight_VH, target_N, temperature_N, normaliser_N = ctx.saved_tensors
        size, (wants_hidden, wants_weight) = chunk_rows(len(weight_VH)), ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=grad_N.dtype) if wants_weight else None
        for start in range(0, len(hidden_NH), size):
            part = slice(start, start + size)
            hidden_CH = hidden_NH[part]
            slope_CV = _logits(hidden_CH, weight_VH, temperature_N[part]).sub_(normaliser_N[part, None]).exp_()  # probabilities
            grad_C1 = (grad_N[part] / temperature_N[part])[:, None]
            slope_CV.mul_(-grad_C1).scatter_add_(-1, target_N[part, None], grad_C1)
            slope_CV = slope_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(slope_CV, weight_VH, out=grad_hidden_NH[part])
            if grad_weight_VH is None:
                continue
            if grad_weight_VH.dtype == weight_VH.dtype:
                grad_weight_VH.addmm_(slope_CV.T, hidden_CH)
            else:
                grad_weight_VH.add_(slope_CV.T @ hidden_CH)
            del slope_CV
        return grad_hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype), None, None
