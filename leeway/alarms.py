"""The alarms that the learner raised (`correction/alarms.py`), as the screen, `leeway stats` and the report show them."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from replay.reader import RunReader


class Raised(NamedTuple):
    """One alarm over a run: on how many updates, on which first and last, and what it said last."""

    updates: int
    first: int
    last: int
    text: str


def raised(run: RunReader) -> dict[str, Raised]:
    """By name, in the order in which they were first raised."""
    found: dict[str, Raised] = {}
    for update, said in run.sql("""SELECT update_id, json_extract(record, '$.metrics.alarms') AS said FROM updates
                                   WHERE state = 'committed' AND NOT skipped AND said IS NOT NULL AND said <> '{}' ORDER BY update_id"""):
        for name, text in json.loads(said).items():
            before = found.get(name)
            found[name] = Raised(1, update, update, text) if before is None else Raised(before.updates + 1, before.first, update, text)
    return found


def sentence(name: str, alarm: Raised) -> str:
    """One line for people."""
    when = f"at update {alarm.last}" if alarm.updates == 1 else f"at {alarm.updates} updates from {alarm.first} to {alarm.last}"
    return f"{name} {when}: {alarm.text}"


class Fresh:
    """Which alarms of the newest update were not raised at the one looked at before."""

    def __init__(self) -> None:
        self._before: set[str] = set()

    def look(self, values: Mapping[str, Any]) -> list[str]:
        alarms = (values.get("metrics") or {}).get("alarms") or {}
        new = [f"alarm {name} at update {values.get('updates', 0)}: {text}" for name, text in alarms.items() if name not in self._before]
        self._before = set(alarms)
        return new
