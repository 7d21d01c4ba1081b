"""The books: every stored training rollout by what became of it. produced = trained + dropped + expired + lost + buffered + leased."""

import sqlite3
from typing import Any, Protocol

STATES = ("trained", "expired", "lost", "buffered", "leased")


class Readable(Protocol):
    def execute(self, sql: str, values: Any = ..., /) -> sqlite3.Cursor: ...


def books(db: Readable) -> dict[str, Any]:
    """The `rollouts` of summary.json: {produced, trained, dropped: {reason: n}, expired, lost, buffered, leased}."""
    counts = dict.fromkeys(STATES, 0)
    dropped: dict[str, int] = {}
    for state, reason, count in db.execute("SELECT state, reason, count(*) FROM rollouts GROUP BY state, reason"):
        if state == "dropped":
            dropped[reason] = count
        else:
            counts[state] = counts.get(state, 0) + count
    produced = db.execute("SELECT count(*) FROM rollouts").fetchone()[0]
    return {"produced": produced, "trained": counts["trained"], "dropped": dict(sorted(dropped.items())),
            "expired": counts["expired"], "lost": counts["lost"], "buffered": counts["buffered"], "leased": counts["leased"]}


def imbalance(found: dict[str, Any]) -> int:
    """Rollouts that the books do not account for: 0 when they balance."""
    return found["produced"] - sum(found[state] for state in STATES) - sum(found["dropped"].values())
