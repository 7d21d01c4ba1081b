"""Budgets 0 and 2 when a verdict takes a seeded, long-tailed 0.2 to 3 s per group: where asynchrony has to pay."""

from scripts.bench.machine import markdown
from scripts.bench.runs import measure

UPDATES = 40


def table() -> str:
    settings = {
        "task.verifier": "scripts.bench.slow_verdict:delayed_exact",
        "actor.verifier_slots": 32,
        "actor.orders_per_request": 8,
        "actor.requests_in_flight": 8,
        "learner.updates": UPDATES,
        "eval.prompts": 4,
        "eval.greedy": False,
    }
    runs = {
        budget: measure(f"slow-{budget}", ["configs/tiny-cpu.toml"], **settings, **{"replay.max_staleness": budget}) for budget in (0, 2)
    }
    base = runs[0].updates_per_s
    return (
        "With a verdict that takes 0.2 to 3 s per group (log-normal, seeded), and as many verifier slots (32) as groups in a batch, so "
        "that the synchronous run judges all of them at once:\n\n"
    ) + markdown(
        ["max_staleness", "updates/s", "x budget 0", "mean staleness"],
        [
            [str(b), f"{r.updates_per_s:.2f}", f"{r.updates_per_s / base:.2f}", f"{r.summary['mean_staleness_trained']:.2f}"]
            for b, r in runs.items()
        ],
    )
