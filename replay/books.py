"""The books: every stored training rollout by what became of it. produced = trained + dropped + expired + lost + buffered + leased.

`produced` is a counter of its own, raised in the transaction that stores rollouts and written into that transaction's ledger row; the
other terms are counted in the table. So a row that is gone, or came from elsewhere, unbalances them.
"""

import sqlite3
from typing import Any, Protocol

STATES = ("trained", "expired", "lost", "buffered", "leased")


class Readable(Protocol):
    def execute(self, sql: str, values: Any = ..., /) -> sqlite3.Cursor: ...


PRODUCED = "produced"
PROBE_MEAN = "probe_mean {}"
"""Key in `meta`, by fingerprint: the run's baseline for such engines."""
FREED = "payloads_freed"
"""Counter: rollouts whose tokens and log-probs retention has removed."""


def books(db: Readable, produced: float | None = None) -> dict[str, Any]:
    """The `rollouts` of summary.json: {produced, trained, dropped: {reason: n}, expired, lost, buffered, leased}. `produced`: the counter
    as the open transaction has it; default: as it was committed."""
    counts = dict.fromkeys(STATES, 0)
    dropped: dict[str, int] = {}
    for state, reason, count in db.execute("SELECT state, reason, count(*) FROM rollouts GROUP BY state, reason"):
        if state == "dropped":
            dropped[reason] = count
        else:
            counts[state] = counts.get(state, 0) + count
    if produced is None:
        row = db.execute("SELECT value FROM counters WHERE name = ?", (PRODUCED,)).fetchone()
        produced = row[0] if row else sum(counts.values()) + sum(dropped.values())  # a store of before this counter
    return {"produced": int(produced), "trained": counts["trained"], "dropped": dict(sorted(dropped.items())),
            "expired": counts["expired"], "lost": counts["lost"], "buffered": counts["buffered"], "leased": counts["leased"]}


def imbalance(found: dict[str, Any]) -> int:
    """Rollouts that the books do not account for: 0 when they balance."""
    return found["produced"] - sum(found[state] for state in STATES) - sum(found["dropped"].values())
