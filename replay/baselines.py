"""Greedy baselines (ReMax): one greedy response beside each training group, whose reward the learner subtracts.

Its reward is all that anybody reads. It lies in `eval_rollouts`, the table of what is outside the books, has no span rows and so never gets
an anchor: what it was sampled with is not the distribution that its `mu` speaks of.
"""

from collections.abc import Sequence

import msgspec

from replay.books import Readable
from wire.record import RolloutHead, WorkOrder

BASELINES = 0
"""The `eval_id` of theirs: evaluations begin at 1."""
SELECT_HEADS = (f"SELECT e.head FROM json_each(?) ids JOIN groups g ON g.group_id = ids.value "
                f"JOIN eval_rollouts e ON e.rollout_id = g.group_id || '.' || g.n AND e.eval_id = {BASELINES} "
                "WHERE e.reward IS NOT NULL ORDER BY ids.key")
DROP_PAYLOADS = (f"UPDATE eval_rollouts SET payload = NULL WHERE eval_id = {BASELINES} AND payload IS NOT NULL AND group_id IN "
                 "(SELECT group_id FROM groups WHERE state IN ('trained', 'dropped', 'expired', 'lost')) "
                 "AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r.group_id = eval_rollouts.group_id AND r.payload IS NOT NULL)")
"""Retention: a baseline's tokens go with its group's."""
_head = msgspec.json.Decoder(RolloutHead)


def baseline_order(order: WorkOrder) -> WorkOrder:
    """What sample n of a training order is held to: its sampling, and no sampling contract."""
    assert order.baseline is not None
    return msgspec.structs.replace(order, purpose="greedy_baseline", n=1, sampling=order.baseline, baseline=None)


def baseline_id(group: str, n: int) -> str:
    """The rollout id of a group's greedy response."""
    return f"{group}.{n}"


def baselines_of(db: Readable, group_ids: Sequence[str]) -> list[RolloutHead]:
    """Heads of the scored greedy responses of these groups, in their order. Empty in a run whose recipe asks for none."""
    ids = msgspec.json.encode(list(group_ids)).decode()
    return [_head.decode(text) for text, in db.execute(SELECT_HEADS, (ids,)).fetchall()]
