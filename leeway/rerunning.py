"""`leeway audit RUN --update U`: run one update again, from the nearest checkpoint before it, and compare with what was committed.

On the recorded kind of trainer everything must agree bit for bit. On another one weights and columns differ in their last bits, so only
loss and gradient norm are compared, within `TOLERANCE`.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from replay.audit import Finding
from replay.reader import RunReader
from replay.recall import recall, updates_since
from replay.rows import CheckpointRow, UpdateRow
from wire.errors import ConfigError, RunError, StoreError
from wire.messages import Recalled

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative difference of loss (to the larger of 1 and itself) and gradient norm allowed on another trainer. Not calibrated."""


class Rerun(NamedTuple):
    """`way`: the updates run again, ending with the one asked for; empty when that was not possible, and `notes` say why."""

    checkpoint: int | None
    way: list[int]
    skipped: bool
    then: dict[str, Any]
    now: dict[str, Any]
    notes: list[str]
    findings: list[Finding]

    @property
    def result(self) -> str:
        if self.findings:
            return f"{len(self.findings)} findings"
        return "clean" if self.way else "not retained"


def rerun_update(run_dir: Path, update: int) -> Rerun:
    """ConfigError when there is no such update, or when it takes more ranks than are here."""
    with RunReader(run_dir) as run:
        row = _row(run, update)
        found = list(_checkpoints(run, row))
        threads = json.loads(row.record)["state"].get("threads", 1)
        dtype = run.config().model.dtype
    try:
        from transformers.utils.logging import disable_progress_bar

        from learner.rerun import differences, read_past
        from learner.scratch import Scratch, world
    except ModuleNotFoundError as error:
        raise ConfigError(f"running an update again needs what the learner needs: {error.name} is not installed here") from None
    disable_progress_bar()
    notes: list[str] = []
    one = _sound(run_dir, found, notes)
    if one is None:
        return _not_possible(f"not retained: no checkpoint from before update {update}", notes)
    if one.saved.world != world():
        raise ConfigError(f"update {update} was trained by {one.saved.world} ranks, this is {world()}: run "
                          f"`torchrun --nproc-per-node {one.saved.world} -m leeway.cli audit {run_dir} --update {update}`")
    with RunReader(run_dir) as run:
        way = [number for number in updates_since(run.db, one.saved.version) if number <= update]
    scratch, skipped = Scratch(run_dir, one, threads), False
    then: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for number in way:
        try:
            past = read_past(*_recall(run_dir, number))
        except RunError as error:
            return _not_possible(str(error), notes)
        except StoreError as error:  # not what was acknowledged: there is nothing to run
            found_out = [Finding("store", [f"update {number}"], str(error))]
            return Rerun(one.saved.version, way[: way.index(number) + 1], skipped, then, now, notes, found_out)
        again = scratch.run(past)
        odd, skipped = differences(past, again), past.record.skipped
        same_trainer = past.record.state.get("trainer", scratch.trainer) == scratch.trainer
        if not same_trainer:
            notes.append(f"update {number} was trained on another trainer: {past.record.state['trainer']}")
        then = _numbers(past.record.steps, past.record.weights_digest_out)
        now = _numbers(again.outcome.steps, again.weights_digest)
        if odd and not same_trainer and _close(then, now, TOLERANCE[dtype]):
            notes.append(f"update {number}: {'; '.join(odd)}")
        elif odd:
            finding = Finding("rerun", [f"update {number}"], "; ".join(odd))
            return Rerun(one.saved.version, way[: way.index(number) + 1], skipped, then, now, notes, [finding])
    return Rerun(one.saved.version, way, skipped, then, now, notes, [])


def _row(run: RunReader, update: int) -> UpdateRow:
    row = next(run.read(UpdateRow, "update_id = ?", update), None)
    if row is None:
        raise ConfigError(f"{run.run_dir} has no update {update}: the newest is {run.one('SELECT max(update_id) FROM updates')}")
    if row.state != "committed":
        raise ConfigError(f"update {update} was given up when the learner went back to a checkpoint: only committed ones are run again")
    return row


def _checkpoints(run: RunReader, row: UpdateRow) -> Iterator[CheckpointRow]:
    """Complete ones from before the update, the nearest first."""
    rows = run.read(CheckpointRow, "state = 'complete' AND version <= ? AND coalesce(update_id, 0) < ?", row.version_in, row.update_id)
    yield from reversed(list(rows))


def _sound(run_dir: Path, rows: list[CheckpointRow], notes: list[str]) -> Any:
    """The first that is complete on disk and the one that was committed. It will be unpickled."""
    from learner import checkpoint

    for row in rows:
        try:
            one = checkpoint.read(run_dir, run_dir / row.path)
        except RunError as error:
            notes.append(f"the checkpoint of version {row.version} cannot be used: {error}")
            continue
        if one.manifest_digest == row.manifest_digest:
            return one
        notes.append(f"the checkpoint of version {row.version} cannot be used: it is not the one that was committed")
    return None


def _recall(run_dir: Path, update: int) -> tuple[Recalled, bytes]:
    with RunReader(run_dir) as run:
        return recall(run.db, update)


def _not_possible(why: str, notes: list[str]) -> Rerun:
    return Rerun(None, [], False, {}, {}, [*notes, why], [])


def _numbers(steps: list[dict[str, Any]], weights_digest: str) -> dict[str, Any]:
    stepped = [step for step in steps if step["stepped"]]
    return {"loss": [step["loss"] for step in stepped], "grad_norm": [step["grad_norm"] for step in stepped], "weights": weights_digest}


def _close(then: dict[str, Any], now: dict[str, Any], tolerance: float) -> bool:
    """Whether losses and gradient norms agree well enough."""
    pairs = [(a, b, floor) for name, floor in (("loss", tolerance), ("grad_norm", 0.0))
             for a, b in itertools.zip_longest(then[name], now[name], fillvalue=math.inf)]
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=floor) for a, b, floor in pairs)


def as_json(run_dir: Path, update: int, found: Rerun) -> dict[str, Any]:
    return {"run": str(run_dir), "update": update, "result": found.result, "from_checkpoint": found.checkpoint, "run_again": found.way,
            "skipped": found.skipped, "then": found.then, "now": found.now, "notes": found.notes,
            "findings": [finding._asdict() for finding in found.findings]}


def lines(run_dir: Path, update: int, found: Rerun) -> list[str]:
    """The same for people."""
    shown = [("audit", f"{run_dir}, update {update}")]
    if found.way:
        shown.append(("run again", f"{_several(found.way)} from the checkpoint of version {found.checkpoint}"))
        shown += [(label, _show(numbers, skipped=found.skipped)) for label, numbers in (("then", found.then), ("now", found.now))]
    shown += [("note", note) for note in found.notes]
    shown += [("FINDING", f"[{finding.kind}] {', '.join(finding.ids)}: {finding.text}") for finding in found.findings]
    shown.append(("result", found.result + (": loss, gradient norm, columns and weights digest agree bit for bit"
                                            if found.result == "clean" and found.then == found.now else "")))
    return [f"{label:10} {line}" for label, line in shown]


def _several(way: list[int]) -> str:
    return f"update {way[0]}" if len(way) == 1 else f"updates {way[0]} to {way[-1]}"


def _show(numbers: dict[str, Any], *, skipped: bool) -> str:
    if skipped:
        return f"skipped, weights {numbers['weights'][:16]}"
    steps = ", ".join(f"loss {loss!r}, gradient norm {norm!r}" for loss, norm in zip(numbers["loss"], numbers["grad_norm"], strict=True))
    return f"{steps}, weights {numbers['weights'][:16]}"
