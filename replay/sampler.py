"""GroupBook: the life of every training group that is not over yet. Pure: it decides, `replay/store.py` writes.

    queued -> granted -> complete -> leased -> trained | dropped(reason) | expired | lost(fork)

One attempt of an order is one group. A group settles when every sample has an outcome, or when its order's lease ends. Every method that
changes something returns the transitions, to be written with their ledger row before anybody hears of them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from replay.budget import allowance, too_old

Outcome = Literal["scored", "failed", "quarantined", "aborted"]
NO_CONTRAST, QUARANTINED = "no_contrast", "quarantined"
SCORED: tuple[Outcome, ...] = ("scored",)
NOT_FAILED: tuple[Outcome | None, ...] = ("scored", "aborted", None)
"""What does not speak against the prompt: a weight swap ended the sample, or whoever was to make it vanished."""
MANY_LIVES = 3
"""Lives of actors that one prompt may outlive before people are told: the prompt itself may be what ends them."""


@dataclass
class Group:
    """`oldest_version` is that of the oldest token of a scored sample, `rewards` what the scored samples got; `touched` is monotonic.
    `excused`: attempts of its order that came to nothing through no fault of the prompt, this one included once it has.
    `outlived`: how often its order was left without an answer: a lease ended, or a later life of its actor had to be sent it again.

    `baseline`: sample number n is the greedy baseline (ReMax). The group is complete only with its reward; it counts for `oldest_version`
    and `rewards`, and not as a scored sample.
    """

    group_id: str
    order_id: str
    attempt: int
    n: int
    actor: str = ""
    seq: int = 0
    touched: float = 0.0
    state: Literal["granted", "complete", "leased"] = "granted"
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    oldest_version: int | None = None
    rewards: set[float] = field(default_factory=set)
    excused: int = 0
    baseline: bool = False
    outlived: int = 0

    @property
    def rows(self) -> int:
        return self.n + self.baseline

    @property
    def scored(self) -> int:
        return sum(outcome == "scored" for sample, outcome in self.outcomes.items() if sample < self.n)

    def enough(self, least: int, counting: Collection[Outcome | None]) -> bool:
        """Whether at least so many samples, and the baseline where one is wanted, came to one of these outcomes; None: to none yet."""
        samples = sum(self.outcomes.get(sample) in counting for sample in range(self.n))
        return samples >= least and (not self.baseline or self.outcomes.get(self.n) in counting)


class Transition(NamedTuple):
    """`to` is complete, leased, trained, dropped, expired or lost; a group in a final state has left the book.
    `requeue`: its prompt goes to the head of the queue as the next attempt."""

    group: Group
    to: str
    reason: str | None = None
    requeue: bool = False


class GroupBook:
    def __init__(self, *, max_staleness: int, groups_per_update: int, min_scored: int, max_attempts: int,
                 dynamic_sampling: bool = False) -> None:
        """dynamic_sampling: a group whose scored samples all got one reward is dropped as it settles, which lets another be granted."""
        self.max_staleness = max_staleness
        self.groups_per_update = groups_per_update
        self.min_scored = min_scored
        self.max_attempts = max_attempts
        self.dynamic_sampling = dynamic_sampling
        self.groups: dict[str, Group] = {}
        self.next_seq = 0

    @property
    def live(self) -> int:
        return len(self.groups)

    def in_state(self, state: str) -> list[Group]:
        """In grant order."""
        return sorted((group for group in self.groups.values() if group.state == state), key=lambda group: group.seq)

    def allowance(self, version: int, confirmed: int) -> int:
        return allowance(live=self.live, version=version, confirmed=confirmed, max_staleness=self.max_staleness,
                         groups_per_update=self.groups_per_update)

    # ------------------------------------------------------------ actors
    def grant(self, group: Group, actor: str, now: float) -> None:
        """Takes the next number of the grant order."""
        group.actor, group.touched, group.seq, group.state = actor, now, self.next_seq, "granted"
        self.next_seq += 1
        self.groups[group.group_id] = group

    def restore(self, group: Group) -> None:
        """A group read back from the store, with its state and number."""
        self.groups[group.group_id] = group
        self.next_seq = max(self.next_seq, group.seq + 1)

    def touch(self, group_ids: Iterable[str], actor: str, now: float) -> None:
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.actor == actor:
                group.touched = now

    def outcome(self, group_id: str, sample: int, outcome: Outcome, oldest_version: int | None = None,
                reward: float | None = None) -> Transition | None:
        """Record one sample's outcome; the caller has checked that the group is granted and the sample is open."""
        group = self.groups[group_id]
        group.outcomes[sample] = outcome
        if outcome == "scored" and oldest_version is not None:
            group.oldest_version = oldest_version if group.oldest_version is None else min(group.oldest_version, oldest_version)
        if reward is not None:
            group.rewards.add(reward)
        return self._settle(group) if len(group.outcomes) == group.rows else None

    def give_back(self, group_ids: Iterable[str], actor: str) -> list[Transition]:
        """The actor will not finish these. Not the prompt's fault, so it is always asked again."""
        given = set(group_ids)
        mine = [group for group in self.in_state("granted") if group.group_id in given and group.actor == actor]
        return [self._settle(group, "given_back", excuse=True) for group in mine]

    def expire_orders(self, now: float, lease_s: float) -> list[Transition]:
        """Settle the granted groups whose actor showed no sign of life for `lease_s`, with what they have."""
        late = [group for group in self.in_state("granted") if now - group.touched > lease_s]
        for group in late:
            group.outlived += 1
        return [self._settle(group) for group in late]

    def _settle(self, group: Group, reason: str = "incomplete_group", *, excuse: bool = False) -> Transition:
        """A group that weight swaps, or an actor that vanished, alone kept from being complete is excused."""
        if group.enough(self.min_scored, SCORED):
            if self.dynamic_sampling and len(group.rewards) < 2:
                del self.groups[group.group_id]
                return Transition(group, "dropped", NO_CONTRAST)
            group.state = "complete"
            return Transition(group, "complete")
        del self.groups[group.group_id]
        excuse = excuse or group.enough(self.min_scored, NOT_FAILED)
        group.excused += excuse
        return Transition(group, "dropped", reason, requeue=excuse or self._may_try_again(group))

    def _may_try_again(self, group: Group) -> bool:
        return group.attempt - group.excused < self.max_attempts

    # ------------------------------------------------------------ learner
    def lease(self, version: int) -> tuple[list[Group], list[Transition]]:
        """The groups of the next update in grant order (empty: not enough yet), and what expired or was leased on the way."""
        transitions = self.expire(version)
        ready = self.in_state("complete")[:self.groups_per_update]
        if len(ready) < self.groups_per_update:
            return [], transitions
        for group in ready:
            group.state = "leased"
        return ready, transitions + [Transition(group, "leased") for group in ready]

    def expire(self, version: int) -> list[Transition]:
        """Complete groups whose oldest token is too old for an update that begins from `version`."""
        transitions = []
        for group in self.in_state("complete"):
            if group.oldest_version is not None and too_old(version, group.oldest_version, self.max_staleness):
                del self.groups[group.group_id]
                transitions.append(Transition(group, "expired", "staleness", requeue=True) if self._may_try_again(group)
                                   else Transition(group, "dropped", "too_slow"))
        return transitions

    def unlease(self) -> list[Transition]:
        """Take back a lease that can no longer be trained as it is."""
        leased = self.in_state("leased")
        for group in leased:
            group.state = "complete"
        return [Transition(group, "complete", "lease_ended") for group in leased]

    def trained(self) -> list[Transition]:
        return self._end_lease("trained", None)

    def skipped(self) -> list[Transition]:
        return self._end_lease("dropped", "no_signal")

    def _end_lease(self, to: str, reason: str | None) -> list[Transition]:
        leased = self.in_state("leased")
        for group in leased:
            del self.groups[group.group_id]
        return [Transition(group, to, reason) for group in leased]

    def fork(self, checkpoint: int, newest: dict[str, int]) -> list[Transition]:
        """Versions after `checkpoint` are orphaned. `newest` is the newest version of any token by group. Groups that hold an orphaned
        token, or may still make one, are dropped and asked again; complete groups of surviving versions stay."""
        transitions = self.unlease()
        for group in list(self.groups.values()):
            if group.state == "granted" or newest.get(group.group_id, 0) > checkpoint:
                del self.groups[group.group_id]
                group.excused += 1
                transitions.append(Transition(group, "dropped", "orphaned", requeue=True))
        return transitions
