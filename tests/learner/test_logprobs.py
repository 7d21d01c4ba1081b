"""Which position predicts which token, and what the log-prob is."""


import pytest
import torch

from learner import logprobs
from learner.logprobs import PolicyModel, predicting_positions
from learner.model import load_policy
from tests.support.tiny_model import VOCAB, make_tiny_model

PROMPTS, RESPONSES, WIDTH = torch.tensor([2, 4, 1]), torch.tensor([3, 1, 2]), 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load_policy(str(make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2)), "float32", "sdpa")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(0))


def test_positions_are_one_before_their_token() -> None:
    # rows of 5 predicting positions: row 0 predicts tokens 2, 3, 4 from 1, 2, 3; row 1 token 4 from 3; row 2 tokens 1, 2 from 0, 1
    assert predicting_positions(PROMPTS, RESPONSES, WIDTH).tolist() == [1, 2, 3, 5 + 3, 10, 11]


@pytest.mark.parametrize(("prompts", "responses"), [([0, 2], [1, 1]), ([3, 3], [1, 4])])
def test_a_row_that_cannot_be_is_refused(prompts: list[int], responses: list[int]) -> None:
    with pytest.raises(ValueError, match="empty prompt or is longer"):
        predicting_positions(torch.tensor(prompts), torch.tensor(responses), WIDTH)


def test_log_probs_are_those_of_transformers(policy: PolicyModel, ids: torch.Tensor) -> None:
    temperature = torch.tensor([1.0, 0.5, 2.0])
    with torch.no_grad():
        ours = policy(ids, temperature, predicting_positions(PROMPTS, RESPONSES, WIDTH))
        reference = []
        for row, (prompt, response) in enumerate(zip(PROMPTS.tolist(), RESPONSES.tolist(), strict=True)):
            logits = policy.model(ids[row : row + 1, : prompt + response]).logits[0].double() / float(temperature[row])
            for token in range(prompt, prompt + response):
                reference.append(float(logits[token - 1].log_softmax(-1)[ids[row, token]]))
    assert ours.dtype == torch.float32
    assert ours.tolist() == pytest.approx(reference, abs=2e-6)


@pytest.mark.parametrize(("row", "token", "moved"), [(0, 4, 2), (1, 4, 3), (2, 2, 5)])
def test_changing_the_last_token_of_one_response_moves_exactly_one_ratio(policy: PolicyModel, ids: torch.Tensor, row: int, token: int,
                                                                         moved: int) -> None:
    positions, temperature = predicting_positions(PROMPTS, RESPONSES, WIDTH), torch.ones(3)
    other = ids.clone()
    other[row, token] = (ids[row, token] - 3 + 1) % (VOCAB - 3) + 3
    with torch.no_grad():
        ratio = (policy(other, temperature, positions) - policy(ids, temperature, positions)).exp()
    assert (ratio != 1).nonzero().flatten().tolist() == [moved]


def test_the_head_in_chunks_gives_the_same_values_and_gradients(policy: PolicyModel, ids: torch.Tensor,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    positions, temperature = predicting_positions(PROMPTS, RESPONSES, WIDTH), torch.ones(3)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        policy.zero_grad()
        values = policy(ids, temperature, positions)
        values.sum().backward()
        return values.detach(), policy.model.lm_head.weight.grad.clone()

    whole = run()
    monkeypatch.setattr(logprobs, "PLAIN_LOGITS", 2 * VOCAB)
    parts = run()
    assert torch.allclose(whole[0], parts[0], atol=1e-6)
    assert torch.allclose(whole[1], parts[1], atol=1e-6)
