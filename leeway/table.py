"""How a run stands, as a live table on a terminal and as one plain line elsewhere. Pure: values in, text out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wire.text import printable

Values = Mapping[str, Any]
UNKNOWN = "-"
UNCOMMITTED = "no version committed yet"
WAITS = {"learner": "the learner waits for rollouts", "actors": "the actors wait for the learner"}


def number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1e}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class View(NamedTuple):
    """What the table shows, out of replay's live values (`replay/live.py`)."""

    update: int
    reward: float | None
    first: tuple[float | None, float | None]
    last: tuple[float | None, float | None]
    """(sampled, greedy) of the first and the newest finished evaluation."""
    age_mean: float | None
    age_max: int | None
    budget: int | None
    mismatch: float | None
    waits: str
    alarms: Mapping[str, str]


def view(values: Values, stalled: bool) -> View:
    metrics, evaluations = values.get("metrics") or {}, values.get("heldout") or []
    accuracies = [(row["sampled"], row["greedy"]) for row in evaluations] or [(None, None)]
    ages = metrics.get("staleness") or {}
    return View(
        update=values.get("updates", 0), reward=metrics.get("reward"), first=accuracies[0], last=accuracies[-1], age_mean=ages.get("mean"),
        age_max=ages.get("max"), budget=values.get("max_staleness"), mismatch=(metrics.get("mismatch") or {}).get("mean_abs"),
        waits=waits(values, metrics, stalled), alarms=metrics.get("alarms") or {})


def waits(values: Values, metrics: Values, stalled: bool) -> str:
    """Who waited for whom at the last update; before the first one, while an evaluation runs, and when nothing moves: what is awaited."""
    running = [evaluation for evaluation in values.get("evals") or [] if evaluation["actor"]]
    if running:
        return f"evaluation of version {running[0]['version']}: {running[0]['answered']} of {running[0]['total']} answers"
    if not metrics or stalled:
        return values.get("awaited") or (UNKNOWN if values else "for replay to start")
    return WAITS.get(metrics.get("waits", ""), "nobody waits")


def staleness(shown: View) -> str:
    return f"{number(shown.age_mean, 2)} / {number(shown.age_max, 0)} / {number(shown.budget, 0)}"


def accuracy(pair: tuple[float | None, float | None]) -> str:
    return f"{number(pair[0], 3)} ({number(pair[1], 3)})"


def plain_line(values: Values, updates: int, seconds: float, rate: float | None, stalled: bool = False) -> str:
    """One line: update, reward, held-out sampled (greedy), staleness mean/oldest/budget, mismatch, tokens/s, who waits."""
    shown = view(values, stalled)
    return (f"{clock(seconds):>6}  update {shown.update}/{updates}  reward {number(shown.reward, 3)}  heldout {accuracy(shown.last)}  "
            f"staleness {staleness(shown)}  mismatch {small(shown.mismatch)}  {number(rate, 0)} tokens/s  {shown.waits}")


def live(values: Values, updates: int, seconds: float, name: str, lines: list[str], rate: float | None,
         stalled: bool = False) -> RenderableType:
    """The table, a progress bar, and the newest `lines` of what happened."""
    shown = view(values, stalled)
    table = two_columns(
        ("update", f"{shown.update} of {updates}"),
        ("reward", number(shown.reward, 3)),
        ("held-out accuracy", f"{accuracy(shown.last)}   at first {accuracy(shown.first)}   sampled (greedy)"),
        ("staleness", f"{staleness(shown)}   mean / oldest / budget"),
        ("mismatch", f"{small(shown.mismatch)}   mean |old - mu|"),
        ("tokens/s", number(rate, 0)),
        ("waits", shown.waits),
        *((f"ALARM {name}", text) for name, text in shown.alarms.items()))
    body = Table.grid()
    body.add_row(table)
    body.add_row("")
    body.add_row(ProgressBar(total=updates, completed=shown.update, width=60))
    for line in lines:
        body.add_row(Text(printable(line), style="dim"))
    return Panel(body, title=f"{name}  {clock(seconds)}", title_align="left", expand=False)


def two_columns(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _next(summary: Values, run_dir: str) -> str:
    if summary["status"] == "interrupted":
        return "the same command with --resume goes on"
    if summary["status"] == "failed" and summary["version_final"] is None:
        return f"mend the cause, then `rm -r {run_dir}` and start again: nothing was generated"
    return f"leeway audit {run_dir}; leeway report {run_dir}"


def final(summary: Values, run_dir: str) -> RenderableType:
    """The last panel: what the run came to and where its files are."""
    books, tokens = summary["rollouts"], summary["tokens"]
    first, last = summary["heldout"]["first"], summary["heldout"]["last"]
    during, generated = tokens["generated_during_updates"], tokens["generated"]
    table = two_columns(
        ("updates", f"{summary['updates']} ({summary['updates_skipped']} skipped), "
                    + (UNCOMMITTED if summary["version_final"] is None else f"version {summary['version_final']}")),
        *(("held-out " + which, f"{number(first[which], 3)} -> {number(last[which], 3)}")
          for which in ("sampled", "greedy") if first[which] is not None or last[which] is not None),
        ("staleness", f"mean {number(summary['mean_staleness_trained'], 2)}, oldest {number(summary['max_staleness_trained'], 0)}, "
                      f"budget {summary['max_staleness']}"),
        ("rollouts", f"{books['produced']} produced, {books['trained']} trained, {sum(books['dropped'].values())} dropped, "
                     f"{books['expired']} expired, {books['lost']} lost, {books['buffered'] + books['leased']} waiting"),
        ("asynchrony", UNKNOWN if during is None or not generated else
         f"{during / generated:.0%} of {generated} tokens generated while an update ran"),
        ("record", f"{run_dir}/summary.json, metrics.jsonl, replay.sqlite"),
        ("model", f"{run_dir}/model" if summary["status"] == "done" else "not exported: the run is not done"),
        ("logs", f"{run_dir}/logs"),
        ("next", _next(summary, run_dir)))
    return Panel(table, title=str(summary["status"]), title_align="left", expand=False)
