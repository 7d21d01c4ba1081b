"""The loss of an update, recomputed token by token from what the store holds. Plain Python, no tensor: an independent reference."""

import json
import math
import sqlite3
import struct
from pathlib import Path
from typing import Any


def read_update(db: sqlite3.Connection, update: int) -> dict[str, Any]:
    """The record, and per rollout: group, reward, and each column as a list; `mu` comes from the payload."""
    record = json.loads(db.execute("SELECT record FROM updates WHERE update_id = ?", (update,)).fetchone()[0])
    columns = {
        name: (dtype, data)
        for name, dtype, data in db.execute("SELECT name, dtype, data FROM update_columns WHERE update_id = ?", (update,))
    }
    rows, at = [], 0
    for rollout_id, count in zip(record["rollout_ids"], record["response_lens"], strict=True):
        group, reward, head, payload = db.execute(
            "SELECT group_id, reward, head, payload FROM rollouts WHERE rollout_id = ?", (rollout_id,)
        ).fetchone()
        prompt = json.loads(head)["prompt_len"]
        row: dict[str, Any] = {"group": group, "reward": reward, "mu": struct.unpack_from(f"<{count}f", payload, 4 * (prompt + count))}
        for name, (dtype, data) in columns.items():
            size, code = (4, "f") if dtype == "f4" else (1, "B")
            row[name] = struct.unpack_from(f"<{count}{code}", data, size * at)
        rows.append(row)
        at += count
    return {"record": record, "rows": rows}


def grpo(rows: list[dict[str, Any]]) -> list[float]:
    """Population standard deviation + 1e-6; 0 without contrast."""
    advantages = []
    for row in rows:
        group = [other["reward"] for other in rows if other["group"] == row["group"]]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
        advantages.append((row["reward"] - mean) / (deviation + 1e-6) if deviation > 0 else 0.0)
    return advantages


def icepop_ppo_token_mean(
    rows: list[dict[str, Any]], *, low: float, high: float, clip_low: float, clip_high: float
) -> tuple[float, list[float]]:
    """The loss of one optimizer step over all rows, and every token's IcePop weight."""
    total, tokens, weights = 0.0, 0, []
    for row, advantage in zip(rows, grpo(rows), strict=True):
        for mu, old, cur in zip(row["mu"], row["old"], row["cur"], strict=True):
            mismatch = math.exp(old - mu)
            weight = mismatch if low <= mismatch <= high else 0.0
            ratio = math.exp(cur - old)
            surrogate = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
            total -= weight * surrogate
            tokens += 1
            weights.append(weight)
    return total / tokens, weights


def icepop_gmc_score(
    rows: list[dict[str, Any]], *, low: float, high: float, cap_per_response: float, constant: int
) -> tuple[float, list[float], int]:
    """The loss of one optimizer step, every token's weight, and how many groups were cut. The group's mass is the sum over its responses of
    the whole response's prox/mu; IcePop only masks."""
    mass = [math.exp(sum(prox - mu for prox, mu in zip(row["prox"], row["mu"], strict=True))) for row in rows]
    total, weights, cut = 0.0, [], set()
    for row, own in zip(rows, mass, strict=True):
        group = [(other["reward"], part) for other, part in zip(rows, mass, strict=True) if other["group"] == row["group"]]
        advantage = row["reward"] - sum(reward for reward, _ in group) / len(group)
        cap, whole = cap_per_response * len(group), sum(part for _, part in group)
        if whole > cap:
            cut.add(row["group"])
        for mu, old, cur in zip(row["mu"], row["old"], row["cur"], strict=True):
            weight = own * min(1.0, cap / whole) if low <= math.exp(old - mu) <= high else 0.0
            total -= weight * advantage * cur
            weights.append(weight)
    return total / (len(rows) * constant), weights, len(cut)


def open_store(run: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{run}/replay.sqlite?mode=ro", uri=True)
