"""Evaluations: orders that one actor answers with exactly one version, outside admission, leases and books. Pure.

The first is stored before any training order is granted; the last follows the last update; `eval.every` in between.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from wire.record import WorkOrder

FAILED = None
"""The outcome of a sample without a verdict: counted, and left out of the mean."""


def evaluation_due(*, stepped: int, total: int, every: int | None, at: Iterable[int]) -> bool:
    """Whether the version just committed, after `stepped` updates, is to be evaluated. `at`: the update counts already evaluated."""
    done = set(at)
    return stepped not in done and (not done or stepped >= total or (every is not None and stepped > 0 and stepped % every == 0))


@dataclass
class EvalGroup:
    order: WorkOrder
    outcomes: dict[int, float | None] = field(default_factory=dict)
    held: bool = False
    touched: float = 0.0


class EvalRound:
    """One evaluation of one version. It belongs to the first actor that takes orders of it, until that actor is gone."""

    def __init__(self, eval_id: int, version: int, updates: int, groups: dict[str, EvalGroup]) -> None:
        self.eval_id, self.version, self.updates, self.groups = eval_id, version, updates, groups
        self.actor: str | None = None
        self.queue = deque(group_id for group_id, group in groups.items() if len(group.outcomes) < group.order.n)
        self.total = sum(group.order.n for group in groups.values())

    @property
    def answered(self) -> int:
        return sum(len(group.outcomes) for group in self.groups.values())

    @property
    def done(self) -> bool:
        return all(len(group.outcomes) >= group.order.n for group in self.groups.values())

    def take(self, actor: str, want: int, now: float) -> list[str]:
        """Up to `want` group ids for this actor; none for another than the one that has the round."""
        if not self.queue or self.actor not in (None, actor):
            return []
        taken = [self.queue.popleft() for _ in range(min(want, len(self.queue)))]
        for group_id in taken:
            self.groups[group_id].held, self.groups[group_id].touched = True, now
        if taken:
            self.actor = actor
        return taken

    def touch(self, group_ids: Iterable[str], actor: str, now: float) -> None:
        if actor == self.actor:
            for group_id in group_ids:
                if group_id in self.groups:
                    self.groups[group_id].touched = now

    def held(self) -> list[str]:
        return [group_id for group_id, group in self.groups.items() if group.held]

    def outcome(self, group_id: str, sample: int, reward: float | None) -> bool:
        """Record one answer; True when it was the group's last."""
        group = self.groups[group_id]
        group.outcomes[sample] = reward
        if len(group.outcomes) >= group.order.n:
            group.held = False
            return True
        return False

    def put_back(self, group_ids: Iterable[str]) -> list[str]:
        """These go to the queue again, with what they have; the round is free for another actor when nothing of it is held."""
        back = [group_id for group_id in group_ids if group_id in self.groups and self.groups[group_id].held]
        for group_id in back:
            self.groups[group_id].held = False
        self.queue.extendleft(reversed(back))
        if not self.held():
            self.actor = None
        return back

    def expire(self, now: float, lease_s: float, last_seen: float) -> list[str]:
        """Orders whose lease ended go to the queue. An actor that holds none and was not seen for as long has lost the round."""
        late = [group_id for group_id in self.held() if now - self.groups[group_id].touched > lease_s]
        back = self.put_back(late) if late else []
        if not self.held() and now - last_seen > lease_s:
            self.actor = None
        return back

    def result(self) -> tuple[float | None, float | None, int]:
        """(mean reward of the samples, of the greedy answers, how many had no verdict)."""
        by_purpose: dict[str, list[float]] = {"eval": [], "greedy_baseline": []}
        failed = 0
        for group in self.groups.values():
            scored = [reward for reward in group.outcomes.values() if reward is not FAILED]
            failed += len(group.outcomes) - len(scored)
            by_purpose[group.order.purpose] += scored
        means = {purpose: sum(rewards) / len(rewards) if rewards else None for purpose, rewards in by_purpose.items()}
        return means["eval"], means["greedy_baseline"], failed
