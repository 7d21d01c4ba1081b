"""`leeway stats RUN [--json]`: where a run stands, and whether its books balance. Reads the store alone; the daemons need not run.

Exit 0; 2 when there is no such run; 3 when the books do not balance or a rollout was trained twice.
"""

import json
from pathlib import Path
from typing import Any

from leeway import drift
from leeway.alarms import Raised, raised, sentence
from leeway.charts import number
from leeway.tools import one_line, tool_parser
from replay.books import books, imbalance
from replay.reader import RunReader
from replay.rows import ActorRow, EvalRow
from replay.summary import TRAINED_SPANS, TRAINED_TWICE
from wire.text import printable_lines

FINDINGS = 3


def stats(run_dir: Path) -> dict[str, Any]:
    """One snapshot of the run, as plain JSON. Raises ConfigError when there is no run."""
    with RunReader(run_dir) as run:
        config = run.config()
        found = books(run.db)
        stepped, skipped, lost = run.sql("""SELECT coalesce(sum(state = 'committed' AND NOT skipped), 0),
            coalesce(sum(state = 'committed' AND skipped), 0), coalesce(sum(state = 'lost'), 0) FROM updates""")[0]
        count, newest, kept, orphaned = run.sql(
            "SELECT count(*), max(version), coalesce(sum(retained), 0), coalesce(sum(state = 'orphaned'), 0) FROM versions"
        )[0]
        ages = dict(run.sql(f"SELECT age, sum(tokens) FROM ({TRAINED_SPANS}) GROUP BY age ORDER BY age"))
        tokens = sum(ages.values())
        return {
            "updates": {"stepped": stepped, "of": config.learner.updates, "skipped": skipped, "lost": lost},
            "rollouts": found,
            "unaccounted": imbalance(found),
            "trained_twice": run.one(TRAINED_TWICE),
            "groups": dict(run.sql("SELECT state, count(*) FROM groups WHERE purpose = 'train' GROUP BY state ORDER BY state")),
            "counters": run.counters(),
            "quarantined": run.one("SELECT count(*) FROM quarantine"),
            "versions": {"committed": count, "newest": newest, "retained": kept, "orphaned": orphaned},
            "staleness": {
                "budget": config.replay.max_staleness,
                "mean": sum(age * n for age, n in ages.items()) / tokens if tokens else None,
                "max": max(ages, default=None),
                "tokens": {str(age): n for age, n in ages.items()},
            },
            "sources": dict(run.sql(f"SELECT source, sum(tokens) FROM ({TRAINED_SPANS}) GROUP BY source ORDER BY source")),
            "unscored_spans": run.one(
                "SELECT count(*) FROM spans JOIN rollouts USING (rollout_id) WHERE source IS NULL AND state IN ('buffered', 'leased')"
            ),
            "drift": drift.newest(run),
            "alarms": {name: alarm._asdict() for name, alarm in raised(run).items()},
            "evals": [row._asdict() for row in run.read(EvalRow)],
            "actors": [
                {**row._asdict(), "rollouts": run.one("SELECT count(*) FROM rollouts WHERE actor = ?", row.name)}
                for row in run.read(ActorRow)
            ],
            "newest_trained": run.one("SELECT rollout_id FROM rollouts WHERE state = 'trained' ORDER BY rowid DESC LIMIT 1"),
            "ledger": {"rows": run.one("SELECT count(*) FROM ledger"), "head": run.ledger_head()},
        }


def text(name: str, values: dict[str, Any]) -> str:
    """The same for people: one line per subject."""
    updates, held, versions, staleness = values["updates"], values["rollouts"], values["versions"], values["staleness"]
    terms = {
        "trained": held["trained"],
        **{f"dropped({reason})": n for reason, n in held["dropped"].items()},
        **{state: held[state] for state in ("expired", "lost", "buffered", "leased")},
    }
    verdict = "balanced" if not values["unaccounted"] else f"NOT BALANCED: {values['unaccounted']} unaccounted for"
    beside = {**values["counters"], "quarantined": values["quarantined"], "trained_twice": values["trained_twice"]}
    lines = [
        ("run", name),
        ("updates", f"{updates['stepped']} of {updates['of']}, {updates['skipped']} skipped, {updates['lost']} lost"),
        ("books", f"produced {held['produced']} = " + " + ".join(f"{term} {n}" for term, n in terms.items()) + f"  [{verdict}]"),
        ("beside", ", ".join(f"{key} {number(value)}" for key, value in sorted(beside.items()))),
        ("groups", _pairs(values["groups"])),
        (
            "versions",
            f"{versions['committed']} committed, newest {_version(versions['newest'])}, "
            f"{versions['retained']} retained, {versions['orphaned']} orphaned",
        ),
        (
            "staleness",
            f"budget {staleness['budget']}, trained mean {number(staleness['mean'])}, oldest {number(staleness['max'])}; "
            f"tokens by age: {_pairs(staleness['tokens'])}",
        ),
        ("sources", f"{_pairs(values['sources'])}; {values['unscored_spans']} spans wait for an anchor"),
        *(("drift", line) for line in drift.lines(values["drift"])),
        *(("ALARM", sentence(name, Raised(**alarm))) for name, alarm in values["alarms"].items()),
        *(
            (
                "eval",
                f"after {row['updates']} updates, version {row['version']}, {row['state']}: sampled {number(row['sampled'])}, "
                f"greedy {number(row['greedy'])}",
            )
            for row in values["evals"]
        ),
        *(
            (
                "actor",
                f"{row['name']}: epoch {row['epoch']}, version {_version(row['confirmed'])}, {row['rollouts']} rollouts, "
                f"probe mean {number(row['probe_mean'])} max {number(row['probe_max'])}",
            )
            for row in values["actors"]
        ),
        *((("rollout", f"token by token, the newest trained one: leeway audit {name} --rollout {values['newest_trained']}"),)
          if values["newest_trained"] else ()),
        ("ledger", f"{values['ledger']['rows']} rows, head {str(values['ledger']['head'])[:16]}"),
    ]
    return "\n".join(f"{label:10} {line}" for label, line in lines)


def _version(number: int | None) -> str:
    return "none" if number is None or number < 0 else f"v{number}"


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{key} {number(value)}" for key, value in values.items()) or "none"


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway stats", __doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def body() -> int:
        values = stats(options.run)
        print(json.dumps(values, indent=1) if options.json else printable_lines(text(options.run.resolve().name, values)))
        return FINDINGS if values["unaccounted"] or values["trained_twice"] else 0

    return one_line(body)
