"""The learner's processes among themselves: rank, world, and the two collectives we use. Tensors only; no object is ever pickled."""

import os
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Config
from wire.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


class Ranks:
    """Who this process is. Every rank runs the same steps in the same order, so collectives always meet."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. The others pass None."""
        if self.world == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0], device=self.device)
        dist.broadcast(size, 0)
        body = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(self.device) if int(size) else None
        if body is None:
            return b""
        dist.broadcast(body, 0)
        return body.cpu().numpy().tobytes()

    def share(self, value: T | None, kind: type[T]) -> T:
        """Rank 0's struct, on every rank."""
        return msgspec.msgpack.decode(self.broadcast(msgspec.msgpack.encode(value) if self.is_first else None), type=kind)

    def decide(self, flag: bool) -> bool:
        """Rank 0's flag, on every rank."""
        return self.broadcast(bytes([flag])) == b"\x01"

    def barrier(self) -> None:
        """Returns when every rank is here."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on every rank. Where all but one rank hold zeros it is an exact copy of that one."""
        if self.world == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)


def join(config: Config) -> Ranks:
    """Join the process group that torchrun or the deepspeed launcher put into the environment, or be the only rank. Raises ConfigError."""
    device = config.learner.device
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("learner.device = 'cuda', but torch sees no GPU: use learner.device = 'cpu' or a CUDA build of torch")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
