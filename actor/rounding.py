"""Weights rounded per output channel and stored back in their own dtype: on a CPU, the stand-in for a quantised rollout engine.

Rounded are the matrices of linear layers: 2-D tensors named `*.weight`, except embeddings (a name with "embed", or GPT-2's wte and wpe) and
the output head (`lm_head.weight`), which quantised engines keep in full precision. Norms and biases are 1-D and stay as they are.

Scale rule, for each row w of a matrix [out, in]:  s = max|w| / Q,  w' = s * round(w / s),  all in float32, then the tensor's dtype.
    fp8   Q = 448, round = nearest float8_e4m3fn          int8   Q = 127, round = nearest integer, ties to even
A row of zeros stays zero.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Rounding = Literal["none", "fp8", "int8"]
LARGEST = {"fp8": 448.0, "int8": 127.0}
KEPT = ("embed", "lm_head", "wte.", "wpe.")


def is_rounded(name: str, dimensions: int) -> bool:
    """Whether the tensor `name` is the matrix of a linear layer."""
    return dimensions == 2 and name.endswith(".weight") and not any(part in name for part in KEPT)


def round_matrix(matrix_OI: "torch.Tensor", how: Literal["fp8", "int8"]) -> "torch.Tensor":
    """`matrix_OI` [out, in] of any float dtype, rounded per row; same dtype and shape."""
    import torch

    exact_OI = matrix_OI.float()
    scale_O1 = exact_OI.abs().amax(dim=1, keepdim=True) / LARGEST[how]
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    steps_OI = exact_OI / scale_O1
    rounded_OI = steps_OI.to(torch.float8_e4m3fn).float() if how == "fp8" else steps_OI.round()
    return (rounded_OI * scale_O1).to(matrix_OI.dtype)


def round_file(file: Path, how: Literal["fp8", "int8"]) -> None:
    """Replace a safetensors file by its rounded form."""
    from safetensors.torch import load_file, save_file

    tensors = {name: round_matrix(tensor, how) if is_rounded(name, tensor.dim()) else tensor for name, tensor in load_file(file).items()}
    staged = file.with_suffix(".rounded")
    save_file(tensors, staged)
    staged.replace(file)
