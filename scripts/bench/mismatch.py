"""Engine mismatch at equal weights: synchronous runs, so that `old` and `mu` come from the same version;
log(old/mu) over every trained token."""

import sqlite3

import numpy as np

from scripts.bench.machine import markdown
from scripts.bench.runs import RUNS, measure

UPDATES = 6
ENGINES = {
    "float32 / float32": {"actor.dtype": "float32", "model.dtype": "float32"},
    "bfloat16 / float32": {"actor.dtype": "bfloat16", "model.dtype": "float32"},
    "bfloat16 / bfloat16": {"actor.dtype": "bfloat16", "model.dtype": "bfloat16"},
    "fp8-rounded float32 / float32": {"actor.dtype": "float32", "model.dtype": "float32", "actor.round_weights": "fp8"},
}


def table() -> str:
    rows = []
    for index, (engine, settings) in enumerate(ENGINES.items()):
        name = f"mismatch-{index}"
        measure(name, ["configs/tiny-cpu.toml"], **settings, **{"replay.max_staleness": 0, "learner.updates": UPDATES, "eval.prompts": 4})
        rows.append([engine, *_row(stored_log_ratio(name))])
    return "log(old/mu) at equal weights, from the store of synchronous runs:\n\n" + markdown(
        ["engine / trainer", "tokens", "mean", "mean abs", "max abs", "k3", "ESS", "outside [0.5, 2]"], rows
    )


def stored_log_ratio(name: str) -> np.ndarray:
    """old - mu of every scored span in the run's store, float64."""
    with sqlite3.connect(f"file:{RUNS}/bench-{name}/replay.sqlite?mode=ro", uri=True) as db:
        found = db.execute("""SELECT s.old, s.start, s."end", r.payload, json_extract(r.head, '$.prompt_len'), r.response_len
                              FROM spans s JOIN rollouts r USING (rollout_id)
                              WHERE s.old IS NOT NULL AND r.payload IS NOT NULL""").fetchall()
    parts = []
    for old, start, end, payload, prompt, response in found:
        mu = np.frombuffer(payload, "<f4", response, 4 * (prompt + response))
        parts.append(np.frombuffer(old, "<f4").astype(np.float64) - mu[start:end])
    return np.concatenate(parts)


def _row(x: np.ndarray) -> list[str]:
    ratio = np.exp(x)
    ess = ratio.sum() ** 2 / (len(x) * (ratio**2).sum())
    return [
        str(len(x)),
        f"{x.mean():.1e}",
        f"{abs(x).mean():.1e}",
        f"{abs(x).max():.1e}",
        f"{(ratio - 1 - x).mean():.1e}",
        f"{ess:.4f}",
        f"{((ratio < 0.5) | (ratio > 2)).mean():.2%}",
    ]
