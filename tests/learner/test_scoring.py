"""Fixed shapes, recorded places, and bits that come again."""


import numpy as np
import pytest
import torch

from learner.logprobs import PolicyModel
from learner.model import load_policy
from learner.scoring import Pass, Row, passes_of, plan_passes, plans_of, run_pass
from tests.support.tiny_model import VOCAB, make_tiny_model
from wire.record import ScoringPlan


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load_policy(str(make_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=2)), "float32", "sdpa")


def score(policy: PolicyModel, passes: list[Pass], rows: list[Row]) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    with torch.no_grad():
        for one in passes:
            found |= run_pass(policy, one, rows, "cpu")
    return found


def make_rows(count: int, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [Row(rng.integers(0, VOCAB, int(rng.integers(5, 14))).astype(np.int32), int(rng.integers(1, 5)), float(rng.uniform(0.5, 1.5)))
            for _ in range(count)]


def test_passes_have_one_shape_each_and_longest_rows_come_first() -> None:
    passes = plan_passes([3, 9, 5, 8, 4], 2, 4)
    assert passes == [Pass(12, (1, 3)), Pass(8, (2, 4)), Pass(4, (0, None))]
    assert plans_of(passes)[0] == ScoringPlan(2, 4, 0)
    assert plans_of(passes)[3] == ScoringPlan(2, 12, 1)
    assert plan_passes([], 2, 4) == []


def test_values_are_those_of_the_response_tokens(policy: PolicyModel) -> None:
    rows = make_rows(5)
    found = score(policy, plan_passes([len(row.ids) for row in rows], 4, 8), rows)
    for index, row in enumerate(rows):
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0].double() / row.temperature
        wanted = logits.log_softmax(-1)[torch.arange(len(row.ids) - 1), torch.from_numpy(row.ids[1:].astype(np.int64))].numpy()
        assert found[index].dtype == np.float32
        assert found[index] == pytest.approx(wanted[row.prompt_len - 1 :], abs=2e-6)


def test_the_same_plan_gives_the_same_bits_whatever_the_other_rows_hold(policy: PolicyModel) -> None:
    rows = make_rows(20)
    passes = plan_passes([len(row.ids) for row in rows], 8, 4)
    first, plans = score(policy, passes, rows), plans_of(passes)
    for chosen in ([3], [0, 7, 19], list(range(20))):
        again = score(policy, passes_of([plans[i] for i in chosen]), [rows[i] for i in chosen])
        for place, index in enumerate(chosen):
            assert again[place].tobytes() == first[index].tobytes()
    neighbours = make_rows(20, seed=1)  # other rows, the same place
    mixed = [rows[3], *neighbours]
    one = Pass(plans[3].width, tuple(0 if place == plans[3].row else None if len(row.ids) > plans[3].width else place + 1
                                     for place, row in zip(range(8), neighbours, strict=False)))
    assert score(policy, [one], mixed)[0].tobytes() == first[3].tobytes()


def test_rescoring_shares_a_pass_only_where_places_are_free() -> None:
    a, b = ScoringPlan(4, 8, 2), ScoringPlan(4, 16, 2)
    assert passes_of([a, ScoringPlan(4, 8, 0), a, b]) == [
        Pass(8, (1, None, 0, None)), Pass(8, (None, None, 2, None)), Pass(16, (None, None, 3, None))]
    with pytest.raises(ValueError, match="no such row"):
        passes_of([ScoringPlan(4, 8, 4)])
