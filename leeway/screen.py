"""Where `leeway run` shows itself: a live table on a terminal, plain lines elsewhere. Nothing here waits for anything."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from configs.schema import Config
from leeway.alarms import Fresh
from leeway.table import final, live, plain_line
from wire.text import printable

PLAIN_EVERY_S, PLAIN_EVERY_UPDATES, PLAIN_AT_LEAST_S = 2.0, 10, 20.0
KEPT_LINES = 4
RATE_OVER_S = 10.0
STALLED_S = 5.0
"""Without an update for this long, what is awaited says more than who waited at the last one."""


class Screen(Protocol):
    def say(self, line: str) -> None:
        """Something happened that a person should see."""

    def show(self, values: dict[str, Any]) -> None:
        """How the run stands."""

    def finish(self, summary: dict[str, Any]) -> None:
        """What the run came to; empty when there is no store."""

    def close(self) -> None: ...


def open_screen(config: Config, run_dir: Path) -> Screen:
    console = Console()
    return (LiveScreen if console.is_terminal else PlainScreen)(console, config.learner.updates, run_dir)


class Progress:
    """What one answer of replay does not tell: how long ago the last update was, and tokens per second over the last few seconds."""

    def __init__(self) -> None:
        self._update, self._at = -1, time.monotonic()
        self._tokens: deque[tuple[float, float]] = deque()

    def stalled(self, values: Mapping[str, Any]) -> bool:
        if values.get("updates") != self._update:
            self._update, self._at = values.get("updates", -1), time.monotonic()
        return time.monotonic() - self._at > STALLED_S

    def tokens_per_s(self, values: Mapping[str, Any]) -> float | None:
        """None until there are two counts to compare."""
        counters = values.get("counters") or {}
        self._tokens.append((time.monotonic(), counters.get("tokens_generated", 0.0)))
        while self._tokens[-1][0] - self._tokens[0][0] > RATE_OVER_S and len(self._tokens) > 2:
            self._tokens.popleft()
        (began, before), (now, after) = self._tokens[0], self._tokens[-1]
        return (after - before) / (now - began) if now > began else None


class PlainScreen:
    """One line per ten updates, at most one in two seconds, at least one in twenty; what happened at once."""

    def __init__(self, console: Console, updates: int, run_dir: Path) -> None:
        self._console, self._updates, self._run_dir = console, updates, run_dir
        self._began = time.monotonic()
        self._shown_at, self._shown_update = float("-inf"), -PLAIN_EVERY_UPDATES
        self._progress, self._alarms = Progress(), Fresh()

    def say(self, line: str) -> None:
        self._print(f"leeway: {line}")

    def show(self, values: dict[str, Any]) -> None:
        for line in self._alarms.look(values):
            self.say(line)
        now, update = time.monotonic(), int(values.get("updates", 0))
        stalled, rate = self._progress.stalled(values), self._progress.tokens_per_s(values)
        due = update >= self._shown_update + PLAIN_EVERY_UPDATES or update >= self._updates > self._shown_update
        if now - self._shown_at >= (PLAIN_EVERY_S if due else PLAIN_AT_LEAST_S):
            self._print(plain_line(values, self._updates, now - self._began, rate, stalled))
            self._shown_at, self._shown_update = now, update

    def finish(self, summary: dict[str, Any]) -> None:
        if summary:
            self._console.print(final(summary, str(self._run_dir)))

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.out(printable(line), highlight=False)


class LiveScreen:
    """Redrawn when there is something new; no thread of its own."""

    def __init__(self, console: Console, updates: int, run_dir: Path) -> None:
        self._updates, self._run_dir = updates, run_dir
        self._began = time.monotonic()
        self._values: dict[str, Any] = {}
        self._rate: float | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._progress = Progress()
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._draw()

    def show(self, values: dict[str, Any]) -> None:
        self._values, self._rate = values, self._progress.tokens_per_s(values)
        self._draw()

    def finish(self, summary: dict[str, Any]) -> None:
        if summary:
            self._live.update(final(summary, str(self._run_dir)), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        seconds = time.monotonic() - self._began
        table = live(self._values, self._updates, seconds, self._run_dir.name, list(self._lines), self._rate,
                     self._progress.stalled(self._values))
        self._live.update(table, refresh=True)
