"""Stored rollouts as plain rows, one at a time: what was asked, sampled, scored, judged, and what became of it. Read-only, and streaming:
rollouts come update by update, so that only one update's columns are in memory."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from replay.reader import RunReader
from replay.rows import ColumnRow, SpanRow, UpdateRow
from wire.messages import UpdateRecord
from wire.record import F32, Failed, RolloutHead, WorkOrder, unpack_payload

COLUMNS = ("prox", "cur", "weight", "keep")
TYPES: dict[str, np.dtype[Any]] = {"f4": F32, "u1": np.dtype("u1")}
SELECT = """SELECT r.rollout_id, r.group_id, r.sample, r.state, r.reason, r.update_id, r.actor, r.head, r.payload, g.prompt_id, g.work_order
    FROM rollouts r JOIN groups g USING (group_id) ORDER BY r.update_id, r.rowid"""


class Trained:
    """The per-token columns of one update, by rollout. `prox`, `cur`: log-probs; `weight`, `keep`: after correction."""

    def __init__(self, run: RunReader, update_id: int) -> None:
        update = next(run.read(UpdateRow, "update_id = ?", update_id))
        record = msgspec.json.decode(update.record, type=UpdateRecord)
        self._columns = {column.name: np.frombuffer(column.data, TYPES[column.dtype])
                         for column in run.read(ColumnRow, "update_id = ?", update_id) if column.data is not None and column.name in COLUMNS}
        ends = np.cumsum(record.response_lens)
        self._place = {rollout: (int(end) - count, int(end))
                       for rollout, count, end in zip(record.rollout_ids, record.response_lens, ends, strict=True)}

    def of(self, rollout_id: str) -> dict[str, list[Any]]:
        if rollout_id not in self._place:
            return {}
        start, end = self._place[rollout_id]
        return {name: data[start:end].tolist() for name, data in self._columns.items()}


def rows(run: RunReader) -> Iterator[dict[str, Any]]:
    """One dict per stored training rollout. What retention removed, or was never made, is None; arrays are over response tokens."""
    trained: tuple[int, Trained] | None = None
    for rollout_id, group_id, sample, state, reason, update_id, actor, head_text, data, prompt_id, order_text in run.db.execute(SELECT):
        head, order = msgspec.json.decode(head_text, type=RolloutHead), msgspec.json.decode(order_text, type=WorkOrder)
        payload = None if data is None else unpack_payload(head, data)
        if update_id is not None and (trained is None or trained[0] != update_id):
            trained = update_id, Trained(run, update_id)
        spans = list(run.read(SpanRow, "rollout_id = ?", rollout_id))
        columns = trained[1].of(rollout_id) if trained is not None and update_id is not None else {}
        failed = isinstance(head.verdict, Failed)
        yield {
            "rollout_id": rollout_id, "group_id": group_id, "sample": sample, "state": state, "reason": reason, "update": update_id,
            "actor": actor, "prompt_id": prompt_id, "prompt": order.prompt if isinstance(order.prompt, str) else None,
            "messages": None if isinstance(order.prompt, str) else order.prompt,
            "prompt_ids": None if payload is None else payload.prompt_ids.tolist(),
            "response_ids": None if payload is None else payload.response_ids.tolist(),
            "finish_reason": head.finish_reason, "temperature": head.sampling.temperature, "fingerprint": head.fingerprint,
            "reward": None if failed else head.verdict.reward,  # type: ignore[union-attr]
            "failure": head.verdict.reason if failed else None,  # type: ignore[union-attr]
            "verifier": head.verdict.verifier, "verdict_detail": head.verdict.detail,
            "spans": [{"version": span.version, "start": span.start, "end": span.end, "kv_clean": bool(span.kv_clean),
                       "old_source": span.source} for span in spans],
            "mu": None if payload is None else payload.mu.tolist(), "old": _old(spans, head.response_len),
            **{name: columns.get(name) for name in COLUMNS},
            "started": head.started, "finished": head.finished,
        }  # fmt: skip


def _old(spans: list[SpanRow], count: int) -> list[float | None] | None:
    """Old log-probs by token; None where a span has none, None altogether where no span has any."""
    if not any(span.old for span in spans):
        return None
    found: list[float | None] = [None] * count
    for span in spans:
        if span.old is not None:
            found[span.start:span.end] = np.frombuffer(span.old, F32).tolist()
    return found
