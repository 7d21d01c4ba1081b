"""Two updates of configs/smollm2-cpu.toml: a real small model, end to end."""

from scripts.bench.machine import markdown
from scripts.bench.runs import measure


def table() -> str:
    run = measure("smollm2", ["configs/smollm2-cpu.toml"], **{"learner.updates": 2})
    seconds = run.summary["seconds"]
    parts = [[part, f"{seconds[part]:.1f}"] for part in ("anchor", "update", "publish", "wait", "other", "total")]
    return (
        f"SmolLM2-135M-Instruct, two updates, {run.summary['tokens']['trained']} trained tokens, {run.wall_s:.0f} s in all:\n\n"
        + markdown(["part", "seconds"], parts)
    )
