"""The loss and its gradient do not depend on how the batch was split or padded, nor on what masked slots hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Config
from correction.pipeline import correct
from correction.table import PolicyTable
from learner.batch import LeaseRows, Table, plan_steps, tabulate
from learner.loss import divisors, micro_loss, regularisers
from learner.objective import OBJECTIVES, denominator_of
from learner.prepare import Prepared, correction_choice, prepare
from tests.support.leases import make_lease, tiny_config

RECIPES = [
    {"objective": "ppo", "aggregation": "token_mean", "clip_low": 0.02, "clip_high": 0.03},
    {"objective": "ppo", "aggregation": "sequence_mean", "engine": "tis", "engine_cap": 1.02, "clip_low": 0.02, "clip_high": 0.03},
    {"objective": "ppo", "aggregation": "token_mean", "engine": "icepop", "engine_low": 0.95, "engine_high": 1.05, "denominator": "kept"},
    {"objective": "cispo", "aggregation": "constant", "constant": 6, "cap": 1.01, "estimator": "grpo"},
    {"objective": "score", "aggregation": "constant", "constant": 6, "group_mass_cap": 1.0, "estimator": "rloo"},
    {"objective": "unit", "engine": "icepop", "engine_low": 0.95, "engine_high": 1.05},
    {"objective": "luspo", "aggregation": "sequence_mean", "clip_low": 0.01, "clip_high": 0.01},
    {"objective": "gppo", "engine": "tis", "engine_cap": 1.02, "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.05},
    {"objective": "gspo", "aggregation": "sequence_mean", "engine": "icepop", "engine_low": 0.95, "engine_high": 1.05, "clip_low": 0.01,
     "clip_high": 0.01},
    {"objective": "ripo", "filter": "geometric", "filter_low": 0.99, "filter_high": 1.01},
    {"objective": "fdiv", "divergence": "tv", "delta": 1e-3, "filter": "veto", "filter_threshold": 0.9},
    {"objective": "tapo", "aggregation": "length_weighted", "clip_low": 0.02, "clip_high": 0.03},
    {"objective": "minirl", "aggregation": "length_weighted", "engine": "kpop", "kpop_threshold": 1e-4},
]


def test_every_objective_is_here() -> None:
    assert {recipe["objective"] for recipe in RECIPES} == set(OBJECTIVES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def is_float_table(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2


def in_float64(table: Table) -> Table:
    return Table(*(value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
                   for value in vars(table).values()))


def widen(table: Table, columns: int, junk: float = 0.0) -> Table:
    """The same with more columns, where nothing is."""
    def wide(value: Tensor) -> Tensor:
        if value.dim() == 1:
            return value
        fill = torch.full((len(value), columns), junk if value.is_floating_point() else 0).to(value.dtype)
        return torch.cat([value, fill], 1)

    return Table(*(wide(value) if isinstance(value, Tensor) else value for value in vars(table).values()))


def prepared(lease: LeaseRows, config: Config, table: Table) -> Prepared:
    """`prepare`, in the dtype of `table`."""
    advantage_R = prepare(lease, config, plain_score).advantage_R.to(table.mu_RT.dtype)
    prox_RT = table.old_RT - 0.01 if config.recipe.group_mass_cap else None
    policy = PolicyTable(table.mu_RT, table.old_RT, prox_RT, None, None, table.mask_RT, table.version_RT, table.group_R)
    return Prepared(table, advantage_R, prox_RT, correct(policy, correction_choice(config)))


def plain_score(rows: list[object]) -> list[np.ndarray]:
    assert not rows, "every token is of version_in: nothing has to be scored"
    return []


def total(config: Config, lease: LeaseRows, ready: Prepared, cur: Tensor, *, ranks: int, size: int) -> tuple[float, Tensor]:
    """Loss and gradient with respect to `cur`, as the sum over ranks and micro-batches."""
    cur = cur.clone().requires_grad_()
    (step,) = plan_steps(lease.lengths, lease.group_of, groups=4, steps=1, ranks=ranks, micro_batch_rows=size, bucket=4)
    count = ready.table.mask_RT if config.recipe.denominator == "original" else ready.correction.keep_RT
    denominator = denominator_of(count, mode=config.recipe.aggregation, constant=config.recipe.constant)
    losses = [micro_loss(config, ready, list(batch.rows), cur[list(batch.rows)], count, denominator)
              for mine in step for batch in mine if batch.rows]
    loss = torch.stack(losses).sum()
    loss.backward()
    assert cur.grad is not None
    return float(loss.detach()), cur.grad


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r['objective']}-{r.get('aggregation', 'token_mean')}")
def test_splits_and_paddings_change_nothing(folder: Path, recipe: dict[str, object]) -> None:
    config = tiny_config(folder, recipe=recipe)
    lease = make_lease(config)
    table = in_float64(tabulate(lease))
    noise = 0.05 * torch.randn(table.mu_RT.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cur = torch.where(table.mask_RT, table.old_RT + noise, 0.0).clamp(max=0)
    loss, gradient = total(config, lease, prepared(lease, config, table), cur, ranks=1, size=16)
    assert loss != 0
    for ranks, size, more in ((2, 16, 0), (1, 2, 0), (2, 2, 0), (1, 16, 7), (2, 2, 7)):
        wide = torch.nn.functional.pad(cur, (0, more))
        other, other_gradient = total(config, lease, prepared(lease, config, widen(table, more)), wide, ranks=ranks, size=size)
        assert other == pytest.approx(loss, rel=1e-10, abs=1e-14)
        assert torch.allclose(other_gradient[:, : cur.shape[1]], gradient, rtol=1e-10, atol=1e-14)
        assert not other_gradient[:, cur.shape[1] :].any()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r['objective']}-{r.get('aggregation', 'token_mean')}")
def test_nan_in_every_masked_slot_changes_no_bit(folder: Path, recipe: dict[str, object]) -> None:
    config = tiny_config(folder, recipe=recipe)
    lease = make_lease(config)
    clean = widen(tabulate(lease), 3)
    poison = {name: torch.where(clean.mask_RT, value, torch.nan) if is_float_table(value) else value
              for name, value in vars(clean).items()}
    cur = torch.where(clean.mask_RT, clean.old_RT - 0.03, 0.0)
    loss, gradient = total(config, lease, prepared(lease, config, clean), cur, ranks=1, size=8)
    bad_cur = torch.where(clean.mask_RT, cur, torch.nan)
    bad, bad_gradient = total(config, lease, prepared(lease, config, Table(**poison)), bad_cur, ranks=1, size=8)
    assert (loss, gradient.numpy().tobytes()) == (bad, bad_gradient.numpy().tobytes())


@pytest.mark.parametrize("recipe", [
    {"kl_estimator": "k3", "kl_weight": "total"}, {"kl_estimator": "full", "kl_mask": "kept"},
    {"kl_estimator": "k2", "aggregation": "constant"},
], ids=lambda r: r["kl_estimator"])
def test_kl_and_entropy_do_not_depend_on_splits_nor_on_masked_slots(folder: Path, recipe: dict[str, object]) -> None:
    engine = {"engine": "icepop", "engine_low": 0.95, "engine_high": 1.05}
    config = tiny_config(folder, recipe={"kl": 0.5, "entropy": 0.1, **engine, **recipe}, learner={"reference": "initial"})
    plain = tiny_config(folder, recipe=engine)  # without a reference, so that no model is needed to prepare
    lease = make_lease(config)
    ready = prepared(lease, plain, widen(in_float64(tabulate(lease)), 3))
    mask, make = ready.table.mask_RT, torch.Generator().manual_seed(1)
    cur = torch.where(mask, ready.table.old_RT - 0.03, 0.0)
    ref = torch.where(mask, cur - torch.rand(mask.shape, generator=make, dtype=torch.float64), 0.0)
    whole = torch.rand(3, *mask.shape, generator=make, dtype=torch.float64)

    def regularised(size: int, junk: float) -> tuple[float, bytes]:
        cur_RT, whole_CRT = (torch.where(mask, value, junk).requires_grad_() for value in (cur, whole))
        table = replace(ready.table, mu_RT=torch.where(mask, ready.table.mu_RT, junk))
        poisoned = replace(ready, ref_RT=torch.where(mask, ref, junk), table=table)
        by = divisors(config.recipe, poisoned, list(range(16)))
        loss = sum(regularisers(config, poisoned, rows, cur_RT[rows], whole_CRT[:, rows], by)
                   for rows in (list(range(at, at + size)) for at in range(0, 16, size)))
        assert isinstance(loss, Tensor)
        loss.backward()
        grads = [value.grad for value in (cur_RT, whole_CRT) if value.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads)
        return float(loss.detach()), b"".join(grad.numpy().tobytes() for grad in grads)

    one = regularised(16, 0.0)
    assert one[0] != 0
    assert regularised(16, torch.nan) == one
    assert regularised(4, 0.0)[0] == pytest.approx(one[0], rel=1e-12)
    assert regularisers(plain, ready, [0, 1], cur[:2], None, divisors(plain.recipe, ready, [0, 1])).item() == 0.0
