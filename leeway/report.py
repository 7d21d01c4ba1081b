"""`leeway report RUN`: one self-contained page, `<run>/report.html`, read from the store. No script, no external host."""

import html
import json
from pathlib import Path
from typing import Any

from leeway import cards
from leeway.charts import number
from leeway.tools import one_line, tool_parser
from replay.reader import RunReader
from replay.summary import summary

STYLE = (Path(__file__).parent / "report.css").read_text()


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
    records = [(row.update_id, record) for row, record in run.records() if not row.skipped]
    name = html.escape(run.run_dir.resolve().name)
    what = (
        f"{config.recipe.estimator} advantages, {config.recipe.objective} objective, engine corrector {config.recipe.engine}, "
        f"{config.learner.groups_per_update} groups of {config.sampling.n} per update, learning rate {config.learner.lr:g}, "
        f"model {config.model.path} in {config.model.dtype}"
    )
    shown = [
        cards.heldout(run),
        cards.reward(run),
        cards.staleness(run, values),
        cards.age(run, config.replay.max_staleness),
        *cards.learner(records),
        cards.time(values, records),
        f'<div class="stack">{cards.books(values)}{cards.sources(values)}</div>',
        cards.alarms(run),
        cards.discarded(run),
        cards.actors(run),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name} – Leeway</title><style>{STYLE}</style></head><body><main><h1>{name}</h1>"
        f'<p class="what">{html.escape(what)}</p><div class="tiles">{tiles(values)}</div><div class="cards">{"".join(shown)}</div>'
        f"<details><summary>Resolved config</summary><pre>{html.escape(config.model_dump_json(indent=1))}</pre></details>"
        f"<details><summary>summary.json</summary><pre>{html.escape(json.dumps(values, indent=1))}</pre></details></main></body></html>\n"
    )


def tiles(values: dict[str, Any]) -> str:
    first, last = values["heldout"]["first"], values["heldout"]["last"]
    tokens, seconds = values["tokens"], values["seconds"]
    during = tokens["generated_during_updates"]
    shown = [
        (f"{number(first['sampled'])} → {number(last['sampled'])}", "held-out accuracy, sampled"),
        (f"{number(first['greedy'])} → {number(last['greedy'])}", "held-out accuracy, greedy"),
        (number(values["updates"]), f"updates ({number(values['updates_skipped'])} skipped), status: {values['status']}"),
        (
            f"{number(values['mean_staleness_trained'], 2)} / {number(values['max_staleness_trained'])}",
            f"mean / oldest trained staleness, budget {values['max_staleness']}",
        ),
        (number(tokens["trained"]), f"trained tokens of {number(tokens['generated'])} generated"),
        (
            "–" if during is None or not tokens["generated"] else f"{during / tokens['generated']:.0%}",
            "of tokens generated while an update ran",
        ),
        (f"{number(seconds['total'], 3)} s", "learner time"),
    ]
    return "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>' for value, label in shown)


def _status(run: RunReader) -> str:
    path = run.run_dir / "summary.json"
    return json.loads(path.read_text())["status"] if path.is_file() else "running"


def main(arguments: list[str]) -> int:
    options = tool_parser("leeway report", __doc__).parse_args(arguments)

    def body() -> int:
        print(write_report(options.run))
        return 0

    return one_line(body)
