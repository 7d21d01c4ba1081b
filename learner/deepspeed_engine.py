"""The only training code that knows DeepSpeed: forward, backward, step, and the live weights.

Losses come in normalised over all ranks and micro-batches of the optimizer step; DeepSpeed averages gradients over ranks, so each loss is
multiplied by the number of ranks and the gradient is that of the global sum.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from learner.distribution import Terms
from learner.logprobs import PolicyModel
from learner.memory import Memory
from learner.ranks import Ranks
from learner.reference import load_reference
from wire.digest import digest
from wire.errors import RunError, WeightsError
from wire.manifest import TensorEntry, weights_digest

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from deepspeed.runtime.zero import GatheredParameters

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

MAX_BUCKET = 50_000_000
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class TrainEngine:
    """A DeepSpeed engine around a policy. `steps` counts optimizer steps since it was made or loaded."""

    def __init__(self, policy: PolicyModel, config: Config, ranks: Ranks) -> None:
        learner = config.learner
        self.policy, self.ranks, self.device = policy.to(learner.device), ranks, learner.device
        self.zero_stage, self.base_lr = stage(config), learner.lr
        self.total_steps = learner.updates * learner.steps_per_update
        self.final_ratio, self.warmup_steps = learner.lr_final_ratio, learner.lr_warmup_updates * learner.steps_per_update
        optimizer = torch.optim.AdamW(policy.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=policy, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_share),
            config=deepspeed_config(config, ranks.world, sum(p.numel() for p in policy.parameters())))
        self.parameters = dict(self.policy.model.named_parameters())
        self.reference, self.memory = load_reference(config, policy), Memory()
        self.steps = 0
        self.rates: list[float] = []
        """Learning rates of the coming steps where they are not the scheduler's: an update that is run again uses those of its record."""

    def lr_share(self, step: int) -> float:
        """Share of the base learning rate for optimizer step `step`, counted from 0: linear to `lr_final_ratio` at the last, times a rise
        that is complete after `warmup_steps`."""
        decay = 1 - (1 - self.final_ratio) * min(step / max(1, self.total_steps - 1), 1.0)
        return decay * min((step + 1) / max(1, self.warmup_steps), 1.0)

    def forward(self, ids_BT: Tensor, temperature_B: Tensor, position_N: Tensor, terms: Terms | None = None) -> Tensor:
        """The training forward: log-probs [N] with gradient, or what `terms` makes of it, [C, N]."""
        return self.engine(ids_BT, temperature_B, position_N, terms)

    @torch.no_grad()
    def score(self, ids_BT: Tensor, temperature_B: Tensor, position_N: Tensor, terms: Terms | None = None) -> Tensor:
        """The same function without gradient. Under ZeRO 3 every rank has to call it equally often."""
        return self.policy(ids_BT, temperature_B, position_N, terms)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: the last micro-batch of the optimizer step, after which gradients are reduced over ranks."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.ranks.world)

    def step(self) -> tuple[float, float]:
        """One optimizer step: the gradient's global norm before clipping, and the learning rate used. RunError when it is not finite."""
        if self.rates:
            self._set_lr(self.rates.pop(0))
        lr = self.optimizer.param_groups[0]["lr"]
        norm = self._own_grad_norm()
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        self.steps += 1
        if norm is None or not torch.isfinite(torch.as_tensor(norm)):
            raise RunError(f"gradient norm is {norm} at optimizer step {self.steps}: stopped before anything was published")
        return float(norm), lr

    def loaded(self, steps: int) -> None:
        """A checkpoint was loaded: take up its step count, but the learning rate as configured now."""
        self.steps = steps
        self.scheduler.base_lrs = [self.base_lr] * len(self.scheduler.base_lrs)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = self.base_lr
        self._set_lr(self.base_lr * self.lr_share(self.scheduler.last_epoch))

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _own_grad_norm(self) -> float | None:
        """DeepSpeed keeps no norm at stage 0; there every rank holds the whole reduced gradient."""
        if self.zero_stage > 0:
            return None
        norms = [p.grad.norm() for p in self.policy.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """The live weights on the CPU under their transformers names, tied weights once; views of them where they already lie there. Empty
        on all ranks but the first."""
        state = {}
        for name, parameter in self.parameters.items():
            with self._whole([parameter]):
                if self.ranks.is_first:
                    tensor = parameter.detach().cpu()
                    state[name] = tensor.clone() if self.zero_stage == 3 else tensor.contiguous()
        return state

    @torch.no_grad()
    def _write(self, state: dict[str, Tensor]) -> None:
        """Put rank 0's `state` into the module of every rank. The optimizer's own copies are not touched."""
        for name, parameter in self.parameters.items():
            with self._whole([parameter], writer=0):
                if self.ranks.is_first:
                    parameter.copy_(state[name])
                if self.zero_stage < 3 and self.ranks.world > 1:
                    torch.distributed.broadcast(parameter.data, 0)

    def _whole(self, parameters: list[Tensor], writer: int | None = None) -> GatheredParameters | nullcontext[None]:
        return GatheredParameters(parameters, modifier_rank=writer) if self.zero_stage == 3 else nullcontext()

    @contextmanager
    def holding(self, state: dict[str, Tensor]) -> Iterator[None]:
        """Other weights (rank 0's) in the module for a while, then the live ones again. RunError when these have another digest."""
        live = {name: tensor.clone() for name, tensor in self.full_state().items()}
        if self.ranks.is_first and (odd := live.keys() ^ state.keys()):
            raise WeightsError(f"stored weights and live model differ in tensor {min(odd)}")
        before = digest_state(live)
        try:
            self._write(state)
            yield
        finally:
            self._write(live)
        if digest_state(self.full_state()) != before:
            raise RunError("the live weights changed while older ones were scored: they are not to be trusted")


def digest_state(state: dict[str, Tensor]) -> str:
    """The digest that a version with these tensors has (`wire.manifest.weights_digest`)."""
    return weights_digest({name: TensorEntry(DTYPES[tensor.dtype], list(tensor.shape), digest(tensor_bytes(tensor)))
                           for name, tensor in state.items()})


def tensor_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def stage(config: Config) -> int:
    """The ZeRO stage used. In bf16, 1 stands for 0: DeepSpeed's unpartitioned bf16 optimizer makes an Adam step of zeros when it starts."""
    return max(config.learner.zero_stage, 1) if config.model.dtype == "bfloat16" else config.learner.zero_stage


def deepspeed_config(config: Config, world: int, parameters: int) -> dict[str, Any]:
    """One micro-batch per call and manual accumulation boundaries; `overlap_comm` off, so that sums have one order."""
    learner = config.learner
    bucket = min(parameters, MAX_BUCKET)
    return {
        "train_batch_size": world, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.max_grad_norm, "steps_per_print": None, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {"stage": stage(config), "overlap_comm": False, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
    }
