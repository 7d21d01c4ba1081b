"""A lease as arrays and tensors, and who trains which row."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import Anchor, MicroBatch, micro_batches, padded_ids, plan_steps, read_lease, share, tabulate, to_table
from tests.support.leases import make_lease, tiny_config
from wire.errors import RunError
from wire.messages import AnchorHead, Leased
from wire.record import ANCHOR_SOURCES, Failed, RolloutHead, ScoringPlan, Span, pack_payload

MISSING = ANCHOR_SOURCES.index("missing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def as_message(folder: Path, heads: list[RolloutHead] | None = None) -> tuple[Leased, bytes]:
    lease = make_lease(tiny_config(folder))
    anchors = [AnchorHead(rollout_id, span, 0, anchor.source, "w", "t", ScoringPlan(8, 8, 0), len(anchor.values))
               for (rollout_id, span), anchor in lease.anchors.items()]
    payloads = [pack_payload(payload.prompt_ids, payload.response_ids, payload.mu) for payload in lease.payloads]
    olds = [anchor.values.tobytes() for anchor in lease.anchors.values()]
    return Leased(7, lease.group_ids, heads or lease.heads, anchors), b"".join(payloads + olds)


def test_a_lease_comes_as_it_was_sent(folder: Path) -> None:
    sent, (message, bulk) = make_lease(tiny_config(folder)), as_message(folder)
    lease = read_lease(message, bulk, 0, 2)
    assert (lease.update, lease.version_in, lease.group_ids) == (7, 0, ["o0.0", "o1.0", "o2.0", "o3.0"])
    assert lease.group_of == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for ours, theirs in zip(lease.payloads, sent.payloads, strict=True):
        assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    assert {key: a.values.tolist() for key, a in lease.anchors.items()} == {key: a.values.tolist() for key, a in sent.anchors.items()}


@pytest.mark.parametrize(("version_in", "budget"), [(3, 2), (1, 0), (-1, 2)])
def test_a_token_outside_the_budget_is_refused_even_if_it_was_leased(folder: Path, version_in: int, budget: int) -> None:
    message, bulk = as_message(folder)
    read_lease(message, bulk, max(0, version_in - 1), 2)
    with pytest.raises(RunError, match="must not train on it"):
        read_lease(message, bulk, version_in, budget)


def test_one_old_token_is_enough_to_refuse(folder: Path) -> None:
    heads = make_lease(tiny_config(folder), versions=[5]).heads
    heads[9] = msgspec.structs.replace(heads[9], spans=(Span(2, 0, 1), Span(5, 1, heads[9].response_len)))
    message, bulk = as_message(folder, heads)
    with pytest.raises(RunError, match=r"o2\.0\.1 holds tokens of versions 2 to 5"):
        read_lease(message, bulk, 5, 2)


def test_a_rollout_without_a_reward_is_refused(folder: Path) -> None:
    heads = make_lease(tiny_config(folder)).heads
    heads[3] = msgspec.structs.replace(heads[3], verdict=Failed("timeout"))
    message, bulk = as_message(folder, heads)
    with pytest.raises(RunError, match=r"o0\.0\.3 was leased without a reward"):
        read_lease(message, bulk, 0, 2)


def with_baselines(folder: Path) -> tuple[Leased, bytes]:
    config = tiny_config(folder, recipe={"estimator": "remax"})
    message, bulk = as_message(folder)
    return msgspec.structs.replace(message, baselines=make_lease(config).baselines), bulk


def test_greedy_rewards_come_with_their_groups_and_are_no_rows(folder: Path) -> None:
    message, bulk = with_baselines(folder)
    lease = read_lease(message, bulk, 0, 2)
    assert lease.greedy_rewards == [0.0, 1.0, 0.0, 1.0]
    assert len(lease.heads) == len(lease.payloads) == 16


@pytest.mark.parametrize(("index", "changes", "refusal"), [
    (0, {"spans": (Span(0, 0, 1), Span(4, 1, 3))}, r"o0\.0\.4 holds tokens of versions 0 to 4"),
    (1, {"verdict": Failed("timeout")}, r"o1\.0\.4 was leased without a reward"),
    (2, {"order_id": "o3"}, "4 greedy responses do not belong to the 4 groups"),
])
def test_a_greedy_response_that_is_not_its_groups_is_refused(folder: Path, index: int, changes: dict[str, Any], refusal: str) -> None:
    message, bulk = with_baselines(folder)
    message.baselines[index] = msgspec.structs.replace(message.baselines[index], **changes)
    with pytest.raises(RunError, match=refusal):
        read_lease(message, bulk, 2, 2)


def test_a_greedy_response_among_the_rows_is_refused(folder: Path) -> None:
    message, bulk = with_baselines(folder)
    message.heads[5] = msgspec.structs.replace(message.heads[5], sampling=message.baselines[0].sampling)
    with pytest.raises(RunError, match=r"o1\.0\.1 is a greedy response"):
        read_lease(message, bulk, 0, 2)


def test_missing_anchors_are_masked_and_never_filled(folder: Path) -> None:
    lease = make_lease(tiny_config(folder), version_in=2, versions=[2])
    head = lease.heads[5]
    lease.heads[5] = msgspec.structs.replace(head, spans=(Span(1, 0, 1, False), Span(2, 1, head.response_len)))
    full = lease.anchors[head.rollout_id, 0].values
    lease.anchors |= {(head.rollout_id, 0): Anchor("missing", full[:0]), (head.rollout_id, 1): Anchor("snapshot", full[1:])}
    table = tabulate(lease)
    assert torch.equal(table.response_RT.sum(-1), table.response_lens_R)
    assert table.mask_RT[5, : head.response_len].tolist() == [False] + [True] * (head.response_len - 1)
    assert table.old_RT[5, 0].isnan()
    assert table.old_RT[5, 1 : head.response_len].tolist() == full[1:].tolist()
    assert table.version_RT[5, : head.response_len].tolist() == [1] + [2] * (head.response_len - 1)
    assert table.source_RT[5, : head.response_len].tolist() == [MISSING] + [ANCHOR_SOURCES.index("snapshot")] * (head.response_len - 1)
    del lease.anchors[head.rollout_id, 1]
    with pytest.raises(KeyError):
        tabulate(lease)


def test_tables_are_filled_row_by_row_and_keep_the_gradient() -> None:
    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    table = to_table(flat, torch.tensor([[True, False], [True, True]]))
    assert table.tolist() == [[1, 0], [2, 3]]
    (table * torch.tensor([[5.0, 9.0], [6.0, 7.0]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [5, 6, 7]


def test_rows_are_padded_on_the_right(folder: Path) -> None:
    lease = make_lease(tiny_config(folder))
    ids = padded_ids(lease, [15, 0], 16)
    assert ids.shape == (2, 16)
    assert ids[1, :3].tolist() == lease.payloads[0].prompt_ids.tolist()
    assert ids[1, 3 + lease.heads[0].response_len :].tolist() == [0] * (13 - lease.heads[0].response_len)
    assert ids[0, : lease.lengths[15]].tolist() == np.concatenate([lease.payloads[15].prompt_ids, lease.payloads[15].response_ids]).tolist()


def test_groups_are_shared_by_tokens() -> None:
    assert share([10, 9, 2, 1], range(4), 2) == [[0, 3], [1, 2]]
    assert share([1, 1, 1, 50], range(4), 2) == [[2, 3], [0, 1]]


def test_micro_batches_take_the_longest_rows_first() -> None:
    assert micro_batches([5, 9, 7, 9], [0, 1, 2, 3], 3, 4) == [MicroBatch((1, 3, 2), 12), MicroBatch((0,), 8)]


def test_a_rank_with_fewer_micro_batches_gets_empty_ones() -> None:
    (step,) = plan_steps([4, 4, 4, 4, 4], [0, 1, 1, 1, 1], groups=2, steps=1, ranks=2, micro_batch_rows=2, bucket=4)
    assert sorted(len(mine) for mine in step) == [2, 2]
    assert MicroBatch((), 4) in [batch for mine in step for batch in mine]


def test_groups_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(RunError, match="3 groups cannot be shared by 1 steps and 2 ranks"):
        plan_steps([1, 1, 1], [0, 1, 2], groups=3, steps=1, ranks=2, micro_batch_rows=2, bucket=4)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_every_row_is_trained_once_and_groups_stay_whole(data: st.DataObject, steps: int, ranks: int, each: int, size: int) -> None:
    groups = steps * ranks * each
    group_of = [group for group in range(groups) for _ in range(data.draw(st.integers(1, 4)))]
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=len(group_of), max_size=len(group_of)))
    plan = plan_steps(lengths, group_of, groups=groups, steps=steps, ranks=ranks, micro_batch_rows=size, bucket=8)
    rows = [row for step in plan for mine in step for batch in mine for row in batch.rows]
    assert sorted(rows) == list(range(len(group_of)))
    owner: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(plan):
        assert len({len(mine) for mine in step}) == 1
        for rank, mine in enumerate(step):
            for batch in mine:
                assert len(batch.rows) <= size
                assert all(lengths[row] <= batch.width and batch.width % 8 == 0 for row in batch.rows)
                for row in batch.rows:
                    assert owner.setdefault(group_of[row], (number, rank)) == (number, rank)
