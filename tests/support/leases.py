"""Leases for the learner's tests: a tiny model's own responses, made up deterministically, with or without old log-probs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.load import validate
from configs.schema import Config
from learner.batch import Anchor, LeaseRows
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.model import load_policy, set_determinism
from learner.prepare import ScoreLive
from learner.ranks import join
from learner.scoring import plan_passes, run_pass
from learner.update import Outcome, run_update
from tests.support.tiny_model import VOCAB, make_tiny_model
from wire.record import RolloutHead, Sampling, Scored, Span, pack_payload, unpack_payload

TABLES: dict[str, dict[str, Any]] = {
    "task": {"train": "unused.jsonl"}, "sampling": {"n": 4, "max_new_tokens": 6, "temperature": 0.8},
    "replay": {"max_staleness": 2},
    "learner": {"groups_per_update": 4, "updates": 8, "lr": 1e-2, "micro_batch_rows": 8, "score_rows": 8, "length_bucket": 4},
    "recipe": {"estimator": "dr_grpo", "aggregation": "token_mean"}}


def tiny_config(folder: Path, **tables: dict[str, Any]) -> Config:
    """A config for a model of 2 layers and 32 channels in `folder`, made there if it is not."""
    if not (folder / "config.json").exists():
        make_tiny_model(folder, hidden=32, layers=2)
    tree: dict[str, Any] = {"model": {"path": str(folder)}, **TABLES}
    return validate({**tree, **{table: {**tree.get(table, {}), **values} for table, values in tables.items()}})


def make_engine(config: Config) -> TrainEngine:
    set_determinism(config.run.seed, "cpu")
    model = config.model
    policy = load_policy(model.path, model.dtype, model.attention, partitioned=config.learner.zero_stage == 3)
    return TrainEngine(policy, config, join(config))


def make_lease(config: Config, *, seed: int = 0, version_in: int = 0, versions: Sequence[int] = (0,), rewards: list[float] | None = None,
               anchored: bool = True) -> LeaseRows:
    """`groups_per_update` groups of n random responses. Row i was sampled under versions[i % len]; mu and old are random and alike.
    Rewards default to a pattern that differs within every group. With sampling.top_logprobs = k the sampled token is the first of k."""
    rng = np.random.default_rng(seed)
    top = config.sampling.top_logprobs
    sampling = Sampling(config.sampling.temperature, config.sampling.max_new_tokens, top_logprobs=top)
    heads, payloads, anchors, group_ids = [], [], {}, []
    for group in range(config.learner.groups_per_update):
        prompt = rng.integers(3, VOCAB, 3 + group)
        group_ids.append(f"o{group}.0")
        for sample in range(config.sampling.n):
            row, length = len(heads), int(rng.integers(2, 7))
            rollout_id, version = f"o{group}.0.{sample}", versions[len(heads) % len(versions)]
            reward = float(sample % 2) if rewards is None else rewards[row]
            old = (-np.abs(rng.normal(3.5, 0.8, length))).astype(np.float32)
            mu = np.minimum(old + rng.normal(0, 0.05, length), 0).astype(np.float32)
            heads.append(RolloutHead(rollout_id, f"o{group}", 0, sample, len(prompt), length, (Span(version, 0, length),), "stop", sampling,
                                     "f", Scored(reward)))
            ids = rng.integers(3, VOCAB, length)
            top_ids = (ids[:, None] + np.arange(top)) % VOCAB if top else None
            top_mu = np.concatenate([mu[:, None], np.full((length, top - 1), -4.0)], 1) if top else None
            payloads.append(unpack_payload(heads[-1], pack_payload(prompt, ids, mu, top_ids, top_mu)))
            if anchored:
                anchors[rollout_id, 0] = Anchor("resident", old)
    lease = LeaseRows(1, version_in, group_ids, heads, payloads, anchors)
    if config.recipe.estimator == "remax":
        give_baselines(lease, config, [float(group % 2) for group in range(len(group_ids))])
    return lease


def give_baselines(lease: LeaseRows, config: Config, rewards: Sequence[float]) -> None:
    """A greedy response of 3 tokens for each group, with these rewards."""
    greedy, n = Sampling(0.0, config.sampling.max_new_tokens), config.sampling.n
    lease.baselines = [RolloutHead(f"{group_id}.{n}", group_id.rpartition(".")[0], 0, n, 3, 3, (Span(lease.version_in, 0, 3),), "stop",
                                   greedy, "f", Scored(reward)) for group_id, reward in zip(lease.group_ids, rewards, strict=True)]


def score_rows_plainly(engine: TrainEngine, lease: LeaseRows) -> list[np.ndarray]:
    """Log-probs of each response under the live weights, row by row, straight from transformers' own logits in float64."""
    found = []
    for head, payload in zip(lease.heads, lease.payloads, strict=True):
        ids = torch.from_numpy(np.concatenate([payload.prompt_ids, payload.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = engine.policy.model(ids[None]).logits[0].double() / head.sampling.temperature
        values = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        found.append(values[head.prompt_len - 1 :].numpy())
    return found


def live_scorer(engine: TrainEngine) -> ScoreLive:
    def score(rows: list[Any]) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for one in plan_passes([len(row.ids) for row in rows], 8, 4):
            found |= run_pass(engine.score, one, rows, "cpu")
        return [found[i] for i in range(len(rows))]

    return score


def anchored_by(engine: TrainEngine, lease: LeaseRows) -> LeaseRows:
    """The lease with the live weights' log-probs as `old`, so that ratios begin at 1."""
    for head, values in zip(lease.heads, score_rows_plainly(engine, lease), strict=True):
        lease.anchors[head.rollout_id, 0] = Anchor("resident", values.astype(np.float32))
    return lease


def update(engine: TrainEngine, config: Config, lease: LeaseRows) -> Outcome:
    return run_update(engine, engine.ranks, config, lease, live_scorer(engine))


def column(outcome: Outcome, name: str) -> np.ndarray:
    kind, data = next((kind, data) for column, kind, data in outcome.columns if column == name)
    return np.frombuffer(data, {"f4": "<f4", "u1": "u1"}[kind])


def state_hash(engine: TrainEngine) -> str:
    """Parameters, the optimizer's state and the scheduler's."""
    parts = [digest_state(engine.full_state()), str(engine.scheduler.state_dict()), str(engine.optimizer.param_groups[0]["lr"])]
    for state in engine.optimizer.state.values():
        parts += [hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in state.values()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
