"""The chunked head: the plain one's value and gradient, in less memory, and bits that come again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from learner import chunked_head, logprobs
from learner.chunked_head import chunk_rows, selected_log_probs
from learner.logprobs import PolicyModel, selected
from learner.model import load_policy, trainer_fingerprint
from learner.scoring import Row, passes_of, plan_passes, plans_of, run_pass
from tests.learner.test_scoring import make_rows
from tests.support.leases import make_engine, make_lease, tiny_config, update

VOCABULARY, HIDDEN, TOKENS = 61, 12, 23


@pytest.fixture(params=[1, 5, 23, 40], ids=lambda rows: f"{rows} rows")
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked_head, "LEAST_ROWS", request.param)
    return request.param


def inputs(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    head.weight.data = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    slope = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    return head, hidden, target, temperature, slope


def both(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(value, gradient of hidden, gradient of weight) of the plain and of the chunked head."""
    found = []
    for chunked in (False, True):
        head, hidden, target, temperature, slope = inputs(dtype)
        value = selected_log_probs(hidden, head.weight, target, temperature) if chunked else selected(head, hidden, target, temperature)
        value.backward(slope.to(value.dtype))
        assert hidden.grad is not None and head.weight.grad is not None
        found.append([value.detach(), hidden.grad, head.weight.grad])
    return found[0], found[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_value_and_gradient_are_those_of_the_plain_head(rows_per_chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    for plain, chunked in zip(*both(dtype), strict=True):
        assert chunked.dtype == plain.dtype
        assert float((chunked - plain).abs().max()) < tolerance


def test_in_bf16_log_probs_are_float32_and_gradients_agree_to_bf16s_precision(rows_per_chunk: int) -> None:
    for plain, chunked, dtype in zip(*both(torch.bfloat16), (torch.float32, torch.bfloat16, torch.bfloat16), strict=True):
        assert chunked.dtype == plain.dtype == dtype
        assert float((chunked.double() - plain.double()).norm()) < 0.01 * float(plain.double().norm())


def test_two_log_probs_by_hand() -> None:
    # logits (0, log 3) at temperature 1 and (0, 2 log 3) at 1/2: probabilities 3/4 and 1/10
    weight = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    hidden = torch.full((2, 1), 3.0, dtype=torch.float64).log().requires_grad_()
    value = selected_log_probs(hidden, weight, torch.tensor([1, 0]), torch.tensor([1.0, 0.5]))
    assert value.exp().tolist() == pytest.approx([0.75, 0.1])
    value.sum().backward()
    assert hidden.grad is not None and hidden.grad.flatten().tolist() == pytest.approx([1 - 0.75, 2 * (0 - 0.9)])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_argument_gets_no_gradient_and_the_other_the_same(frozen: str) -> None:
    whole = both(torch.float64)[1]
    head, hidden, target, temperature, slope = inputs(torch.float64)
    (hidden if frozen == "hidden" else head.weight).requires_grad_(False)
    selected_log_probs(hidden, head.weight, target, temperature).backward(slope)
    assert (hidden.grad is None, head.weight.grad is None) == (frozen == "hidden", frozen == "weight")
    other, expected = (head.weight.grad, whole[2]) if frozen == "hidden" else (hidden.grad, whole[1])
    assert other is not None and torch.equal(other, expected)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return found


@pytest.mark.parametrize("chunked", [False, True])
def test_the_table_of_all_logits_never_exists(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked_head, "LEAST_ROWS", 4)
    head, hidden, target, temperature, slope = inputs(torch.float64)
    with Largest() as largest:
        value = selected_log_probs(hidden, head.weight, target, temperature) if chunked else selected(head, hidden, target, temperature)
        value.backward(slope)
    assert largest.elements == (VOCABULARY * HIDDEN if chunked else TOKENS * VOCABULARY)


@pytest.mark.parametrize(("vocabulary", "rows"), [(4096, 4096), (49152, 341), (151936, 256)])
def test_rows_of_a_chunk_follow_from_the_vocabulary(vocabulary: int, rows: int) -> None:
    assert chunk_rows(vocabulary) == rows


def llama(vocabulary: int, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         tie_word_embeddings=tied, initializer_range=0.2)
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_gradients_are_those_of_the_plain_head_tied_or_not(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(logprobs, "CHUNKED_FROM", 40)
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked_head, "LEAST_ROWS", 4)
    ids = torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(1))
    gradients = []
    for partitioned in (True, False):
        policy = PolicyModel(llama(40, tied), partitioned=partitioned)
        assert policy.chunked == (not partitioned)
        value = policy(ids, torch.tensor([1.0, 0.7, 1.3]), torch.arange(3 * 7))
        (value * torch.linspace(-1, 1, 21)).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.model.named_parameters()})
    assert ("lm_head.weight" in gradients[0]) == (not tied)
    for name, plain in gradients[0].items():
        assert float((gradients[1][name] - plain).abs().max()) < 1e-10
        assert float(plain.abs().max()) > 1e-3


