"""The demo's model and data: a tokenizer that loads, disjoint problems, the same bits from one seed, a cache that knows its settings."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.schema import ColdStart
from learner import coldstart
from learner.coldstart import Problem, encode, expected_accuracy, make, make_model, make_tokenizer, split
from wire.errors import ConfigError, RunError

SETTINGS = {"steps": 20, "batch": 16, "hidden_size": 32, "layers": 1, "supervised": 500, "target": 0.01, "heldout": 64}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldstart, "TOLERATED", 1.0)


def test_problems_are_disjoint_and_seeded() -> None:
    heldout, supervised, rl = split(ColdStart(out="unused"))
    assert (len(heldout), len(supervised), len(rl)) == (512, 2000, 5588)
    assert len({problem.prompt for problem in heldout + supervised + rl}) == 8100
    assert all(problem.answer == str(sum(map(int, problem.prompt[:-1].split("+")))) for problem in heldout + supervised + rl)
    assert split(ColdStart(out="unused")) == (heldout, supervised, rl)
    assert split(ColdStart(out="unused", seed=1))[0] != heldout
    with pytest.raises(ConfigError, match="leaves none of the 8100 problems"):
        split(ColdStart(out="unused", supervised=8000))


def test_answers_end_with_the_end_token_and_only_they_count() -> None:
    ids, mask = encode(make_tokenizer(), [Problem("12+34=", "46"), Problem("99+99=", "198")])
    assert ids.tolist() == [[3, 4, 12, 5, 6, 13, 6, 8, 1, 0], [11, 11, 12, 11, 11, 13, 3, 11, 10, 1]]
    assert mask.int().tolist() == [[0] * 6 + [1, 1, 1, 0], [0] * 6 + [1, 1, 1, 1]]


def test_expected_accuracy_is_the_probability_of_the_answer() -> None:
    tokenizer = make_tokenizer()
    model = make_model(ColdStart(out="unused", hidden_size=32, layers=1), tokenizer)
    problems = [Problem("12+34=", "46"), Problem("99+99=", "198")]
    total = 0.0
    for problem in problems:
        ids = torch.tensor([[*tokenizer.encode(problem.prompt + problem.answer), 1]])
        with torch.no_grad():
            values = model(ids).logits[0].double().log_softmax(-1)
        total += float(sum(values[place - 1, ids[0, place]] for place in range(6, ids.shape[1])).exp())
    assert expected_accuracy(model, *encode(tokenizer, problems))[0] == pytest.approx(total / 2, rel=1e-5)


def test_what_it_leaves_loads_and_is_the_same_every_time(tmp_path: Path) -> None:
    first = make(ColdStart(out=str(tmp_path / "a"), **SETTINGS), say=False)
    again = make(ColdStart(out=str(tmp_path / "b"), **SETTINGS), say=False)
    assert sorted(path.name for path in first.iterdir()) == ["heldout.jsonl", "manifest.json", "model", "train.jsonl"]
    for name in ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    row = json.loads((first / "heldout.jsonl").read_text().splitlines()[0])
    assert sorted(row) == ["answer", "prompt"]
    tokenizer = AutoTokenizer.from_pretrained(first / "model")
    assert tokenizer.encode("12+34=") == [3, 4, 12, 5, 6, 13]
    assert tokenizer.decode([6, 8, 1], skip_special_tokens=True) == "46"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert AutoModelForCausalLM.from_pretrained(first / "model").config.eos_token_id == 1


def test_it_is_made_once_for_the_same_settings(tmp_path: Path) -> None:
    folder = make(ColdStart(out=str(tmp_path / "a"), **SETTINGS), say=False)
    before = (folder / "model/model.safetensors").stat().st_mtime_ns
    make(ColdStart(out=str(tmp_path / "a"), **SETTINGS), say=False)
    assert (folder / "model/model.safetensors").stat().st_mtime_ns == before
    make(ColdStart(out=str(tmp_path / "a"), **{**SETTINGS, "steps": 25}), say=False)
    assert (folder / "model/model.safetensors").stat().st_mtime_ns != before


def test_a_model_that_hardly_learns_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldstart, "TOLERATED", 0.1)
    with pytest.raises(RunError, match="raise cold_start.steps"):
        make(ColdStart(out=str(tmp_path / "a"), **{**SETTINGS, "target": 0.5}), say=False)
    assert not (tmp_path / "a").exists()
