"""Budgets 0, 1, 2, 4 on the demo after equal wall-clock, and where each update's time goes.

A short run at each budget gives its rate; a second run makes as many updates as fit into the same wall-clock at that rate, with the
learning rate decaying to its end, so that every budget is judged at the end of its own schedule.
"""

from scripts.bench.machine import markdown
from scripts.bench.runs import Measured, measure

BUDGETS = (0, 1, 2, 4)
SHORT_UPDATES = 40
EQUAL_S = 75.0
PARTS = ("anchor", "update", "publish", "wait", "other")


def table() -> str:
    runs = {}
    for budget in BUDGETS:
        short = measure(
            f"rate-{budget}",
            ["configs/tiny-cpu.toml"],
            **{"replay.max_staleness": budget, "learner.updates": SHORT_UPDATES, "eval.prompts": 16},
        )
        runs[budget] = measure(
            f"budget-{budget}",
            ["configs/tiny-cpu.toml"],
            **{"replay.max_staleness": budget, "learner.updates": max(1, round(EQUAL_S * short.updates_per_s))},
        )
    base = runs[0].updates_per_s
    head = [
        "max_staleness",
        "updates",
        "RL s",
        "updates/s",
        "x budget 0",
        "tokens/s",
        "mean staleness",
        "generated during updates",
        "held-out sampled",
        "greedy",
    ]
    return (
        f"After equal wall-clock ({EQUAL_S:.0f} s of RL at each budget's own rate):\n\n"
        + markdown(head, [_row(b, run, base) for b, run in runs.items()])
        + "\n\nWhere rank 0's time goes, milliseconds per update:\n\n"
        + markdown(["max_staleness", *PARTS, "total"], [_parts(budget, run) for budget, run in runs.items()])
    )


def _row(budget: int, run: Measured, base: float) -> list[str]:
    summary = run.summary
    first, last = summary["heldout"]["first"], summary["heldout"]["last"]
    share = (summary["tokens"]["generated_during_updates"] or 0) / max(1, summary["tokens"]["generated"])
    return [
        str(budget),
        str(summary["updates"]),
        f"{run.rl_s:.0f}",
        f"{run.updates_per_s:.2f}",
        f"{run.updates_per_s / base:.2f}",
        f"{run.tokens_per_s:.0f}",
        f"{summary['mean_staleness_trained']:.2f}",
        f"{share:.0%}",
        f"{first['sampled']:.2f} -> {last['sampled']:.2f}",
        f"{first['greedy']:.2f} -> {last['greedy']:.2f}",
    ]


def _parts(budget: int, run: Measured) -> list[str]:
    seconds, updates = run.summary["seconds"], run.summary["updates"]
    return [str(budget), *(f"{1000 * seconds[part] / updates:.0f}" for part in (*PARTS, "total"))]
