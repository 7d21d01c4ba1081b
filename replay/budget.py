"""The staleness budget: one number, `max_staleness` (eta); and the bound on what is stored, `max_rollouts`. Pure.

Staleness = version_in of the update minus the version of the group's oldest token. Pacing first (`allowance`), discarding last (`too_old`).
"""


def allowance(*, live: int, version: int, confirmed: int, max_staleness: int, groups_per_update: int) -> int:
    """How many more groups an actor may be granted: `live < (eta + 1 - (v - a)) * B`, and nothing to an engine that proved no version.

    `live` counts the training groups granted, complete or leased; `version` (v) is the committed one, `confirmed` (a) the asking actor's.
    """
    if confirmed < 0:
        return 0
    return max(0, (max_staleness + 1 - (version - confirmed)) * groups_per_update - live)


def room(*, kept: int, on_order: int, n: int, live: int, max_rollouts: int, groups_per_update: int) -> int:
    """How many more groups of `n` samples may be granted for what is stored: at most 0 when it is full.

    `kept`: rollouts stored with their tokens, whatever became of them; `on_order`: samples of granted groups that have no outcome. When
    full, no more is granted than one update needs (`live` counts as in `allowance`): the learner has to come to its next checkpoint, as
    what retention removes there is all that makes room.
    """
    return max((max_rollouts - kept - on_order) // n, groups_per_update - live)


def staleness(version_in: int, oldest_version: int) -> int:
    return version_in - oldest_version


def too_old(version_in: int, oldest_version: int, max_staleness: int) -> bool:
    return staleness(version_in, oldest_version) > max_staleness
