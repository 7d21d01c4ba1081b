"""What each key of [recipe] does to weights, masks and rewards before the first step, against plain loops. No engine."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Config
from learner.batch import LeaseRows, tabulate
from learner.loss import objective_losses
from learner.prepare import Prepared, prepare, trainable
from learner.rewards import greedy_rewards, make_advantages, shaped_rewards
from tests.support.leases import give_baselines, make_lease, tiny_config

STALE = {"version_in": 2, "versions": [1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def now(lease: LeaseRows, shift: float = 0.0, row: int | None = None) -> Any:
    """A scorer under which every token has `old + shift`; with `row`, that row only."""
    def score(rows: list[Any]) -> list[np.ndarray]:
        assert len(rows) == len(lease.heads)
        return [np.minimum(lease.anchors[head.rollout_id, 0].values + (shift if row in (None, index) else 0.0), 0).astype(np.float32)
                for index, head in enumerate(lease.heads)]
    return score


def kept_rows(ready: Prepared) -> list[bool]:
    return ready.correction.keep_RT.any(-1).tolist()


def mu_of(lease: LeaseRows, index: int, mu: np.ndarray) -> None:
    lease.payloads[index] = lease.payloads[index]._replace(mu=mu.astype(np.float32))


def same_mu(lease: LeaseRows) -> None:
    """An engine that agrees with the trainer to the last bit."""
    for index, head in enumerate(lease.heads):
        mu_of(lease, index, lease.anchors[head.rollout_id, 0].values)


@pytest.mark.parametrize(("recipe", "drops"), [
    ({"filter": "veto", "filter_threshold": 0.5}, {"dip"}),
    ({"filter": "sequence", "filter_low": 0.5, "filter_high": 1.9}, {"dip", "rise"}),
    ({"filter": "sequence", "filter_low": 0.1, "filter_high": 1.9}, {"rise"}),
    ({"filter": "geometric", "filter_low": 0.9, "filter_high": 1.11}, {"dip", "rise"}),
    ({"filter": "carm", "filter_threshold": 1.1}, {"dip", "rise", "both"}),
    ({"filter": "k3", "filter_threshold": 0.02}, {"dip", "rise", "both"}),
])
def test_each_filter_drops_whole_responses(folder: Path, recipe: dict[str, Any], drops: set[str]) -> None:
    """dip: one token at ratio .3. rise: every token at ratio 1.3. both: errors of e^.2 that cancel, which only CARM and k3 see."""
    config = tiny_config(folder, recipe=recipe)
    lease = make_lease(config)
    same_mu(lease)
    long = [index for index, head in enumerate(lease.heads) if head.response_len in (3, 4, 5, 6)]
    even = next(index for index in long if lease.heads[index].response_len % 2 == 0)
    dip, rise = [index for index in long if index != even][:2]
    old = [lease.anchors[head.rollout_id, 0].values.astype(np.float64) - 0.5 for head in lease.heads]
    for index, head in enumerate(lease.heads):
        lease.anchors[head.rollout_id, 0] = lease.anchors[head.rollout_id, 0]._replace(values=old[index].astype(np.float32))
        mu_of(lease, index, old[index])
    mu_of(lease, dip, np.concatenate([[old[dip][0] - math.log(0.3)], old[dip][1:]]))
    mu_of(lease, rise, old[rise] - math.log(1.3))
    signs = np.resize([1, -1], len(old[even]))
    mu_of(lease, even, old[even] + 0.22 * signs)
    ready = prepare(lease, config, now(lease))
    names = {dip: "dip", rise: "rise", even: "both"}
    assert {names[row] for row, kept in enumerate(kept_rows(ready)) if not kept} == drops
    assert torch.equal(ready.correction.weight_RT, ready.correction.keep_RT.float())


def test_decoupled_weighs_by_prox_over_old_beside_tis(folder: Path) -> None:
    recipe = {"base": "prox", "engine": "tis", "engine_cap": 1.02, "staleness": "decoupled", "staleness_cap": 1.2}
    config = tiny_config(folder, recipe=recipe, learner={"steps_per_update": 2})
    lease = make_lease(config, **STALE)
    for shift, staleness in ((0.1, math.exp(0.1)), (0.3, 1.2), (-0.3, math.exp(-0.3))):
        ready, table = prepare(lease, config, now(lease, shift)), tabulate(lease)
        expected = [min(math.exp(float(o - m)), 1.02) * staleness for o, m in zip(table.old_RT[table.mask_RT], table.mu_RT[table.mask_RT])]
        assert ready.correction.weight_RT[table.mask_RT].tolist() == pytest.approx(expected, rel=1e-5)
    masked = tiny_config(folder, recipe={**recipe, "staleness_mode": "mask"}, learner={"steps_per_update": 2})
    assert not prepare(lease, masked, now(lease, 0.3)).correction.keep_RT.any()
    assert prepare(lease, masked, now(lease, 0.1)).correction.keep_RT.sum() == tabulate(lease).mask_RT.sum()


def test_opsm_drops_stale_responses_with_a_negative_advantage_and_no_other(folder: Path) -> None:
    """The live policy finds these tokens less likely than the behaviour policy did. Swapped, likelier, nothing is dropped."""
    config = tiny_config(folder, recipe={"staleness": "opsm", "opsm_threshold": 0.2})
    lease = make_lease(config, **STALE)
    same_mu(lease)
    rewards = [head.verdict.reward for head in lease.heads]  # type: ignore[union-attr]
    assert kept_rows(prepare(lease, config, now(lease, -0.3))) == [reward == 1.0 for reward in rewards]
    assert all(kept_rows(prepare(lease, config, now(lease, -0.1))))
    assert all(kept_rows(prepare(lease, config, now(lease, 0.3))))


def test_m2_mask_drops_the_tokens_that_moved_most_where_they_are_pushed(folder: Path) -> None:
    """Row 4 was wrong, row 5 right: only the former is dropped for having become less likely."""
    config = tiny_config(folder, recipe={"staleness": "m2_mask", "m2_budget": 0.01})
    lease = make_lease(config, **STALE)
    same_mu(lease)
    assert kept_rows(prepare(lease, config, now(lease, -1.0, row=4))) == [row != 4 for row in range(16)]
    assert all(kept_rows(prepare(lease, config, now(lease, -1.0, row=5))))
    wide = tiny_config(folder, recipe={"staleness": "m2_mask", "m2_budget": 2.0})
    assert all(kept_rows(prepare(lease, wide, now(lease, -1.0, row=4))))


def test_m2_range_sets_the_clip_in_place_of_the_configs(folder: Path) -> None:
    recipe = {"staleness": "m2_range", "m2_budget": 1e-3, "m2_floor_low": 0.01, "m2_floor_high": 0.01, "clip_low": 0.9, "clip_high": 0.9}
    config = tiny_config(folder, recipe=recipe)
    lease = make_lease(config, **STALE)
    same_mu(lease)
    ready = prepare(lease, config, now(lease, 0.2))
    assert ready.correction.clip is not None
    low, high = ready.correction.clip
    assert 0.01 < high < math.exp(0.2) - 1
    assert torch.equal(ready.correction.keep_RT, ready.table.mask_RT)
    cur = torch.where(ready.table.mask_RT, ready.table.old_RT + 0.2, 0.0).clamp(max=0)
    value = objective_losses(config.recipe, ready, list(range(16)), cur)
    up = ready.table.mask_RT & (ready.advantage_R > 0)[:, None] & (cur < 0)
    assert value[up].tolist() == pytest.approx((-(1 + high) * ready.advantage_R[:, None].expand_as(cur)[up]).tolist(), rel=1e-5)
    calm = prepare(lease, config, now(lease, 0.01))
    assert calm.correction.clip == (1.0, math.inf)  # the budget is met unclipped


def test_the_dual_clip_and_minirls_total_ratio_reach_the_loss(folder: Path) -> None:
    dual = tiny_config(folder, recipe={"dual_clip": 1.5})
    lease = make_lease(dual)
    same_mu(lease)
    for index in range(16):
        mu_of(lease, index, lease.payloads[index].mu - np.float32(0.1))
    rows = list(range(16))
    ready = prepare(lease, dual, now(lease))
    cur = torch.where(ready.table.mask_RT, ready.table.old_RT + 0.7, 0.0)
    down = ready.table.mask_RT & (ready.advantage_R < 0)[:, None]
    size = -ready.advantage_R[:, None].expand_as(cur)[down]
    assert objective_losses(dual.recipe, ready, rows, cur)[down].tolist() == pytest.approx((1.5 * size).tolist())
    minirl = tiny_config(folder, recipe={"objective": "minirl", "clip_high": 9.0, "clip_low": 0.9, "aggregation": "constant"})
    found = objective_losses(minirl.recipe, prepare(lease, minirl, now(lease)), rows, cur)
    assert found[down].tolist() == pytest.approx((math.exp(0.8) * size * cur[down]).tolist(), rel=1e-5)  # cur/mu = .7 + .1


@pytest.mark.parametrize(("objective", "aggregation"), [("gspo", "sequence_mean"), ("luspo", "sequence_mean"), ("tapo", "token_mean")])
def test_means_and_lengths_run_over_the_original_tokens_also_where_the_engine_corrector_masks_one(folder: Path, objective: str,
                                                                                                  aggregation: str) -> None:
    """The first token is masked, and it alone has moved: its ratio is in the mean of the response, and of the prefix, all the same."""
    config = tiny_config(folder, recipe={"objective": objective, "aggregation": aggregation, "engine": "icepop", "engine_low": 0.9,
                                         "engine_high": 1.1, "clip_low": 0.9, "clip_high": 0.9})
    lease = make_lease(config)
    same_mu(lease)
    row = next(index for index, head in enumerate(lease.heads) if head.response_len >= 4)
    length = lease.heads[row].response_len
    mu_of(lease, row, lease.payloads[row].mu - np.where(np.arange(length) == 0, 0.5, 0.0))
    ready = prepare(lease, config, now(lease))
    assert ready.correction.keep_RT[row, :length].tolist() == [False] + [True] * (length - 1)
    cur = ready.table.old_RT.clone()
    cur[row, 0] += 0.3
    found = objective_losses(config.recipe, ready, list(range(16)), cur)[row, 1] / -ready.advantage_R[row]
    expected = {"gspo": math.exp(0.3 / length), "luspo": math.exp(0.3 / length) * length, "tapo": math.exp(0.3 / 2)}[objective]
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_truncated_responses_are_masked_but_their_rewards_count(folder: Path) -> None:
    config = tiny_config(folder, recipe={"mask_truncated": True})
    lease = make_lease(config)
    lease.heads[1] = msgspec.structs.replace(lease.heads[1], finish_reason="length")
    ready = prepare(lease, config, now(lease))
    assert kept_rows(ready) == [row != 1 for row in range(16)]
    assert ready.advantage_R[:4].tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("recipe", [{"estimator": "rloo", "kl": 0.1, "kl_estimator": "k1", "kl_in": "reward"}, {"estimator": "zcpo"}],
                         ids=lambda r: r["estimator"])
def test_the_kl_of_a_truncated_response_counts_in_the_group_like_its_reward(folder: Path, recipe: dict[str, Any]) -> None:
    found = []
    for mask_truncated in (False, True):
        config = tiny_config(folder, recipe={**recipe, "mask_truncated": mask_truncated}, learner={"reference": "initial"})
        lease = make_lease(config)
        lease.heads[1] = msgspec.structs.replace(lease.heads[1], finish_reason="length")
        table = trainable(lease, config)
        kl_RT = torch.where(table.response_RT, 0.03, 0.0)
        found.append(make_advantages(lease, config, table, table.old_RT - 0.5, kl_RT, None).advantage_R)
    assert found[0].tolist() == found[1].tolist()


def test_overlong_responses_lose_up_to_one(folder: Path) -> None:
    config = tiny_config(folder, recipe={"overlong": 0.5})  # of 6: from 3 tokens to 6
    lease = make_lease(config)
    rewards = shaped_rewards(lease, config, tabulate(lease), None, None)
    lost = {2: 0.0, 3: 0.0, 4: 1 / 3, 5: 2 / 3, 6: 1.0}
    for index, head in enumerate(lease.heads):
        assert head.verdict.reward - float(rewards[index]) == pytest.approx(lost[head.response_len])  # type: ignore[union-attr]


def test_kl_in_the_reward_favours_what_the_reference_says_and_swapped_what_it_does_not(folder: Path) -> None:
    config = tiny_config(folder, recipe={"kl": 0.5, "kl_estimator": "k1", "kl_in": "reward"}, learner={"reference": "initial"})
    lease = make_lease(config)
    table = tabulate(lease)
    likelier = table.old_RT + 0.1
    lens = table.mask_RT.sum(-1)
    assert torch.allclose(shaped_rewards(lease, config, table, likelier, None) - table.reward_R, 0.05 * lens)
    swapped = type(table)(**{**vars(table), "old_RT": likelier})
    assert torch.allclose(shaped_rewards(lease, config, swapped, table.old_RT, None) - table.reward_R, -0.05 * lens)
    assert torch.allclose(whole(config, lease, 0.2) - table.reward_R, -0.5 * 0.2 * lens)


def whole(config: Config, lease: LeaseRows, kl: float) -> Tensor:
    full = config.model_copy(update={"recipe": config.recipe.model_copy(update={"kl_estimator": "full"})})
    table = tabulate(lease)
    return shaped_rewards(lease, full, table, None, torch.full_like(table.mu_RT, kl))


def test_remax_subtracts_each_groups_greedy_reward(folder: Path) -> None:
    config = tiny_config(folder, recipe={"estimator": "remax"})
    lease = make_lease(config)  # rewards 0, 1, 0, 1 in every group
    give_baselines(lease, config, [0.0, 1.0, 0.25, -2.0])
    ready = prepare(lease, config, now(lease))
    assert ready.advantage_R.view(4, 4).tolist() == [
        [0.0, 1.0, 0.0, 1.0], [-1.0, 0.0, -1.0, 0.0], [-0.25, 0.75, -0.25, 0.75], [2.0, 3.0, 2.0, 3.0]]
    assert ready.signal_R.view(4, 4)[:2].tolist() == [[False, True, False, True], [True, False, True, False]]
    assert len(ready.table.reward_R) == ready.table.mask_RT.shape[0] == 16  # the greedy responses are no rows


def test_equal_rewards_teach_when_the_greedy_one_differs(folder: Path) -> None:
    config = tiny_config(folder, recipe={"estimator": "remax"})
    lease = make_lease(config, rewards=[1.0] * 16)
    give_baselines(lease, config, [1.0, 0.0, 1.0, 1.0])
    assert prepare(lease, config, now(lease)).signal_R.tolist() == [row // 4 == 1 for row in range(16)]


def test_a_long_greedy_response_is_punished_like_the_others(folder: Path) -> None:
    config = tiny_config(folder, recipe={"estimator": "remax", "overlong": 0.5})
    lease = make_lease(config)
    give_baselines(lease, config, [0.0, 1.0, 0.5, 0.0])
    for index, length in enumerate((3, 4, 5, 6)):
        lease.baselines[index] = msgspec.structs.replace(lease.baselines[index], response_len=length)
    assert greedy_rewards(lease, config).tolist() == pytest.approx([0.0, 1 - 1 / 3, 0.5 - 2 / 3, -1.0])


def test_remax_without_greedy_responses_is_refused(folder: Path) -> None:
    config = tiny_config(folder, recipe={"estimator": "remax"})
    lease = make_lease(config)
    lease.baselines = []
    with pytest.raises(ValueError, match="needs a greedy response per group"):
        prepare(lease, config, now(lease))
