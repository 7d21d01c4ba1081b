"""Scoring passes of fixed shape, so that a re-score can repeat one bit for bit.

A batched forward need not equal its slice bit for bit, but with the same shape a row's log-probs depend on that row and its place only.
So every pass has exactly `score_rows` rows, of a width rounded up to a multiple of `length_bucket`; dummy rows fill it, and where a row
stood is its ScoringPlan.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wire.record import ScoringPlan

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids_BT, temperature_B, position_N) -> log-probs [N]"""


class Row(NamedTuple):
    """One response in its context: int32 token ids of prompt and response, the prompt's length, the recorded temperature."""

    ids: np.ndarray
    prompt_len: int
    temperature: float


class Pass(NamedTuple):
    """One forward. `members[i]` is the index of the row at place i, None for a dummy."""

    width: int
    members: tuple[int | None, ...]


def round_up(length: int, bucket: int) -> int:
    return -(-length // bucket) * bucket


def plan_passes(lengths: Sequence[int], score_rows: int, bucket: int) -> list[Pass]:
    """Rows of these lengths, longest first, in as few passes as possible. Deterministic."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    passes = []
    for start in range(0, len(order), score_rows):
        members: list[int | None] = list(order[start : start + score_rows])
        width = round_up(lengths[order[start]], bucket)
        passes.append(Pass(width, (*members, *[None] * (score_rows - len(members)))))
    return passes


def plans_of(passes: Sequence[Pass]) -> dict[int, ScoringPlan]:
    """Where each row stands."""
    return {member: ScoringPlan(len(one.members), one.width, place)
            for one in passes for place, member in enumerate(one.members) if member is not None}


def run_pass(forward: Forward, one: Pass, rows: Sequence[Row], device: str) -> dict[int, np.ndarray]:
    """float32 log-probs of every response token, by row index. `forward` runs without gradient."""
    ids_BT = np.zeros((len(one.members), one.width), np.int64)
    temperature_B = np.ones(len(one.members), np.float32)
    for place, member in enumerate(one.members):
        if member is not None:
            ids_BT[place, : len(rows[member].ids)] = rows[member].ids
            temperature_B[place] = rows[member].temperature
    position_N = torch.arange(len(one.members) * (one.width - 1))
    flat = forward(torch.from_numpy(ids_BT).to(device), torch.from_numpy(temperature_B).to(device), position_N.to(device))
    table = flat.float().cpu().numpy().reshape(len(one.members), one.width - 1)
    return {member: table[place, rows[member].prompt_len - 1 : len(rows[member].ids) - 1].copy()
            for place, member in enumerate(one.members) if member is not None}


def passes_of(plans: Sequence[ScoringPlan]) -> list[Pass]:
    """Passes that put row i at `plans[i]` again, sharing a pass where shapes agree and places are free. For re-scoring."""
    open_passes: dict[tuple[int, int], list[list[int | None]]] = {}
    for index, plan in enumerate(plans):
        if not 0 <= plan.row < plan.rows:
            raise ValueError(f"scoring plan {plan}: no such row")
        same_shape = open_passes.setdefault((plan.rows, plan.width), [])
        target = next((members for members in same_shape if members[plan.row] is None), None)
        if target is None:
            target = [None] * plan.rows
            same_shape.append(target)
        target[plan.row] = index
    return [Pass(width, tuple(members)) for (_, width), group in open_passes.items() for members in group]
