"""Audit of greedy baselines (ReMax): stored as acknowledged, none of them trained, and each update had the rewards of its groups."""

from collections.abc import Iterator

import msgspec

from configs.needs import greedy_baseline
from configs.schema import Config
from replay.audit_ledger import Story
from replay.audit_rollouts import Finding
from replay.baselines import BASELINES, baselines_of
from replay.reader import RunReader
from replay.rows import UpdateRow
from wire.digest import digest
from wire.messages import UpdateRecord
from wire.record import RolloutHead, Scored

TRAINED_GREEDY = ("SELECT rollout_id FROM rollouts "
                  "WHERE CASE WHEN json_valid(head) THEN json_extract(head, '$.sampling.temperature') END <= 0")


def check_baselines(run: RunReader, config: Config, story: Story) -> Iterator[Finding]:
    unseen = dict(story.baselines)
    for rollout, group, reward, text, data in run.sql("SELECT rollout_id, group_id, reward, head, payload FROM eval_rollouts "
                                                      "WHERE eval_id = ? ORDER BY rollout_id", BASELINES):
        yield from _stored(rollout, group, reward, text, data, unseen.pop(rollout, None))
    for rollout in sorted(unseen)[:20]:
        yield Finding("greedy", [rollout], "this greedy response was stored according to the ledger; it has no row")
    for (rollout,) in run.sql(TRAINED_GREEDY):
        yield Finding("greedy", [rollout], "sampled at temperature 0, and yet among the rollouts to train on")
    for row in run.read(UpdateRow):
        yield from _update(run, config, row, story.budgets)


def _stored(
    rollout: str, group: str, reward: float | None, text: str, data: bytes | None, told: tuple[str, str] | None
) -> Iterator[Finding]:
    """`told`: digests of payload and head in the ledger."""
    ids = [rollout]
    if told is None:
        yield Finding("greedy", ids, "this greedy response has a row and no ledger row")
    elif (found := digest(text.encode())) != told[1]:
        yield Finding("greedy", ids, f"the head was changed: the ledger acknowledged {told[1][:16]}, found {found[:16]}")
    elif data is not None and (found := digest(data)) != told[0]:
        yield Finding("greedy", ids, f"the payload was changed: the ledger acknowledged {told[0][:16]}, found {found[:16]}")
    try:
        head = msgspec.json.decode(text, type=RolloutHead)
    except msgspec.MsgspecError as error:
        yield Finding("greedy", ids, f"the stored head is not a rollout head: {error}")
        return
    said = head.verdict.reward if isinstance(head.verdict, Scored) else None
    if (head.rollout_id, f"{head.order_id}.{head.attempt}", said) != (rollout, group, reward):
        yield Finding("greedy", ids, f"the row says group {group}, reward {reward}; the head says {head.rollout_id}, reward {said}")
    if head.sampling.temperature != 0:
        yield Finding("greedy", ids, f"sampled at temperature {head.sampling.temperature}, which is not greedy")
    covered = [token for span in head.spans for token in range(span.start, span.end)]
    if covered != list(range(head.response_len)):
        yield Finding("greedy", ids, f"its spans do not cover its {head.response_len} tokens exactly once")


def _update(run: RunReader, config: Config, row: UpdateRow, budgets: list[tuple[int, int]]) -> Iterator[Finding]:
    """The rewards that were subtracted are the stored ones, one for each group, none older than the budget."""
    ids = [f"update {row.update_id}"]
    try:
        record = msgspec.json.decode(row.record, type=UpdateRecord)
        heads = baselines_of(run.db, record.group_ids)
    except msgspec.MsgspecError:
        return  # a finding of its own
    if greedy_baseline(config) and len(record.greedy_rewards) != len(record.group_ids):
        yield Finding("greedy", ids, f"{len(record.greedy_rewards)} greedy rewards for {len(record.group_ids)} groups")
    if record.greedy_rewards != [head.verdict.reward for head in heads if isinstance(head.verdict, Scored)]:
        yield Finding("greedy", ids, "the greedy rewards of its record are not those stored with its groups")
    budget = max((b for b in budgets if b[0] <= row.update_id), default=budgets[0])[1]
    for head in heads if row.state == "committed" and not row.skipped else ():
        ages = [row.version_in - span.version for span in head.spans]
        if not all(0 <= age <= budget for age in ages):
            yield Finding("budget", [head.rollout_id, *ids], f"greedy tokens are {max(ages)} versions old, the budget is {budget}")