def test_small_vocabularies_partitioned_weights_and_biased_heads_stay_plain() -> None:
    assert PolicyModel(llama(4096, False)).head == "chunked, 4096 rows"
    assert PolicyModel(llama(4095, False)).head == "plain"
    assert PolicyModel(llama(4096, False), partitioned=True).head == "plain"
    biased = llama(4096, False)
    biased.lm_head = nn.Linear(16, 4096)
    assert PolicyModel(biased).head == "plain"


def test_the_fingerprint_tells_the_heads_apart(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "model")
    plain, chunked = PolicyModel(llama(4096, False), partitioned=True), PolicyModel(llama(4096, False))
    assert '"head": "plain"' in trainer_fingerprint(config, plain)
    assert trainer_fingerprint(config, chunked) != trainer_fingerprint(config, plain)


def test_the_same_plan_gives_the_same_bits_and_training_those_of_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNKED_FROM", 1)
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked_head, "LEAST_ROWS", 13)
    config = tiny_config(tmp_path / "model")
    policy = load_policy(config.model.path, "float32", "sdpa")
    assert policy.chunked
    rows: list[Row] = make_rows(11)
    passes = plan_passes([len(row.ids) for row in rows], 4, 8)
    plans = plans_of(passes)

    def score(wanted: list[int], gradient: bool) -> list[bytes]:
        found = {}
        with torch.set_grad_enabled(gradient):
            for one in passes_of([plans[i] for i in wanted]):
                found |= run_pass(lambda *args: policy(*args).detach(), one, [rows[i] for i in wanted], "cpu")
        return [found[i].tobytes() for i in range(len(wanted))]

    first = score(list(range(11)), False)
    assert score(list(range(11)), True) == first
    for chosen in ([3], [10, 0, 7]):
        assert score(chosen, False) == [first[i] for i in chosen]


@pytest.mark.deepspeed
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_an_update_through_deepspeed_is_that_of_the_plain_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str,
                                                               tolerance: float) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked_head, "LEAST_ROWS", 7)
    tiny_config(tmp_path / "model")
    config = tiny_config(tmp_path / "model", model={"path": str(tmp_path / "model"), "dtype": dtype})
    found = []
    for least in (10**6, 1):
        monkeypatch.setattr(logprobs, "CHUNKED_FROM", least)
        engine = make_engine(config)
        assert engine.policy.chunked == (least == 1)
        outcome = update(engine, config, make_lease(config))
        found.append((outcome, torch.cat([tensor.float().flatten() for tensor in engine.full_state().values()])))
    (plain, plain_weights), (chunked, chunked_weights) = found
    for key in ("loss", "grad_norm"):
        assert chunked.metrics[key] == pytest.approx(plain.metrics[key], rel=tolerance)
    assert float((chunked_weights - plain_weights).norm()) < tolerance * float(plain_weights.norm())
