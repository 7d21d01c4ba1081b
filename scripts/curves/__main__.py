"""`python -m scripts.curves [--only RECIPE]... [--engine none|fp8] [--budget 0|4] [--updates N] [--again] [--keep] [--jobs N]`: run
what is not measured yet at this source, each a real `leeway run` on the demo, N at a time; then write docs/recipes.md anew.

A run that fails is named, and the rest go on. Exit 0: all learned or held; 1: one failed; 3: one ended more than .05 below its
beginning; 130: interrupted.
"""

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

from configs.recipes import RECIPES
from scripts.bench.runs import RUNS, measure
from scripts.curves import rows
from scripts.curves.draw import spark
from scripts.curves.plan import BUDGETS, CONFIG, ENGINES, UPDATES, Case, cases, pointless, settings, source_digest
from scripts.recipe_reference import PAGE, page
from wire.process import INTERRUPTED

FELL = 0.05
LIMIT_S = 900.0
"""A run takes a minute or two on two quiet cores."""


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    some = [case for case in cases() if not (chosen.only and case.recipe not in chosen.only or chosen.engine not in (None, case.engine)
                                             or chosen.budget not in (None, case.budget))]
    pool = ThreadPoolExecutor(chosen.jobs)
    try:
        codes = set(pool.map(lambda case: _case(case, chosen), some))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C: those that run end by it too, and no other begins
        PAGE.write_text(page())
    return next((code for code in (INTERRUPTED, 1, 3) if code in codes), 0)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.curves", description="One real run of every recipe, on the demo.")
    parser.add_argument("--only", action="append", choices=tuple(RECIPES), metavar="RECIPE")
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--budget", type=int, choices=BUDGETS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    parser.add_argument("--keep", action="store_true", help="leave the folder of the run, some 280 MB")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time: two of budget 0 suit two cores")
    return parser.parse_args(arguments)


def _case(case: Case, chosen: argparse.Namespace) -> int:
    if (reason := pointless(case)) is not None:
        print(f"{case}: not run: {reason}", flush=True)
        return 0
    source = source_digest(case, chosen.updates)
    known = rows.read().get(case)
    if known is not None and known["source"] == source and "failed" not in known and not chosen.again:
        return _say(case, known)
    name = f"curve-{case.recipe}-{case.engine}-{case.budget}".replace("_", "-")
    try:
        run = measure(name, [CONFIG], limit_s=LIMIT_S, **(ran_with := settings(case, chosen.updates)))
    except RuntimeError as error:
        if str(error).startswith(f"{name}: exit {INTERRUPTED}\n"):
            return INTERRUPTED
        rows.keep(case, source, {"failed": str(error).strip().splitlines()[-1][:200]})
        print(f"{case}: FAILED\n{error}", flush=True)
        return 1
    result = rows.learned(run, ran_with["learner.lr"])
    rows.keep(case, source, result)
    if not chosen.keep:
        shutil.rmtree(RUNS / f"bench-{name}")
    return _say(case, result)


def _say(case: Case, row: rows.Row) -> int:
    first, last = row["heldout"]["first"]["sampled"], row["heldout"]["last"]["sampled"]
    fell = last < first - FELL
    print(f"{case}: {spark(row['reward'])} held-out {first:.3f} -> {last:.3f}, staleness {row['staleness']}, masked {row['masked']}, "
          f"clipped {row['clipped']}, ESS {row['engine_ess']} engine, {row['staleness_ess']} staleness, {row['updates_per_s']} updates/s"
          f"{': FELL' if fell else ''}", flush=True)
    return 3 if fell else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
