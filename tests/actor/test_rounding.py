import numpy as np
import torch
from safetensors.torch import load_file, save_file

from actor.rounding import is_rounded, round_file, round_matrix


def test_int8_rounds_each_row_to_multiples_of_its_own_step() -> None:
    matrix = torch.tensor([[127.0, -64.4, 0.5, 1.5], [1.27, 0.014, -0.006, 0.0]])
    rounded = round_matrix(matrix, "int8")
    np.testing.assert_allclose(rounded.numpy(), [[127.0, -64.0, 0.0, 2.0], [1.27, 0.01, -0.01, 0.0]], rtol=1e-6)  # .5 and 1.5: ties to even


def test_fp8_rounds_each_row_to_e4m3_at_a_scale_of_its_own() -> None:
    # Scale 1: the largest of the first row is 448. e4m3 has 3 bits of mantissa: 16, 18, 20 between 16 and 32; 2^-9 is its smallest step.
    matrix = torch.tensor([[448.0, 17.1, 18.9, 1.06, -1.07, 0.003], [44.8, 1.71, 1.89, 0.106, -0.107, 0.0003]])
    row = [448.0, 18.0, 18.0, 1.0, -1.125, 0.00390625]
    rounded = round_matrix(matrix, "fp8").numpy()
    np.testing.assert_allclose(rounded[0], row, rtol=0)
    np.testing.assert_allclose(rounded[1], np.array(row) / 10, rtol=1e-6)


def test_rows_of_zeros_stay_and_the_dtype_is_kept() -> None:
    matrix = torch.zeros(2, 3, dtype=torch.bfloat16)
    for how in ("fp8", "int8"):
        rounded = round_matrix(matrix, how)  # type: ignore[arg-type]
        assert rounded.dtype == torch.bfloat16
        assert not rounded.any()


def test_only_matrices_of_linear_layers_are_rounded() -> None:
    assert is_rounded("model.layers.0.self_attn.q_proj.weight", 2)
    for name, dimensions in (("model.embed_tokens.weight", 2), ("lm_head.weight", 2), ("transformer.wte.weight", 2),
                             ("model.norm.weight", 1), ("model.layers.0.self_attn.q_proj.bias", 1)):
        assert not is_rounded(name, dimensions), name


def test_a_file_is_replaced_by_its_rounded_form(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "model.safetensors"
    before = {"embed.weight": torch.tensor([[0.3, 127.0]]), "q.weight": torch.tensor([[0.3, 127.0]]), "norm.weight": torch.tensor([0.3])}
    save_file(before, file)
    round_file(file, "int8")
    after = load_file(file)
    assert torch.equal(after["q.weight"], torch.tensor([[0.0, 127.0]]))
    assert torch.equal(after["embed.weight"], before["embed.weight"])
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
