"""One rollout, token by token: where every log-prob came from and what became of it."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.reader import RunReader
from replay.rows import ColumnRow, RolloutRow, SpanRow, UpdateRow
from wire.errors import ConfigError
from wire.messages import UpdateRecord
from wire.record import F32, RolloutHead, unpack_payload

COLUMNS = ("prox", "cur", "weight", "keep")
TYPES: dict[str, np.dtype[Any]] = {"f4": F32, "u1": np.dtype("u1")}


def rollout_table(run_dir: Path, rollout_id: str) -> dict[str, Any]:
    """What is stored of the rollout, as plain JSON: `tokens` has one entry per response token. What is not known or not retained is null.
    Raises ConfigError for an unknown rollout."""
    with RunReader(run_dir) as run:
        row = next(run.read(RolloutRow, "rollout_id = ?", rollout_id), None)
        if row is None:
            near = run.one("SELECT rollout_id FROM rollouts WHERE rollout_id >= ? ORDER BY rollout_id LIMIT 1", rollout_id)
            raise ConfigError(f"no rollout {rollout_id} in {run_dir}" + (f"; the next one is {near}" if near else ""))
        head = msgspec.json.decode(row.head, type=RolloutHead)
        data = run.payload(rollout_id)
        payload = unpack_payload(head, data) if data is not None else None
        trained = _columns(run, row)
        spans = list(run.read(SpanRow, "rollout_id = ?", rollout_id))
        decode = _decoder([run_dir / "model", Path(run.config().model.path)])
    tokens = [
        {
            "position": i,
            "token": None if payload is None else int(payload.response_ids[i]),
            "text": None if payload is None else decode(int(payload.response_ids[i])),
            "version": span.version,
            "mu": None if payload is None else float(payload.mu[i]),
            "old": float(np.frombuffer(span.old, F32)[i - span.start]) if span.old is not None else None,
            "source": span.source,
            **{name: _value(trained.get(name), i) for name in COLUMNS},
        }
        for span in spans
        for i in range(span.start, span.end)
    ]
    return {
        "rollout_id": rollout_id,
        "state": row.state,
        "reason": row.reason,
        "update": row.update_id,
        "reward": row.reward,
        "failure": row.failure,
        "finish_reason": head.finish_reason,
        "temperature": head.sampling.temperature,
        "fingerprint": head.fingerprint,
        "retained": payload is not None,
        "prompt": None if payload is None else [[int(t), decode(int(t))] for t in payload.prompt_ids],
        "tokens": tokens,
    }


def text(values: dict[str, Any]) -> str:
    names = ("position", "token", "text", "version", "mu", "old", "source", *COLUMNS)
    rows = [names, *(tuple(_cell(token[name]) for name in names) for token in values["tokens"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    outcome = f"{values['state']}({values['reason']})" if values["reason"] else values["state"]
    by = f" by update {values['update']}" if values["update"] is not None else ""
    verdict = f"reward {values['reward']}" if values["failure"] is None else f"no reward: {values['failure']}"
    head = [f"{values['rollout_id']}: {outcome}{by}, {verdict}, finish {values['finish_reason']}, temperature {values['temperature']}"]
    if not values["retained"]:
        head.append("tokens and log-probs are not retained")
    elif all(piece is not None for _, piece in values["prompt"]):
        head.append("prompt: " + repr("".join(piece for _, piece in values["prompt"])))
    return "\n".join([*head, "", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)])


def _columns(run: RunReader, row: RolloutRow) -> dict[str, np.ndarray]:
    """This rollout's part of the columns of the update that trained it."""
    update = next(run.read(UpdateRow, "update_id = ?", row.update_id), None)
    if update is None:
        return {}
    record = msgspec.json.decode(update.record, type=UpdateRecord)
    start = sum(record.response_lens[: record.rollout_ids.index(row.rollout_id)])
    return {
        column.name: np.frombuffer(column.data, TYPES[column.dtype])[start : start + row.response_len]
        for column in run.read(ColumnRow, "update_id = ?", row.update_id)
        if column.data is not None
    }


def _decoder(folders: list[Path]) -> Any:
    """Token id to text, with the tokenizer of the first folder that exists; to None where there is none that loads here."""
    folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if folder is not None:
        try:
            from learner.model import load_tokenizer

            tokenizer = load_tokenizer(str(folder))
            return lambda token: tokenizer.decode([token])
        except (ConfigError, ModuleNotFoundError):
            return lambda token: None
    return lambda token: None


def _value(column: np.ndarray | None, at: int) -> float | int | None:
    if column is None:
        return None
    value = column[at].item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6f}" if isinstance(value, float) else repr(value) if isinstance(value, str) and not value.isalnum() else str(value)
