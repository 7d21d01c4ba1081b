"""Selected log-probs: which position predicts which response token, and one fp32 log-softmax at the recorded temperature.

Suffixes: `_BT` row x position of the padded token table, `_N` response tokens of all rows end to end, `_V` vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.chunked_head import chunk_rows, selected_log_probs
from learner.distribution import Terms

CHUNKED_FROM = 4096
"""Vocabularies below this one go through the plain head: their logits are small, and the chunked head makes them twice."""
PLAIN_LOGITS = 1 << 26
"""The plain head makes at most so many logits at a time: 256 MB in float32. With a gradient, further ones are made again in backward."""


def predicting_positions(prompt_lens_B: Tensor, response_lens_B: Tensor, width: int) -> Tensor:
    """Flat index [N] into a [B, width - 1] table of the position that predicts each response token, rows in order, tokens in order.

    Position p predicts token p + 1, so response token t of a row comes from position `prompt_len + t - 1`, and the last column predicts
    nothing. Every alignment of log-probs with tokens goes through here. ValueError for an empty prompt or a row that does not fit.
    """
    if bool((prompt_lens_B < 1).any()) or bool((prompt_lens_B + response_lens_B > width).any()):
        raise ValueError(f"a row has an empty prompt or is longer than the width {width}")
    row_N = torch.repeat_interleave(torch.arange(len(prompt_lens_B)), response_lens_B)
    first_N = (torch.cumsum(response_lens_B, 0) - response_lens_B)[row_N]
    return row_N * (width - 1) + prompt_lens_B[row_N] - 1 + torch.arange(len(row_N)) - first_N


class PolicyModel(nn.Module):
    """A causal language model that answers log-probs of given tokens. Rows are right-padded, so a causal mask is all that is needed.

    `head`: how selected log-probs are made, "plain" or "chunked, <rows> rows". The choice moves their last bits, so it is part of the
    trainer's fingerprint. `partitioned`: under ZeRO 3 a weight is whole only while its own module runs, which leaves the plain head.
    """

    def __init__(self, model: nn.Module, *, partitioned: bool = False) -> None:
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        self.vocabulary = head.out_features
        bare = type(head) is nn.Linear and head.bias is None
        self.chunked = bare and not partitioned and self.vocabulary >= CHUNKED_FROM
        self.head = f"chunked, {chunk_rows(self.vocabulary)} rows" if self.chunked else "plain"

    def forward(self, ids_BT: Tensor, temperature_B: Tensor, position_N: Tensor, terms: Terms | None = None) -> Tensor:
        """Log-prob [N], float32, of the token after each position, at its row's temperature. Only these positions go through the head.
        terms: something else to make of head, hidden states, targets and temperatures (`learner/distribution.py`)."""
        hidden = self.model.get_decoder()(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)[position_N]
        target_N = ids_BT[:, 1:].flatten()[position_N]
        temperature_N = temperature_B[position_N // (ids_BT.shape[1] - 1)]
        head = self.model.get_output_embeddings()
        if terms is not None:
            return terms(head, hidden, target_N, temperature_N)
        if self.chunked:
            return selected_log_probs(hidden, head.weight, target_N, temperature_N)
        size = max(1, PLAIN_LOGITS // self.vocabulary)
        if len(position_N) <= size:
            return selected(head, hidden, target_N, temperature_N)
        parts = zip(hidden.split(size), target_N.split(size), temperature_N.split(size), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(selected, head, *part, use_reentrant=False) for part in parts])
        return torch.cat([selected(head, *part) for part in parts])


def selected(head: nn.Module, hidden_NH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """Log-softmax of the head's logits over the temperature, at the targets: [N], float32 (float64 of float64)."""
    logits_NV = head(hidden_NH)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature_N[:, None]
    return logits_NV.log_softmax(-1).gather(-1, target_N[:, None]).squeeze(-1)
