"""Re-score a sample of anchored spans from the stored weights, with the recorded plans, and compare with what is stored."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from replay.audit import Finding
from replay.reader import RunReader
from replay.rows import SpanRow
from wire.errors import LeewayError
from wire.record import F32, RolloutHead, ScoringPlan, unpack_payload

VERSIONS, SPANS = 8, 8
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest absolute difference allowed where machine or libraries are not those the anchor was made with; with the recorded trainer it is 0.
bf16: sdpa against eager attention at equal weights was seen to differ by up to 0.48."""

CANDIDATES = "s.source IN ('resident', 'snapshot') AND s.old IS NOT NULL AND r.payload IS NOT NULL AND v.retained"
FROM_SPANS = "FROM spans s JOIN rollouts r USING (rollout_id) JOIN versions v ON v.version = s.version"


class Rescoring(NamedTuple):
    """`exact`: spans that had to agree bit for bit; `close`: those compared within the tolerance; `largest`: among these."""

    findings: list[Finding]
    notes: list[str]
    exact: int
    close: int
    largest: float


class Sampled(NamedTuple):
    span: SpanRow
    head: RolloutHead
    payload: bytes


def sample(run: RunReader) -> list[Sampled]:
    """At most `SPANS` spans of each of at most `VERSIONS` versions. Drawn by the ledger's head: not to be foreseen."""
    draw = random.Random(run.ledger_head())
    versions = [v for (v,) in run.sql(f"SELECT DISTINCT s.version {FROM_SPANS} WHERE {CANDIDATES} ORDER BY 1")]
    chosen = []
    for version in sorted(draw.sample(versions, min(VERSIONS, len(versions)))):
        keys = run.sql(f"SELECT rollout_id, span {FROM_SPANS} WHERE {CANDIDATES} AND s.version = ? ORDER BY 1, 2", version)
        for rollout, span in sorted(draw.sample(keys, min(SPANS, len(keys)))):
            row = next(run.read(SpanRow, "rollout_id = ? AND span = ?", rollout, span))
            head, payload = run.sql("SELECT head, payload FROM rollouts WHERE rollout_id = ?", rollout)[0]
            chosen.append(Sampled(row, msgspec.json.decode(head, type=RolloutHead), payload))
    return chosen


def rescore_sample(run_dir: Path) -> Rescoring:
    """Needs torch; without it, or with damaged weights, nothing is compared and a note says why."""
    with RunReader(run_dir) as run:
        chosen, tolerance = sample(run), TOLERANCE[run.config().model.dtype]
    if not chosen:
        return Rescoring([], ["nothing to re-score: no anchored rollout and its version are both retained"], 0, 0, 0.0)
    try:
        from transformers.utils.logging import disable_progress_bar

        from learner.rescore import Wanted, rescore
        from learner.scoring import Row
    except ModuleNotFoundError as error:
        return Rescoring([], [f"nothing was re-scored: {error.name} is not installed here"], 0, 0, 0.0)
    disable_progress_bar()
    wanted = []
    for span, head, data in chosen:
        payload = unpack_payload(head, data)
        row = Row(np.concatenate([payload.prompt_ids, payload.response_ids]), head.prompt_len, head.sampling.temperature)
        wanted.append(Wanted(span.version, row, ScoringPlan(span.rows or 0, span.width or 0, span.row or 0)))
    try:
        scored = rescore(run_dir, wanted)
    except (LeewayError, ValueError) as error:
        return Rescoring([], [f"nothing was re-scored: {error}"], 0, 0, 0.0)
    return compare([one.span for one in chosen], scored.logprobs, scored.trainer, tolerance)


def compare(spans: list[SpanRow], logprobs: list[Any], trainer: str, tolerance: float) -> Rescoring:
    """`logprobs[i]`: float32 of every response token of the rollout of `spans[i]`, None where it could not be scored."""
    findings, exact, close, largest, gone = [], 0, 0, 0.0, 0
    for span, values in zip(spans, logprobs, strict=True):
        if values is None:
            gone += 1
            continue
        old, new = np.frombuffer(span.old or b"", F32), values[span.start : span.end]
        same_machine = span.trainer == trainer
        exact, close = exact + same_machine, close + (not same_machine)
        difference = np.abs(old - new) if len(old) == len(new) else np.array([np.inf])
        worst = int(np.argmax(difference))
        if same_machine and old.tobytes() != new.tobytes() or not difference[worst] <= tolerance:
            allowed = "bit for bit" if same_machine else f"within {tolerance:g}"
            findings.append(
                Finding(
                    "re-score",
                    [span.rollout_id, f"v{span.version}"],
                    f"span {span.span} scored again {allowed}: token {span.start + worst} differs by {difference[worst]:.3g}",
                )
            )
        elif not same_machine:
            largest = max(largest, float(difference[worst]))
    return Rescoring(findings, [f"not retained: the weights of {gone} sampled spans"] if gone else [], exact, close, largest)
