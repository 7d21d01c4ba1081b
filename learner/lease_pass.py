"""Passes over a whole lease before the first step: every rank runs its share of the batches, and every rank gets every result."""

from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import Config
from learner.batch import LeaseRows, Table, micro_batches, padded_ids, to_table
from learner.logprobs import predicting_positions
from learner.ranks import Ranks

RowForward = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]
"""(ids_BT, temperature_B, position_N, rows of the lease) -> values [C, N], without gradient"""


@torch.no_grad()
def lease_pass(ranks: Ranks, config: Config, lease: LeaseRows, table: Table, forward: RowForward, channels: int) -> Tensor:
    """Values [C, R, T], float32, on the CPU; 0 where there is no token."""
    learner = config.learner
    batches = micro_batches(lease.lengths, range(len(lease.heads)), learner.score_rows, learner.length_bucket)
    found = torch.zeros(channels, *table.response_RT.shape)
    for turn in range(-(-len(batches) // ranks.world)):  # under ZeRO 3 every rank has to run equally many
        index = turn * ranks.world + ranks.rank
        batch = batches[min(index, len(batches) - 1)]
        rows = list(batch.rows)
        position_N = predicting_positions(table.prompt_lens_R[rows], table.response_lens_R[rows], batch.width)
        ids_BT, temperature_B = padded_ids(lease, rows, batch.width).to(learner.device), table.temperature_R[rows].to(learner.device)
        value_CN = forward(ids_BT, temperature_B, position_N.to(learner.device), rows).float().cpu()
        if index < len(batches):
            for channel in range(channels):
                found[channel, rows] = to_table(value_CN[channel], table.response_RT[rows])
    return ranks.sum(found)
