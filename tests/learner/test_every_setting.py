"""Every setting of [recipe], changed alone where something reads it, changes an advantage, a weight, a mask, the loss or its gradient.

No engine: what a model would say (a reference, a running average, draws of SIS) is made up, differently for each.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from configs.recipe_table import Recipe
from configs.schema import Config
from correction.sis import counter_uniform, sis_accept
from learner import prepare as preparing
from learner.batch import Anchor, LeaseRows, tabulate
from learner.loss import count_mask, divisors, loss_measures, micro_loss, regularisers
from learner.prepare import prepare, scored_prox, sis_accepted
from learner.rewards import shaped_rewards
from learner.update import remember
from tests.support.leases import TABLES, make_lease, tiny_config
from wire.record import Span

Tables = dict[str, dict[str, Any]]
STEPS: Tables = {"learner": {"steps_per_update": 2}}
REFERENCE: Tables = {"learner": {"reference": "initial"}}
TOP: Tables = {"sampling": {**TABLES["sampling"], "top_logprobs": 4}}
KL, FDIV = {"kl": 0.5}, {"objective": "fdiv", "divergence": "kl", "topology": "binary", "delta": 5e-4}
MINIRL = {"objective": "minirl", "aggregation": "constant"}
PROX = {"base": "prox", "staleness": "decoupled"}

# key, the recipe beside it, the value that it gets in place of its default, other tables
CASES: list[tuple[str, dict[str, Any], Any, Tables]] = [
    ("overlong", {}, 0.5, {}), ("overlong_limit", {"overlong": 0.5}, 4, {}), ("mask_truncated", {}, True, {}),
    ("estimator", {}, "grpo", {}), ("estimator", {}, "rloo", {}), ("estimator", {}, "reinforce_pp", {}),
    ("ema_decay", {"estimator": "reinforce_pp_ema"}, 0.5, {}), ("zcpo_beta", {"estimator": "zcpo"}, 1.0, REFERENCE),
    *(("objective", {}, name, {}) for name in ("score", "unit", "gppo", "gspo", "cispo", "ripo", "tapo")),
    ("base", {}, "prox", STEPS), ("clip_low", {}, 0.1, {}), ("clip_high", {}, 0.1, {}), ("dual_clip", {}, 1.05, {}),
    ("dual_clip", {"objective": "gppo"}, 1.05, {}), ("cap", {"objective": "cispo"}, 1.05, {}), ("cap", MINIRL, 1.05, {}),
    ("clip_low", MINIRL, 0.1, {}), ("clip_high", MINIRL, 0.1, {}), ("clip_low", {"objective": "tapo"}, 0.1, {}),
    ("delta", {"objective": "ripo"}, 1e-4, {}), ("delta", FDIV, 1e-4, {}), ("divergence", FDIV, "chi2", {}), ("topology", FDIV, "mc", {}),
    ("ratio_bound", {"objective": "ripo", "delta": 1.0}, 1.01, {}), ("ratio_bound", {**FDIV, "delta": 1.0}, 1.01, {}),
    ("position_decay", {"objective": "tapo"}, 2.0, {}), ("position_floor", {"objective": "tapo", "position_decay": 2.0}, 0.19, {}),
    ("engine", {}, "tis", {}), ("engine", {}, "icepop", {}), ("engine", {}, "kpop", {}),
    ("engine_level", {"engine": "tis"}, "sequence", {}), ("engine_level", {"engine": "tis"}, "geometric", {}),
    ("engine_cap", {"engine": "tis"}, 1.1, {}), ("engine_low", {"engine": "icepop"}, 0.9, {}),
    ("engine_high", {"engine": "icepop"}, 1.1, {}),
    ("kpop_threshold", {"engine": "kpop"}, 1e-3, {}), ("kpop_carry", {"engine": "kpop"}, "one", {}),
    *(("filter", {"filter_low": 0.9, "filter_high": 1.2, "filter_threshold": 1.1}, name, {}) for name in ("sequence", "geometric", "carm")),
    ("filter", {}, "k3", {}), ("filter", {"filter_threshold": 0.8}, "veto", {}),
    ("filter_low", {"filter": "geometric", "filter_high": 2.0}, 0.8, {}), ("filter_high", {"filter": "geometric"}, 1.1, {}),
    ("filter_threshold", {"filter": "k3"}, 0.1, {}), ("filter_threshold", {"filter": "veto"}, 0.9, {}),
    ("staleness", PROX | {"staleness": "none"}, "decoupled", STEPS), ("staleness", {}, "m2_mask", {}), ("staleness", {}, "m2_range", {}),
    ("staleness", {"opsm_threshold": 0.01}, "opsm", {}), ("staleness", {}, "sis", TOP),
    ("staleness_cap", PROX, 1.1, STEPS), ("staleness_mode", {**PROX, "staleness_cap": 1.1}, "mask", STEPS),
    ("m2_budget", {"staleness": "m2_mask"}, 1e-3, {}),
    ("m2_budget", {"staleness": "m2_range", "m2_floor_low": 0.01, "m2_floor_high": 0.01}, 1e-3, {}),
    ("m2_floor_low", {"staleness": "m2_range", "m2_budget": 1e-4}, 0.05, {}),
    ("m2_floor_high", {"staleness": "m2_range", "m2_budget": 1e-4}, 0.05, {}), ("opsm_threshold", {"staleness": "opsm"}, 0.01, {}),
    ("prox", {"base": "prox"}, "ewma", STEPS), ("group_mass_cap", {"objective": "score"}, 1.0, {}),
    ("kl", {}, 0.5, REFERENCE), ("kl_estimator", KL, "k2", REFERENCE), ("kl_estimator", KL, "full", REFERENCE),
    ("kl_in", KL, "reward", REFERENCE), ("kl_mask", {**KL, "engine": "icepop", "engine_low": 0.9}, "kept", REFERENCE),
    ("kl_weight", KL, "total", REFERENCE), ("entropy", {}, 0.1, {}),
    *(("aggregation", {}, name, {}) for name in ("sequence_mean", "constant", "length_weighted")),
    ("constant", {"aggregation": "constant"}, 3, {}), ("denominator", {"engine": "icepop", "engine_low": 0.9}, "kept", {}),
]
ELSEWHERE = {"name": "a label", "dynamic_sampling": "replay's, in tests/replay/test_dynamic_sampling.py", "ewma_window": "below",
             "ewma_reset": "below"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def noise(shape: Any, seed: int, scale: float = 0.25) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def column(lease: LeaseRows, seed: int) -> Tensor:
    """[R, T]: log-probs like `old`, each moved by a quarter or so."""
    table = tabulate(lease)
    return torch.where(table.mask_RT, (table.old_RT + torch.from_numpy(noise(table.old_RT.shape, seed))).clamp(max=0), 0.0)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "reference_column", lambda engine, config, lease, table: column(lease, 1))
    monkeypatch.setattr(preparing, "whole_kl", lambda engine, config, lease, table: column(lease, 2).abs() / 10)
    monkeypatch.setattr(preparing, "averaged_prox", lambda engine, lease, table, score: column(lease, 3))
    monkeypatch.setattr(preparing, "sis_accepted", lambda engine, config, lease, table: (column(lease, 4) > -3.5) & table.mask_RT)


def noisy_lease(config: Config) -> LeaseRows:
    """Of versions 1 and 2, the engine far from the trainer, a response cut off."""
    lease = make_lease(config, version_in=2, versions=[1, 1, 2])
    for index, payload in enumerate(lease.payloads):
        mu = np.minimum(payload.mu + noise(payload.mu.shape, 100 + index), 0)
        lease.payloads[index] = payload._replace(mu=mu)
    lease.heads[1] = msgspec.structs.replace(lease.heads[1], finish_reason="length")
    return lease


def outcome(config: Config) -> dict[str, Tensor]:
    lease = noisy_lease(config)
    engine: Any = SimpleNamespace(memory=SimpleNamespace(reward_moment=0.3))
    stale = [row for row, head in enumerate(lease.heads) if head.spans[0].version < 2]
    now = column(lease, 5)

    def score(rows: list[Any]) -> list[np.ndarray]:
        assert len(rows) == len(stale)
        return [now[row, : lease.heads[row].response_len].numpy() for row in stale]

    ready, rows = prepare(lease, config, score, engine), list(range(16))
    cur, whole = column(lease, 6).requires_grad_(), torch.stack([column(lease, seed).abs() for seed in (7, 8, 9)])
    by = divisors(config.recipe, ready, rows)
    loss = micro_loss(config, ready, rows, cur, count_mask(config.recipe, ready), by.loss)
    loss = loss + regularisers(config, ready, rows, cur, whole, by)
    (slope,) = torch.autograd.grad(loss, cur)
    return {"advantage": ready.advantage_R, "weight": ready.correction.weight_RT, "keep": ready.correction.keep_RT, "loss": loss.detach(),
            "slope": slope}


@pytest.mark.parametrize(("key", "beside", "value", "tables"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_changed_alone_changes_the_update(folder: Path, key: str, beside: dict[str, Any], value: Any, tables: Tables) -> None:
    def made(**recipe: Any) -> dict[str, Tensor]:
        found = outcome(tiny_config(folder, recipe={**beside, **recipe}, **tables))
        assert all(bool(one.isfinite().all()) for one in found.values())
        return found

    before, after = made(), made(**{key: value})
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_every_setting_is_here() -> None:
    assert {key for key, *_ in CASES} | set(ELSEWHERE) == set(Recipe.model_fields)
    assert not {key for key, *_ in CASES} & set(ELSEWHERE)


@pytest.mark.parametrize(("recipe", "active", "expected"), [
    ({}, 1.0, 2 / 4), ({"ewma_window": 6}, 1.0, 6 / 8), ({"ewma_window": 1}, 0.9, 1 / 3), ({}, 0.89, None),
    ({"ewma_reset": 0.5}, 0.89, 2 / 4), ({"ewma_reset": 0.5}, 0.49, None)], ids=str)
def test_the_window_and_the_reset_of_the_running_average(folder: Path, recipe: dict[str, Any], active: float,
                                                         expected: float | None) -> None:
    """By how much it decays (budget 2), or that it begins anew."""
    config = tiny_config(folder, recipe={"prox": "ewma", "base": "prox", **recipe})
    done: list[float | None] = []
    memory = SimpleNamespace(follow=lambda state, beta: done.append(beta), restart_anchor=lambda state: done.append(None))
    engine: Any = SimpleNamespace(memory=memory, full_state=dict)
    ready: Any = SimpleNamespace(moment=0.25)
    metrics: dict[str, Any] = {"active": active}
    remember(engine, config, ready, metrics)
    assert done == [expected if expected is None else pytest.approx(expected)]
    assert metrics["prox_reset"] == (expected is None)
    assert memory.reward_moment == 0.25


def test_a_choice_of_the_engine_corrector_reaches_its_function(folder: Path) -> None:
    """Against plain loops over the tokens of each response."""
    for recipe in ({"engine": "tis", "engine_level": "sequence", "engine_cap": 1.2}, {"engine": "tis", "engine_level": "geometric"},
                   {"engine": "kpop", "kpop_threshold": 0.5, "kpop_carry": "one"}, {"engine": "kpop", "kpop_threshold": 0.5}):
        config = tiny_config(folder, recipe=recipe)
        lease = noisy_lease(config)
        ready = prepare(lease, config, lambda rows: [])
        for row, head in enumerate(lease.heads):
            gaps = [float(o - m) for o, m in zip(lease.anchors[head.rollout_id, 0].values, lease.payloads[row].mu, strict=True)]
            if recipe["engine"] == "tis":
                total = sum(gaps) if recipe["engine_level"] == "sequence" else sum(gaps) / len(gaps)
                expected = [min(math.exp(total), config.recipe.engine_cap)] * len(gaps)
            else:
                expected = [1.0 if "kpop_carry" in recipe else math.exp(gap) for gap in gaps]
            assert ready.correction.weight_RT[row, : len(gaps)].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_weighted_kl_has_the_gradient_of_k3_times_a_frozen_weight(folder: Path) -> None:
    """w = cur/mu as a number: with a live w the gradient would hold k3 grad w as well."""
    config = tiny_config(folder, recipe={"kl": 0.7, "kl_weight": "total"}, **REFERENCE)
    lease = noisy_lease(config)
    engine: Any = SimpleNamespace(memory=SimpleNamespace(reward_moment=None))
    ready, rows = prepare(lease, config, lambda rows: [], engine), list(range(16))
    cur, mask = column(lease, 6).requires_grad_(), ready.table.mask_RT
    loss = regularisers(config, ready, rows, cur, None, divisors(config.recipe, ready, rows))
    (slope,) = torch.autograd.grad(loss, cur)
    assert ready.ref_RT is not None
    found, tokens = slope[mask].tolist(), int(mask.sum())
    columns = (column_RT[mask].tolist() for column_RT in (cur.detach(), ready.ref_RT, ready.table.mu_RT))
    expected = [0.7 / tokens * math.exp(c - m) * (1 - math.exp(r - c)) for c, r, m in zip(*columns, strict=True)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_reference_without_a_coefficient_measures_the_kl(folder: Path) -> None:
    """So the column is not scored for nothing, and the config takes it."""
    config = tiny_config(folder, recipe={"kl_estimator": "k2"}, **REFERENCE)
    lease = noisy_lease(config)
    engine: Any = SimpleNamespace(memory=SimpleNamespace(reward_moment=None))
    ready, cur = prepare(lease, config, lambda rows: [], engine), column(lease, 6)
    assert ready.ref_RT is not None
    found = loss_measures(config, ready, torch.ones_like(cur), cur, None)["kl"]
    assert found == pytest.approx(float(((ready.ref_RT - cur)[ready.table.mask_RT].square() / 2).mean()), rel=1e-5)
    assert found > 0.01


def test_tokens_of_the_version_the_update_begins_from_keep_old_though_their_row_is_scored(folder: Path) -> None:
    config = tiny_config(folder)
    lease = make_lease(config, version_in=2, versions=[2])
    row = next(index for index, head in enumerate(lease.heads) if head.response_len >= 4)
    head, old = lease.heads[row], lease.anchors[lease.heads[row].rollout_id, 0].values
    lease.heads[row] = msgspec.structs.replace(head, spans=(Span(1, 0, 2), Span(2, 2, head.response_len)))
    lease.anchors[head.rollout_id, 0], lease.anchors[head.rollout_id, 1] = Anchor("snapshot", old[:2]), Anchor("resident", old[2:])
    scored: list[Any] = []

    def score(rows: list[Any]) -> list[np.ndarray]:
        scored.extend(rows)
        return [np.full(head.response_len, -9.0, np.float32)]

    table = tabulate(lease)
    prox = scored_prox(lease, table, score)
    assert len(scored) == 1
    assert prox[row, : head.response_len].tolist() == [-9.0, -9.0, *old[2:].tolist()]
    others = [index for index in range(16) if index != row]
    assert torch.equal(prox[others], table.old_RT[others])


# ---------------------------------------------------------------- what is drawn
def test_the_draws_of_sis_are_those_of_the_run_and_of_the_update(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepted(seed: int, update: int) -> tuple[Tensor, Tensor]:
        config = tiny_config(folder, recipe={"staleness": "sis"}, run={"seed": seed}, **TOP)
        lease = noisy_lease(config)
        lease.update = update
        table = tabulate(lease)
        top_mu = torch.full((*table.response_RT.shape, 4), -torch.inf)
        top_mu[table.response_RT] = torch.from_numpy(np.concatenate([payload.top_logprobs for payload in lease.payloads]))
        now = (top_mu + torch.from_numpy(noise(top_mu.shape, 11, 1.0))).permute(2, 0, 1)
        monkeypatch.setattr(preparing, "lease_pass", lambda *arguments: now)
        engine: Any = SimpleNamespace(ranks=None)
        first = torch.zeros(table.response_RT.shape, dtype=torch.int64)  # the sampled token is the first of its top 4
        ids = torch.arange(4).expand(*table.response_RT.shape, 4)
        draws = counter_uniform(seed, update, torch.arange(16), table.response_RT.shape[1])
        expected = sis_accept(first, ids, now.permute(1, 2, 0), top_mu, table.mask_RT, uniform_RT=draws)
        return sis_accepted(engine, config, lease, table), expected

    found = {keys: accepted(*keys) for keys in ((5, 3), (5, 4), (6, 3), (0, 0))}
    for one, expected in found.values():
        assert torch.equal(one, expected)
    masks = [one for one, _ in found.values()]
    assert not any(torch.equal(one, other) for place, one in enumerate(masks) for other in masks[:place])



def test_shuffled_rewards_differ_from_update_to_update_and_from_run_to_run(folder: Path) -> None:
    def shuffled(seed: int, update: int) -> list[float]:
        config = tiny_config(folder, task={"shuffle_rewards": True}, run={"seed": seed})
        lease = make_lease(config, rewards=[float(row) for row in range(16)])
        lease.update = update
        return shaped_rewards(lease, config, tabulate(lease), None, None).tolist()

    orders = [shuffled(*keys) for keys in ((1, 1), (1, 2), (2, 1))]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert orders[0] == shuffled(1, 1)
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]
