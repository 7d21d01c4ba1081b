"""What every rank of `tests/learner/test_ranks.py` runs: `ranks_main.py MODEL OUT`. Rank 0 writes what it saw to OUT as JSON.

Each case trains one lease from the same weights; the first gradient is read from the optimizer's first moment.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from transformers import AutoModelForCausalLM

from learner import chunked_head, logprobs
from learner.batch import LeaseRows
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.publish import Publisher, read_version
from learner.ranks import Ranks
from tests.support.leases import TABLES, live_scorer, make_engine, make_lease, tiny_config, update
from wire.manifest import place_version, staged_path
from wire.process import end

CASES: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0}, "zero 2": {"zero_stage": 2}, "zero 3": {"zero_stage": 3},
    "micro-batches of 2": {"zero_stage": 0, "micro_batch_rows": 2}, "micro-batches of 2, zero 2": {"zero_stage": 2, "micro_batch_rows": 2},
    "micro-batches of 3, zero 3": {"zero_stage": 3, "micro_batch_rows": 3}, "wide": {"zero_stage": 0, "length_bucket": 32},
    "chunked head, zero 0": {"zero_stage": 0}, "chunked head, zero 2": {"zero_stage": 2}, "chunked head, zero 3": {"zero_stage": 3},
}

RECIPES: dict[str, dict[str, Any]] = {
    "draws, whole KL, entropy": {"staleness": "sis", "kl": 2.0, "kl_estimator": "full", "entropy": 0.1},
    "average, KL in the reward": {"base": "prox", "prox": "ewma", "ewma_reset": 0.0, "kl": 0.1, "kl_in": "reward"},
    "zcpo": {"estimator": "zcpo"},
}


def run_recipe(model: Path, recipe: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    """Three updates that read the reference, the average or the engine's top log-probs; what each came to."""
    config = tiny_config(model, learner={"micro_batch_rows": 2, "lr": 1e-3, "zero_stage": stage, "reference": "initial", "score_rows": 3},
                         recipe=recipe, sampling={**TABLES["sampling"], "top_logprobs": 4})
    engine, lease = make_engine(config), make_lease(config)
    outcomes = [update(engine, config, lease) for _ in range(3)]
    return [{"loss": outcome.steps[0]["loss"], "kl": outcome.metrics["kl"], "active": outcome.metrics["active"],
             "entropy": outcome.metrics.get("entropy", 0.0)} for outcome in outcomes]


def run_case(model: Path, out: Path, name: str, learner: dict[str, Any]) -> dict[str, Any]:
    config = tiny_config(model, learner={"micro_batch_rows": 16, "lr": 1e-3, **learner}, recipe={"engine": "tis", "clip_high": 0.3})
    logprobs.CHUNKED_FROM = 1 if "chunked" in name else 4096
    engine = make_engine(config)
    assert engine.policy.chunked == ("chunked" in name and engine.zero_stage < 3)
    lease = make_lease(config, rewards=[1.0, 0.0, 0.0, 1.0] * 3 + [0.0, 1.0, 0.0, 0.0])
    initial = digest_state(engine.full_state())
    first = update(engine, config, lease)
    gradient = [first_moment(engine, parameter) for parameter in engine.parameters.values()]
    scored = score_with(engine, lease)
    folder = out / name.replace(" ", "-")
    notice, state = Publisher(engine, folder, model, 48, 0).publish(1, 0, 1)
    if engine.ranks.is_first:
        place_version(folder, folder / staged_path(1, 1), 1)
    facts = {"loss": first.steps[0]["loss"], "grad_norm": first.steps[0]["grad_norm"], "initial": initial, "scored": scored,
             "gradient": torch.cat(gradient).tolist()}
    if engine.ranks.is_first:
        assert notice is not None
        stored = read_version(folder, 1)
        assert stored is not None
        assert stored[0] == notice.weights_digest == digest_state(state)
        loaded = dict(AutoModelForCausalLM.from_pretrained(folder / notice.path, dtype=torch.float32).named_parameters())
        assert all(torch.equal(loaded[key], value) for key, value in state.items())
        facts["weights"] = torch.cat([value.flatten() for value in state.values()]).tolist()
    facts["swap"] = swap(engine, lease, state)
    update(engine, config, lease)  # goes on after the swap
    return facts


def first_moment(engine: TrainEngine, parameter: torch.Tensor) -> torch.Tensor:
    """After one step: (1 - beta1) times the clipped gradient."""
    whole = safe_get_full_optimizer_state(parameter, "exp_avg") if engine.zero_stage else engine.optimizer.state[parameter]["exp_avg"]
    return whole.flatten()


def score_with(engine: TrainEngine, lease: LeaseRows) -> list[float]:
    return [float(values[0]) for values in live_scorer(engine)([lease.row(row) for row in range(4)])]


def swap(engine: TrainEngine, lease: LeaseRows, state: dict[str, torch.Tensor]) -> list[float]:
    """Log-probs under halved weights, held for a moment; the live ones are back afterwards."""
    before = digest_state(engine.full_state())
    with engine.holding({key: value / 2 for key, value in state.items()}):
        found = score_with(engine, lease)
    assert digest_state(engine.full_state()) == before
    return found


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    chunked_head.CHUNK_LOGITS, chunked_head.LEAST_ROWS = 0, 7
    facts: dict[str, Any] = {name: run_case(model, out, name, learner) for name, learner in CASES.items()}
    logprobs.CHUNKED_FROM = 4096
    facts["recipes"] = {f"{name}, zero {stage}": run_recipe(model, recipe, stage) for name, recipe in RECIPES.items() for stage in (0, 3)}
    if Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu").is_first:
        (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
    end(0)
