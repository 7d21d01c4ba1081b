"""The curves as they stand in docs/recipes.md."""

from configs.recipes import RECIPES
from scripts.curves.plan import BUDGETS, ENGINES, LR, UPDATES, WARMUP, Case, pointless
from scripts.curves.rows import Row, read

BARS = "▁▂▃▄▅▆▇█"
LOW, HIGH = 0.35, 0.65
POINTS = 10
ENGINE_NAMES = {"none": "fp32", "fp8": "fp8-rounded"}


def curves() -> str:
    """The section of the page: what was run, and one line per recipe."""
    found = read()
    columns = [(engine, budget) for engine in ENGINES for budget in BUDGETS]
    head = ["recipe", *(f"{ENGINE_NAMES[engine]}, budget {budget}" for engine, budget in columns)]
    lines = [head, ["---"] * len(head)]
    for recipe in RECIPES:
        some = [Case(recipe, engine, budget) for engine, budget in columns]
        lines.append([f"`{recipe}`", *(cell(found.get(case), pointless(case)) for case in some)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{HEAD}\n{_count(found)}\n\n{table}\n"


def cell(row: Row | None, reason: str | None) -> str:
    if reason is not None:
        return reason
    if row is None:
        return "not run"
    if "failed" in row:
        return f"failed: {row['failed']}".replace("|", "/")
    first, last = row["heldout"]["first"]["sampled"], row["heldout"]["last"]["sampled"]
    usual = (f"lr {LR:g}", f"warm-up {WARMUP}", f"{UPDATES} updates")
    ran_with = f"lr {row.get('lr', LR):g}", f"warm-up {row['warmup']}", f"{row['updates']} updates"
    other = [text for text in ran_with if text not in usual]
    return "<br>".join([spark(row["reward"]), f"{first:.2f} → {last:.2f}", *other])


def spark(values: list[float], points: int = POINTS) -> str:
    """At most `points` bars, each the mean of its share of the values; LOW or less is the lowest bar, HIGH or more the highest."""
    points = min(points, len(values))
    edges = [len(values) * k // points for k in range(points + 1)] if points else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int((mean - LOW) / (HIGH - LOW) * len(BARS))))] for mean in means)


def _count(found: dict[Case, Row]) -> str:
    due = [Case(recipe, engine, budget) for recipe in RECIPES for engine in ENGINES for budget in BUDGETS]
    due = [case for case in due if pointless(case) is None]
    done = [found[case] for case in due if case in found and "failed" not in found[case]]
    dates = sorted({row["measured"] for row in done})
    when = f", measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    return f"{len(done)} of {len(due)} have been run{when}."


HEAD = f"""## How each one learns on the demo

`make curves` (and `make torture`) runs every recipe for {UPDATES} updates on the demo: 32 groups of 8, lr {LR:g} after {WARMUP} updates of
warm-up, falling to a twentieth; on the fp32 engine and on one whose weights are rounded to fp8 (`actor.round_weights`), at staleness
budgets 4 and 0. `docs/recipe-curves.jsonl` holds the numbers: the reward of every update, shares of masked and clipped tokens,
effective sample sizes, and a digest of settings and code: what is measured at the present digest is not run again.

A bar is the mean reward of {UPDATES // POINTS} updates ({LOW} or less to {HIGH} or more); below it the share of 128 held-out problems
answered right when sampled, before the first and after the last update (8 samples each; two such runs differ by some .02 by chance
alone). A cell that names a rate, a warm-up or a number of updates was run with that one. One seed each, and {UPDATES} updates are few:
a small difference between two recipes means nothing here. What the table is for: that a recipe runs, learns, and survives stale samples
and a rounded engine.

With `dynamic_sampling` the reward is that of groups with contrast only. `dapo` has one token more than the longest answer, since its
overlong punishment would else meet every right answer of three digits. `gppo` has a sixth of the rate: a wrong token that has become
less likely than its clip allows keeps a gradient of full size, however small its ratio, and on stale samples at the usual rate that runs
away (at budget 4 from .44 down to .12; to .55 with `clip_low = 1`, which leaves such tokens their own ratio).

On the fp8-rounded engine `geo_rs` has bounds of .98 and 1.02 and `carm` 1.03: theirs are for means over thousands of tokens, and of these
4-token answers they drop 87 % and 46 %, after which what was left taught little or did harm (budgets 4 and 0: `geo_rs` .44 to .43 and .32,
`carm` .44 to .50 and .47). `cispo` there at budget 4 fell in one of five runs, .44 to .41, and rose in the others. How old the tokens of
a run were (`staleness`, here 2.8 to 3.8 on average at budget 4; 1.5 was seen) depends on what else the machine does.
"""
