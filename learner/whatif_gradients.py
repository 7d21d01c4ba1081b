"""Many gradients of one batch: the forward pass once, and the backward pass once for each way to weigh its tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from configs.schema import Learner
from correction.masked import sanitise
from learner.batch import LeaseRows, Table, micro_batches, padded_ids, to_table
from learner.logprobs import PolicyModel, predicting_positions


class Batch:
    """A lease in micro-batches of the run's size and padding, on the CPU."""

    def __init__(self, policy: PolicyModel, lease: LeaseRows, table: Table, learner: Learner) -> None:
        self.policy, self.lease, self.table = policy, lease, table
        self.plan = micro_batches(lease.lengths, range(len(lease.heads)), learner.micro_batch_rows, learner.length_bucket)

    def passes(self) -> Iterator[tuple[list[int], Tensor]]:
        """(rows, cur [rows, T] with gradient) of each micro-batch."""
        for batch in self.plan:
            rows = list(batch.rows)
            position_N = predicting_positions(self.table.prompt_lens_R[rows], self.table.response_lens_R[rows], batch.width)
            cur_N = self.policy(padded_ids(self.lease, rows, batch.width), self.table.temperature_R[rows], position_N)
            yield rows, to_table(cur_N, self.table.response_RT[rows])

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """[R, T], float32."""
        cur_RT = torch.zeros_like(self.table.mu_RT)
        for rows, cur in self.passes():
            cur_RT[rows] = cur
        return cur_RT

    def gradients(self, slope_VRT: Tensor) -> Tensor:
        """[V, P], float32: what each slope d loss / d cur becomes on the parameters, end to end."""
        parameters = list(self.policy.parameters())
        gradient_VP = torch.zeros(len(slope_VRT), sum(parameter.numel() for parameter in parameters))
        for rows, cur in self.passes():
            for index, slope_RT in enumerate(slope_VRT[:, rows]):
                slope_RT = sanitise(slope_RT, self.table.response_RT[rows])
                if bool(slope_RT.any()):
                    parts = torch.autograd.grad(cur, parameters, slope_RT, retain_graph=True)
                    gradient_VP[index] += torch.cat([part.flatten().float() for part in parts])
        return gradient_VP


def alike(own_P: Tensor, other_P: Tensor) -> dict[str, float | None]:
    """Cosine, and ratio of norms; None where one of them is 0."""
    own, other = float(own_P.double().norm()), float(other_P.double().norm())
    if own == 0 or other == 0:
        return {"cosine": None, "norm_ratio": None}
    return {"cosine": float(own_P.double() @ other_P.double()) / (own * other), "norm_ratio": own / other}
