"""One line of metrics.jsonl per update: committed in the update's row, then appended to the file; what a crash kept from it is appended
at the next start."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from replay.core import Core
from replay.store import Store
from wire.errors import StoreError
from wire.messages import UpdateRecord

SELECT_SCORED = ("SELECT reward, oldest_version, response_len FROM rollouts WHERE group_id IN (SELECT value FROM json_each(?)) "
                 "AND reward IS NOT NULL")


def metrics_line(core: Core, record: UpdateRecord) -> dict[str, Any]:
    """Everything that the learner measured, and what only replay knows: rewards, staleness, tokens per second, who waited."""
    rows = core.store.rows(SELECT_SCORED, json.dumps(record.group_ids))
    rewards = np.array([reward for reward, _, _ in rows])
    ages = [record.version_in - oldest for _, oldest, _ in rows]
    tokens = core.store.counters.get("tokens_generated", 0)
    elapsed, made = core.since_last_update(tokens)
    idle = {session.name: core.idle_share(session, elapsed) for session in core.sessions.of("actor")}
    return {
        **record.metrics, "update": record.update, "stepped": core.stepped, "skipped": record.skipped, "version_in": record.version_in,
        "version_out": record.version_out, "time": core.clock.wall(), "reward": float(rewards.mean()), "reward_std": float(rewards.std()),
        "response_len": float(np.mean([length for _, _, length in rows])),
        "staleness": {"mean": float(np.mean(ages)), "max": max(ages),
                      "histogram": {str(age): count for age, count in sorted(Counter(ages).items())}},
        "tokens_per_s": made / elapsed if elapsed else None, "seconds": record.seconds, "seconds_since_last": elapsed or None,
        "actor_idle": idle,
        "waits": who_waits(record.seconds.get("wait", 0.0), elapsed, idle),
    }


def who_waits(learner_wait_s: float, elapsed_s: float, actors_idle: dict[str, float]) -> str:
    """The side that waited the larger share of the time between two updates; nobody when neither waited a tenth of it."""
    learner = learner_wait_s / elapsed_s if elapsed_s else 0.0
    actors = sum(actors_idle.values()) / len(actors_idle) if actors_idle else 0.0
    if max(learner, actors) < 0.1:
        return "nobody"
    return "learner" if learner >= actors else "actors"


class MetricsFile:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "metrics.jsonl"

    def append(self, lines: list[str]) -> None:
        """Raises StoreError; the file is then as it was before, and the lines are made again from the store at the next start."""
        if not lines:
            return
        try:
            with self.path.open("ab", buffering=0) as file:
                size, left = file.tell(), "".join(line + "\n" for line in lines).encode()
                try:
                    while left:
                        left = left[file.write(left):]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}; the update is committed, and its line is written at the "
                             "next start") from None

    def recover(self, store: Store) -> None:
        """Cut a half-written last line, and append the lines of committed updates that are not in the file."""
        last = 0
        if self.path.exists():
            body = self.path.read_bytes()
            whole = body.rfind(b"\n") + 1
            if whole != len(body):
                os.truncate(self.path, whole)
            if whole:
                last = json.loads(body[:whole].splitlines()[-1])["update"]
        self.append([text for text, in store.rows("SELECT metrics FROM updates WHERE update_id > ? ORDER BY update_id", last)])
