"""`leeway report RUN`: one self-contained page, `<run>/report.html`, read from the store. No script, no external host."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leeway import charts
from leeway.charts import Series, columns, lines, number, share_bar, smooth
from leeway.tools import one_line, tool_parser
from replay.reader import EvalRow, RunReader
from replay.summary import TRAINED_SPANS, summary

STYLE = (Path(__file__).parent / "report.css").read_text()
Points = list[tuple[float, float | None]]
SECONDS = ("anchor", "update", "publish", "wait", "other")


def write_report(run_dir: Path) -> Path:
    """Write `<run>/report.html` and return its path. Raises ConfigError when there is no run."""
    target = run_dir / "report.html"
    with RunReader(run_dir) as run:
        target.write_text(page(run))
    return target


def page(run: RunReader) -> str:
    """The whole page as HTML."""
    config = run.config()
    values = summary(run.run_dir, _status(run))
    records = [(row.update_id, json.loads(row.record)) for row, _ in run.records() if not row.skipped]
    name = html.escape(run.run_dir.resolve().name)
    what = (f"{config.recipe.estimator} advantages, {config.recipe.objective} objective, engine corrector {config.recipe.engine}, "
            f"{config.learner.groups_per_update} groups of {config.sampling.n} per update, learning rate {config.learner.lr:g}, "
            f"model {config.model.path} in {config.model.dtype}")
    cards = [
        heldout_card(run), reward_card(run), staleness_card(run, values), age_card(run, config.replay.max_staleness),
        mismatch_card(records), ess_card(records), masked_card(records), loss_card(records),
        time_card(values, records), discarded_card(run), books_card(values), sources_card(values), actors_card(run)]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{name} – Leeway</title><style>{STYLE}</style></head><body><main><h1>{name}</h1>"
            f'<p class="what">{html.escape(what)}</p><div class="tiles">{tiles(values)}</div><div class="cards">{"".join(cards)}</div>'
            f"<details><summary>Resolved config</summary><pre>{html.escape(json.dumps(config.model_dump(mode='json'), indent=1))}</pre></details>"
            f"<details><summary>summary.json</summary><pre>{html.escape(json.dumps(values, indent=1))}</pre></details></main></body></html>\n")


def tiles(values: dict[str, Any]) -> str:
    first, last = values["heldout"]["first"], values["heldout"]["last"]
    tokens, seconds = values["tokens"], values["seconds"]
    during = tokens["generated_during_updates"]
    shown = [
        (f"{number(first['sampled'])} → {number(last['sampled'])}", "held-out accuracy, sampled"),
        (f"{number(first['greedy'])} → {number(last['greedy'])}", "held-out accuracy, greedy"),
        (number(values["updates"]), f"updates ({number(values['updates_skipped'])} skipped), status: {values['status']}"),
        (f"{number(values['mean_staleness_trained'], 2)} / {number(values['max_staleness_trained'])}",
         f"mean / oldest trained staleness, budget {values['max_staleness']}"),
        (number(tokens["trained"]), f"trained tokens of {number(tokens['generated'])} generated"),
        ("–" if during is None or not tokens["generated"] else f"{during / tokens['generated']:.0%}", "of tokens generated while an update ran"),
        (f"{number(seconds['total'], 3)} s", "learner time"),
    ]
    return "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>' for value, label in shown)


def card(title: str, why: str, body: str, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(title)}</h2><p class="why">{html.escape(why)}</p>{body}</section>'


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """An HTML table; columns from `left` on are numbers."""
    def line(tag: str, cells: Sequence[Any]) -> str:
        shown = [c if isinstance(c, str) else number(c) for c in cells]
        return "<tr>" + "".join(f'<{tag}{" class=n" if i >= left else ""}>{html.escape(c)}</{tag}>' for i, c in enumerate(shown)) + "</tr>"
    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def heldout_card(run: RunReader) -> str:
    done = list(run.read(EvalRow, "state = 'done'"))
    chart = lines([Series("sampled", [(e.updates, e.sampled) for e in done], dots=True),
                   Series("greedy", [(e.updates, e.greedy) for e in done], dots=True)], x_label="update", zero=True, bounds=(0.0, 1.0))
    return card("Held-out accuracy", "Answered by the engine with exactly the named version's weights; never trained on.", chart)


def reward_card(run: RunReader) -> str:
    points: Points = run.sql("SELECT update_id, avg(reward) FROM rollouts WHERE state = 'trained' GROUP BY update_id")  # type: ignore[assignment]
    window = max(1, len(points) // 20)
    return card("Reward", f"Mean reward of the rollouts of each update, and its mean over {window} updates.",
                lines([Series("per update", points, faint=True, colour=0), Series("smoothed", smooth(points, window), colour=0)], x_label="update"))


def staleness_card(run: RunReader, values: dict[str, Any]) -> str:
    ages = dict(run.sql(f"SELECT age, sum(tokens) FROM ({TRAINED_SPANS}) GROUP BY age"))
    shown = [(str(age), float(ages.get(age, 0))) for age in range(max([values["max_staleness"], *ages]) + 1)]
    return card("Staleness of trained tokens", f"Versions between the weights that sampled a token and those that trained it. "
                                               f"The budget is {values['max_staleness']}.", columns(shown, unit="tokens"))


def age_card(run: RunReader, budget: int) -> str:
    rows = run.sql(f"""SELECT update_id, sum(age * tokens) * 1.0 / sum(tokens), max(age) FROM
                       ({TRAINED_SPANS.replace("SELECT ", "SELECT update_id, ", 1)}) GROUP BY update_id""")
    return card("Staleness over the run", "Mean over the trained tokens of each update, and its oldest token.",
                lines([Series("mean", [(u, mean) for u, mean, _ in rows]), Series("oldest", [(u, age) for u, _, age in rows], colour=4)],
                      x_label="update", zero=True, rule=(budget, f"budget {budget}")))


def time_card(values: dict[str, Any], records: list[tuple[int, dict[str, Any]]]) -> str:
    totals = [(name, values["seconds"][name] or 0.0, colour) for colour, name in enumerate(SECONDS)]
    rows = [[name, *(charts.quantile([r["seconds"].get(name, 0.0) * 1000 for _, r in records], q) for q in (0.5, 0.9))] for name in SECONDS]
    busy = values["seconds"]["engine_busy"]
    body = share_bar(totals, "s") + table(["per update, ms", "median", "90 %"], rows) + f'<p class="legend">Engines busy: {number(busy)} s in all.</p>'
    return card("Where the learner's time went", "Rank 0's wall-clock: anchors (old log-probs), update, publishing weights, waiting for rollouts.", body)


def discarded_card(run: RunReader) -> str:
    rows = run.sql("""SELECT state || coalesce(' (' || reason || ')', ''), count(*), avg(response_len), avg(reward) FROM rollouts
                      WHERE state IN ('trained', 'dropped', 'expired', 'lost') GROUP BY state, reason ORDER BY state = 'trained' DESC, 1""")
    return card("Trained beside discarded", "Dropping slow rollouts biases the data towards short answers: compare length and reward.",
                table(["outcome", "rollouts", "mean tokens", "mean reward"], rows))


def books_card(values: dict[str, Any]) -> str:
    books = values["rollouts"]
    parts = [("trained", books["trained"], 2), *((f"dropped: {reason}", n, 5) for reason, n in books["dropped"].items()),
             ("expired", books["expired"], 1), ("lost", books["lost"], 3), ("buffered", books["buffered"], 0), ("leased", books["leased"], 4)]
    beside = (f"Beside the books: {number(values['duplicates_refused'])} duplicates refused, {number(values['quarantined'])} quarantined, "
              f"{number(values['trained_twice'])} trained twice.")
    return card("Books", f"Every one of {number(books['produced'])} stored rollouts is accounted for.",
                share_bar(parts, "") + f'<p class="legend">{beside}</p>')


def sources_card(values: dict[str, Any]) -> str:
    parts = [(source, tokens, colour) for colour, (source, tokens) in enumerate(values["old_sources"].items())]
    return card("Where old log-probs came from", "resident: scored while the live weights were that version. snapshot: restored from the version store.",
                share_bar(parts, "tokens"))


def actors_card(run: RunReader) -> str:
    rows = run.sql("""SELECT a.name, count(r.rollout_id), sum(r.response_len), a.confirmed, a.probe_mean, a.probe_max
                      FROM actors a LEFT JOIN rollouts r ON r.actor = a.name GROUP BY a.name ORDER BY a.name""")
    return card("Actors", "Probe: difference between the engine's and the learner's log-probs at the last version loaded.",
                table(["actor", "rollouts", "tokens", "version", "probe mean", "probe max"], rows))


def _status(run: RunReader) -> str:
    path = run.run_dir / "summary.json"
    return json.loads(path.read_text())["status"] if path.is_file() else "running"


def main(arguments: list[str]) -> int:
    options = tool_parser("leeway report", __doc__).parse_args(arguments)

    def body() -> int:
        print(write_report(options.run))
        return 0

    return one_line(body)
