"""No prompt is skipped: whether each order's attempts and its end are what the stored outcomes allow. Counts again, from the tables alone,
what GroupBook decides by its own count (`excused`)."""

from collections.abc import Callable
from typing import Any

from configs.needs import greedy_baseline
from configs.schema import Config

GOES_ON = ("queued", "granted", "complete", "leased", "trained")
MAY_END = ("no_signal", "no_contrast")
"""Reasons for which a prompt is not asked again in this pass."""
ABORTED = ("aborted", "aborted_without_token")

FAILED = f"""SELECT group_id, sample FROM rollouts WHERE reward IS NULL AND failure NOT IN {ABORTED}
    UNION SELECT group_id, sample FROM failures WHERE reason NOT IN {ABORTED}
    UNION SELECT group_id, CAST(substr(rollout_id, length(group_id) + 2) AS INTEGER) FROM eval_rollouts
    WHERE eval_id = 0 AND reward IS NULL AND failure NOT IN {ABORTED}"""


def skipped(sql: Callable[[str], list[tuple[Any, ...]]], config: Config) -> list[str]:
    """What is wrong with the training prompts that were asked so far; empty when none was skipped or given up too early or too late.

    An attempt counts towards replay.max_attempts when it came too late, or when so many samples failed that it could not be complete. One
    that was given back, aborted by a weight swap, or left by an actor that vanished does not.
    """
    failed: dict[str, set[int]] = {}
    for group, sample in sql(FAILED):
        failed.setdefault(group, set()).add(sample)
    orders: dict[str, list[tuple[str, int, str, str | None]]] = {}
    for group, order, attempt, state, reason in sql("SELECT group_id, order_id, attempt, state, reason FROM groups "
                                                    "WHERE purpose = 'train' ORDER BY order_id, attempt"):
        orders.setdefault(order, []).append((group, attempt, state, reason))
    wrong = [] if [*orders] == [f"t{i:07d}" for i in range(len(orders))] else [f"a prompt was skipped: {[*orders]}"]
    for order, attempts in orders.items():
        if [attempt for _, attempt, _, _ in attempts] != list(range(1, len(attempts) + 1)):
            wrong.append(f"{order}: its attempts are {attempts}")
        count = 0
        for group, _, state, reason in attempts:
            count = 0 if state == "lost" else count + _counts(config, state, reason, failed.get(group, set()))
            last, used_up = group == attempts[-1][0], count >= config.replay.max_attempts
            if last and not (state in GOES_ON or reason in MAY_END or used_up):
                wrong.append(f"{order} is skipped: its last attempt is {state}({reason}) after {count} that count")
            if not last and (state in GOES_ON or reason in MAY_END or used_up):
                wrong.append(f"{group} is {state}({reason}) after {count} that count, and {order} was asked again")
    return wrong


def _counts(config: Config, state: str, reason: str | None, failed: set[int]) -> bool:
    n, baseline = config.sampling.n, greedy_baseline(config)
    hopeless = n - sum(sample < n for sample in failed) < config.min_scored or baseline and n in failed
    return state == "expired" or reason == "too_slow" or reason == "incomplete_group" and hopeless
