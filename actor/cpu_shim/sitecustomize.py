"""Runs at the start of every Python process of an SGLang server on a CPU (this folder is on its PYTHONPATH, and on nobody else's).

Three things, so that an unpatched SGLang starts without a GPU:
* the folder goes to the end of sys.path: the stand-in `sgl_kernel` beside this file is found only where no real one is installed;
* PyPI's torchvision is built for CUDA: beside a CPU torch its operators do not load, and its import stops where it registers fakes
  for `nms` and `qnms`. Declaring the two schemas first is enough, since a text-only server calls neither;
* another `sitecustomize`, hidden by this one, still runs.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


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


def run_hidden_sitecustomize() -> None:
    """Run the `sitecustomize` that Python would have run without this folder, if there is one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE] + [HERE]
sys.meta_path.insert(0, DeclareTorchvisionOps())  # type: ignore[arg-type]
run_hidden_sitecustomize()
