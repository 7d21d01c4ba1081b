"""`summary.json`: what a run came to, recomputed from its store. Unknown values are null."""

import json
import os
from pathlib import Path
from typing import Any

from configs.load import load_resolved
from replay.books import books
from replay.reader import RunReader
from wire.digest import digest_json
from wire.manifest import fsync

SCHEMA = 1
SECONDS = ("total", "anchor", "update", "publish", "wait", "other")

TRAINED_SPANS = """SELECT update_id, u.version_in - s.version AS age, s."end" - s.start AS tokens, s.source
    FROM rollouts r JOIN updates u USING (update_id) JOIN spans s USING (rollout_id)
    WHERE r.state = 'trained' AND s.source IS NOT NULL AND s.source != 'missing'"""
"""A trained token is a token of a trained rollout that has an anchor, before corrector masks."""

REPORTED_SECONDS = """SELECT json_extract(record, '$.seconds') FROM updates
    UNION ALL SELECT json_extract(body, '$.seconds') FROM ledger WHERE kind = 'finished'"""

ENGINE_BUSY = """SELECT sum(json_extract(head, '$.engine_seconds')) FROM
    (SELECT head FROM rollouts UNION ALL SELECT head FROM eval_rollouts)"""

TRAINED_TWICE = """SELECT count(*) FROM (SELECT 1 FROM updates, json_each(record, '$.rollout_ids')
    WHERE state = 'committed' AND NOT skipped GROUP BY value HAVING count(*) > 1)"""


def summary(run_dir: Path, status: str) -> dict[str, Any]:
    """The fields of `summary.json`. `status`: done | interrupted | failed. Works on a live store. ConfigError when there is no run."""
    with RunReader(run_dir) as run:
        config = run.config()
        stepped, skipped = run.sql(
            "SELECT coalesce(sum(NOT skipped), 0), coalesce(sum(skipped), 0) FROM updates WHERE state = 'committed'"
        )[0]
        tokens, oldest, mean = run.sql(
            f"SELECT coalesce(sum(tokens), 0), max(age), 1.0 * sum(age * tokens) / sum(tokens) FROM ({TRAINED_SPANS})"
        )[0]
        counters = run.counters()
        return {
            "schema": SCHEMA,
            "status": status,
            "updates": stepped,
            "updates_skipped": skipped,
            "version_final": run.one("SELECT max(version) FROM versions WHERE state = 'live'"),
            "max_staleness": config.replay.max_staleness,
            "max_staleness_trained": oldest,
            "mean_staleness_trained": mean,
            "heldout": heldout(run),
            "rollouts": books(run.db),
            "duplicates_refused": int(counters.get("duplicates_refused", 0)),
            "quarantined": run.one("SELECT count(*) FROM quarantine"),
            "trained_twice": run.one(TRAINED_TWICE),
            "old_sources": dict(run.sql(f"SELECT source, sum(tokens) FROM ({TRAINED_SPANS}) GROUP BY source ORDER BY source")),
            "tokens": {
                "generated": run.one("SELECT coalesce(sum(response_len), 0) FROM rollouts"),
                "trained": tokens,
                "generated_during_updates": round(counters.get("tokens_generated_during_updates", 0))
                if "tokens_generated" in counters
                else None,
            },
            "seconds": seconds(run),
            "actors": run.one("SELECT count(*) FROM actors"),
            "seed": config.run.seed,
            "config_digest": config_digest(run_dir),
            "ledger_head": run.ledger_head(),
        }


def write_summary(run_dir: Path, status: str) -> dict[str, Any]:
    """Write `<run>/summary.json` atomically (temporary name, fsync, rename) and return what it holds."""
    values = summary(run_dir, status)
    target, temporary = run_dir / "summary.json", run_dir / ".summary.json.tmp"
    temporary.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    fsync(temporary)
    os.replace(temporary, target)
    fsync(run_dir)
    return values


def heldout(run: RunReader) -> dict[str, dict[str, float | None]]:
    """Accuracy at the first and at the newest finished evaluation."""
    done = run.sql("SELECT sampled, greedy FROM evals WHERE state = 'done' ORDER BY eval_id")
    first, last = (done[0], done[-1]) if done else ((None, None), (None, None))
    return {"first": {"sampled": first[0], "greedy": first[1]}, "last": {"sampled": last[0], "greedy": last[1]}}


def seconds(run: RunReader) -> dict[str, float | None]:
    """Rank 0's seconds as the learner reported them: with each update, lost ones too, and at its end. Null when nothing was reported."""
    reported = [json.loads(text) for (text,) in run.sql(REPORTED_SECONDS)]
    sums: dict[str, float | None] = {
        name: sum(one[name] for one in reported if name in one) if any(name in one for one in reported) else None for name in SECONDS
    }
    return {**sums, "engine_busy": run.one(ENGINE_BUSY)}


def config_digest(run_dir: Path) -> str:
    """Digest of the resolved config in the run, as plain JSON."""
    return digest_json(load_resolved(run_dir / "config.json").model_dump(mode="json"))
