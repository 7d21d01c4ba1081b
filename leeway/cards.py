"""The cards of the report: a title, a sentence that says what is shown, a chart or a table."""

import html
from collections.abc import Sequence
from typing import Any

from leeway import drift
from leeway.alarms import raised
from leeway.charts import Series, columns, lines, number, quantile, share_bar, smooth
from replay.reader import RunReader
from replay.rows import EvalRow
from replay.summary import TRAINED_SPANS

Points = list[tuple[float, float | None]]
Records = list[tuple[int, dict[str, Any]]]
"""(update id, record) of the stepped updates."""
FACTORS = (("engine mismatch", "mismatch"), ("staleness", "staleness_ratio"), ("update", "update_ratio"))
SECONDS = ("anchor", "update", "publish", "wait", "other")


def card(title: str, why: str, body: str, wide: bool = False) -> str:
    return (
        f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(title)}</h2><p class="why">{html.escape(why)}</p>{body}</section>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """An HTML table; columns from `left` on are numbers."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        shown = [c if isinstance(c, str) else number(c) for c in cells]
        return "<tr>" + "".join(f"<{tag}{' class=n' if i >= left else ''}>{html.escape(c)}</{tag}>" for i, c in enumerate(shown)) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def heldout(run: RunReader) -> str:
    done = list(run.read(EvalRow, "state = 'done'"))
    chart = lines(
        [
            Series("sampled", [(e.updates, e.sampled) for e in done], dots=True),
            Series("greedy", [(e.updates, e.greedy) for e in done], dots=True),
        ],
        x_label="update",
        zero=True,
        bounds=(0.0, 1.0),
    )
    return card("Held-out accuracy", "Answered by the engine with exactly the named version's weights; never trained on.", chart)


def reward(run: RunReader) -> str:
    points: Points = run.sql("SELECT update_id, avg(reward) FROM rollouts WHERE state = 'trained' GROUP BY update_id")
    window = max(1, len(points) // 20)
    series = [Series("per update", points, faint=window > 1)]
    if window > 1:
        series.append(Series(f"mean of {window} updates", smooth(points, window), colour=0))
    return card("Reward", "Mean reward of the rollouts that each update trained on.", lines(series, x_label="update"))


def staleness(run: RunReader, values: dict[str, Any]) -> str:
    ages = dict(run.sql(f"SELECT age, sum(tokens) FROM ({TRAINED_SPANS}) GROUP BY age"))
    shown = [(str(age), float(ages.get(age, 0))) for age in range(max([values["max_staleness"], *ages]) + 1)]
    return card(
        "Staleness of trained tokens",
        f"Versions between the weights that sampled a token and those that trained it. The budget is {values['max_staleness']}.",
        columns(shown, x_label="versions old", unit="tokens"),
    )


def age(run: RunReader, budget: int) -> str:
    rows = run.sql(f"SELECT update_id, 1.0 * sum(age * tokens) / sum(tokens), max(age) FROM ({TRAINED_SPANS}) GROUP BY update_id")
    return card(
        "Staleness over the run",
        "Mean over the trained tokens of each update, and its oldest token.",
        lines(
            [Series("mean", [(u, mean) for u, mean, _ in rows]), Series("oldest", [(u, age) for u, _, age in rows], colour=4)],
            x_label="update",
            zero=True,
            rule=(budget, f"budget {budget}"),
        ),
    )


def metric_points(records: Records, *path: str) -> Points:
    """(update, value) of one number that the learner measured."""
    points: Points = []
    for update, record in records:
        value: Any = record["metrics"]
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        points.append((update, value))
    return points


def metric_card(title: str, why: str, records: Records, shown: Sequence[tuple[str, tuple[str, ...]]], **axis: Any) -> str:
    """A line per named metric; with many updates the raw line is faint behind its mean over a few."""
    window = max(1, len(records) // 40)
    series = []
    for colour, (name, path) in enumerate(shown):
        points = metric_points(records, *path)
        if window > 1:
            series.append(Series(name, points, faint=True, colour=colour))
        series.append(Series(name, smooth(points, window), colour=colour))
    return card(title, why, lines(series, x_label="update", **axis))


def learner(records: Records) -> list[str]:
    return [
        metric_card(
            "Off-policy distance",
            "k3 estimate of KL per factor of cur/mu: engine mismatch (old/mu), staleness (prox/old), update (cur/prox).",
            records,
            [(name, (key, "k3")) for name, key in FACTORS],
            log=True,
        ),
        metric_card(
            "Effective sample size",
            "Share of the tokens that the weights leave effective. 1 is on-policy; below 0.3 is a warning.",
            records,
            [
                ("mismatch, raw", ("mismatch", "ess")),
                ("staleness, raw", ("staleness_ratio", "ess")),
                ("after correction", ("ess_corrected",)),
            ],
        ),
        metric_card(
            "Masked, capped, clipped",
            "Share of trained tokens that a corrector masked, whose weight it capped, or that the objective clipped.",
            records,
            [(name, (name,)) for name in ("masked", "capped", "clipped")],
            zero=True,
        ),
        metric_card("Gradient norm", "Before clipping.", records, [("gradient norm", ("grad_norm",))], zero=True),
        card(
            "By age",
            "Trained tokens by versions between the weights that sampled them and those the update began from: mean |log-ratio| of each "
            "factor, and what was masked and clipped of them.",
            table(["versions old", "tokens", *drift.FACTORS.values(), *drift.SHARES.values()],
                  drift.by_age(record["metrics"] for _, record in records)),
            wide=True,
        ),
    ]


def alarms(run: RunReader) -> str:
    rows = [[name, *map(number, alarm[:3]), alarm.text] for name, alarm in raised(run).items()]
    body = table(["alarm", "updates", "first", "last", "what it said last"], rows, left=5) if rows else '<p class="none">none</p>'
    return card("Alarms", "Signs of off-policy training going wrong: inert ratios, few effective samples, weights far from 1, drift.", body)


def time(values: dict[str, Any], records: Records) -> str:
    totals = [(name, values["seconds"][name] or 0.0, colour) for colour, name in enumerate(SECONDS)]
    rows = [[name, *(quantile([r["seconds"].get(name, 0.0) * 1000 for _, r in records], q) for q in (0.5, 0.9))] for name in SECONDS]
    busy = values["seconds"]["engine_busy"]
    body = (
        share_bar(totals, "s")
        + table(["per update, ms", "median", "90 %"], rows)
        + f'<p class="legend">Engines busy: {number(busy)} s in all.</p>'
    )
    return card(
        "Where the learner's time went",
        "Rank 0's wall-clock: anchors (old log-probs), update, publishing weights, waiting for rollouts.",
        body,
    )


def discarded(run: RunReader) -> str:
    rows = run.sql("""SELECT state || coalesce(' (' || reason || ')', ''), count(*), avg(response_len), avg(reward) FROM rollouts
                      WHERE state IN ('trained', 'dropped', 'expired', 'lost') GROUP BY state, reason ORDER BY state = 'trained' DESC, 1""")
    return card(
        "Trained beside discarded",
        "Dropping slow rollouts biases the data towards short answers: compare length and reward.",
        table(["outcome", "rollouts", "mean tokens", "mean reward"], rows),
    )


def books(values: dict[str, Any]) -> str:
    books = values["rollouts"]
    parts = [
        ("trained", books["trained"], 2),
        *((f"dropped: {reason}", n, 5) for reason, n in books["dropped"].items()),
        ("expired", books["expired"], 1),
        ("lost", books["lost"], 3),
        ("buffered", books["buffered"], 0),
        ("leased", books["leased"], 4),
    ]
    beside = (
        f"Beside the books: {number(values['duplicates_refused'])} duplicates refused, {number(values['quarantined'])} quarantined, "
        f"{number(values['trained_twice'])} trained twice."
    )
    return card(
        "Books",
        f"Every one of {number(books['produced'])} stored rollouts is accounted for.",
        share_bar(parts, "") + f'<p class="legend">{beside}</p>',
    )


def sources(values: dict[str, Any]) -> str:
    parts = [(source, tokens, colour) for colour, (source, tokens) in enumerate(values["old_sources"].items())]
    return card(
        "Where old log-probs came from",
        "resident: scored while the live weights were that version. snapshot: restored from the version store.",
        share_bar(parts, "tokens"),
    )


def actors(run: RunReader) -> str:
    rows = run.sql("""SELECT a.name, count(r.rollout_id), sum(r.response_len), a.confirmed, a.probe_mean, a.probe_max
                      FROM actors a LEFT JOIN rollouts r ON r.actor = a.name GROUP BY a.name ORDER BY a.name""")
    return card(
        "Actors",
        "Probe: difference between the engine's and the learner's log-probs at the last version loaded.",
        table(["actor", "rollouts", "tokens", "version", "probe mean", "probe max"], rows),
    )
