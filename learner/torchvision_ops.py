"""Lets transformers import where torchvision is built for CUDA and torch for the CPU, as SGLang on a CPU machine needs it.

torchvision's compiled operators do not load there, and its import stops where it registers fakes for `nms` and `qnms`. Declaring the two
schemas first is enough: a language model calls neither. Where torchvision is whole, or absent, this does nothing.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class DeclareTorchvisionOps:
    """A finder that finds nothing: it acts when torchvision is about to register its fakes."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision._meta_registrations" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, op):
                    self.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install() -> None:
    if not any(isinstance(finder, DeclareTorchvisionOps) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeclareTorchvisionOps())
