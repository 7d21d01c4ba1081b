"""The live table and the plain lines: what they show, and that they show it without a terminal, without values, and rarely enough."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from leeway import screen as screens
from leeway.screen import LiveScreen, PlainScreen, Progress
from leeway.table import plain_line, waits

VALUES: dict[str, Any] = {
    "updates": 37, "max_staleness": 2, "evals": [], "awaited": "3 of 32 groups complete; 1 actor generating",
    "heldout": [{"sampled": 0.4316, "greedy": 0.6289}, {"sampled": 0.6523, "greedy": 0.8105}],
    "metrics": {"reward": 0.61234, "staleness": {"mean": 1.267, "max": 2}, "mismatch": {"mean_abs": 0.0000021}, "waits": "learner"},
}
SUMMARY: dict[str, Any] = {
    "status": "done", "updates": 240, "updates_skipped": 1, "version_final": 240, "max_staleness": 2, "max_staleness_trained": 2,
    "mean_staleness_trained": 1.31, "heldout": {"first": {"sampled": 0.43, "greedy": 0.63}, "last": {"sampled": 0.77, "greedy": None}},
    "rollouts": {"produced": 100, "trained": 90, "dropped": {"too_slow": 1, "aborted": 2}, "expired": 3, "lost": 0,
                 "buffered": 3, "leased": 1},
    "tokens": {"generated": 1000, "trained": 900, "generated_during_updates": 412},
}


def test_a_plain_line_holds_everything() -> None:
    assert plain_line(VALUES, 240, 65.4, 1432.6) == (
        "  1:05  update 37/240  reward 0.612  heldout 0.652 (0.810)  staleness 1.27 / 2 / 2  mismatch 2.1e-06  1433 tokens/s  "
        "the learner waits for rollouts")


def test_nothing_is_known_at_first() -> None:
    assert plain_line({}, 240, 0.0, None) == (
        "  0:00  update 0/240  reward -  heldout - (-)  staleness - / - / -  mismatch -  - tokens/s  for replay to start")


@pytest.mark.parametrize(("change", "metrics", "stalled", "text"), [
    ({}, {"waits": "actors"}, False, "the actors wait for the learner"),
    ({}, {"waits": "nobody"}, False, "nobody waits"),
    ({}, {"waits": "nobody"}, True, "3 of 32 groups complete; 1 actor generating"),
    ({}, {}, False, "3 of 32 groups complete; 1 actor generating"),
    ({"evals": [{"actor": "actor-0", "version": 5, "answered": 7, "total": 2560}]}, {"waits": "learner"}, True,
     "evaluation of version 5: 7 of 2560 answers"),
    ({"evals": [{"actor": None, "version": 5, "answered": 0, "total": 2560}]}, {"waits": "learner"}, False,
     "the learner waits for rollouts"),
])
def test_who_waits_for_whom(change: dict[str, Any], metrics: dict[str, Any], stalled: bool, text: str) -> None:
    assert waits({**VALUES, **change}, metrics, stalled) == text


def plain(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> tuple[PlainScreen, io.StringIO]:
    monkeypatch.setattr(screens, "time", SimpleNamespace(monotonic=lambda: times[0]))
    out = io.StringIO()
    return PlainScreen(Console(file=out, width=40), 25, Path("runs/demo")), out


def test_plain_lines_come_every_ten_updates_and_at_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    screen, out = plain(monkeypatch, now)
    for update in range(26):
        now[0] += 1.5
        screen.show({**VALUES, "updates": update})
        screen.show({**VALUES, "updates": update})
    assert [line.split("update ")[1].split("/")[0] for line in out.getvalue().splitlines()] == ["0", "10", "20", "25"]


def test_plain_lines_are_two_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    screen, out = plain(monkeypatch, now)
    for update in range(25):
        now[0] += 0.1
        screen.show({**VALUES, "updates": update})
    assert [line.split("update ")[1].split("/")[0] for line in out.getvalue().splitlines()] == ["0", "20"]


def test_plain_lines_come_every_twenty_seconds_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    screen, out = plain(monkeypatch, now)
    for _ in range(45):
        screen.show(VALUES)
        now[0] += 1.0
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["0:00", "0:20", "0:40"]
    assert [line.split("tokens/s  ")[1] for line in lines] == ["the learner waits for rollouts"] + 2 * [
        "3 of 32 groups complete; 1 actor generating"]


def test_tokens_per_second_are_those_of_the_last_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(screens, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress()
    rates = []
    for tokens in (0, 0, 3000, 3000, 3000, 3000, 3000):
        rates.append(progress.tokens_per_s({"counters": {"tokens_generated": tokens}}))
        now[0] += 3.0
    assert rates == [None, 0.0, 500.0, 3000 / 9, 3000 / 9, 0.0, 0.0]


def test_a_terminal_gets_a_table_and_a_last_panel() -> None:
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=120), 240, Path("runs/demo"))
    screen.say("actor-0 killed by SIGKILL; restart 1 of 5 in 1 s")
    screen.show(VALUES)
    screen.finish(SUMMARY)
    screen.close()
    text = out.getvalue()
    for part in ("37 of 240", "0.652 (0.810)   at first 0.432 (0.629)", "1.27 / 2 / 2", "restart 1 of 5", "0.430 -> 0.770", "0.630 -> -",
                 "41% of 1000 tokens generated while an update ran", "3 dropped, 3 expired, 0 lost, 4 waiting", "runs/demo/model"):
        assert part in text


def test_a_run_that_is_not_done_has_no_model() -> None:
    out = io.StringIO()
    PlainScreen(Console(file=out, width=120), 240, Path("runs/demo")).finish({**SUMMARY, "status": "interrupted"})
    assert "not exported: the run is not done" in out.getvalue()
    assert "the same command with --resume goes on" in out.getvalue()


def test_a_run_that_committed_nothing_shows_no_none() -> None:
    out, nothing = io.StringIO(), {"sampled": None, "greedy": None}
    summary = {**SUMMARY, "status": "failed", "version_final": None, "max_staleness_trained": None, "mean_staleness_trained": None,
               "heldout": {"first": nothing, "last": nothing}}
    PlainScreen(Console(file=out, width=120), 240, Path("runs/demo")).finish(summary)
    text = out.getvalue()
    assert "`rm -r runs/demo` and start again: nothing was generated" in text
    assert "no version committed yet" in text and "mean -, oldest -, budget 2" in text
    assert "None" not in text and "- -> -" not in text


def test_an_alarm_is_said_once_on_plain_lines_and_again_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    screen, out = plain(monkeypatch, now)
    for update, alarms in enumerate([{}, {"ess": "below 0.3"}, {"ess": "below 0.3"}, {}, {"ess": "below 0.3"}]):
        screen.show({**VALUES, "updates": update, "metrics": {**VALUES["metrics"], "alarms": alarms}})
    said = [line for line in out.getvalue().splitlines() if "alarm" in line]
    assert said == ["leeway: alarm ess at update 1: below 0.3", "leeway: alarm ess at update 4: below 0.3"]


def test_a_terminal_shows_the_alarms_that_stand() -> None:
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=120), 240, Path("runs/demo"))
    screen.show({**VALUES, "metrics": {**VALUES["metrics"], "alarms": {"weight_mean": "the mean weight is 2.5"}}})
    screen.close()
    assert "ALARM weight_mean" in out.getvalue() and "the mean weight is 2.5" in out.getvalue()


def test_what_a_process_said_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "\x1b[2Jgone\rleeway: all is well\x9b"
    screen, out = plain(monkeypatch, [0.0])
    screen.say(hostile)
    terminal = io.StringIO()
    live = LiveScreen(Console(file=terminal, force_terminal=True, width=120), 240, Path("runs/demo"))
    live.say(hostile)
    live.show({**VALUES, "metrics": {**VALUES["metrics"], "alarms": {hostile: hostile}}})
    live.close()
    assert out.getvalue() == "leeway: ?[2Jgone?leeway: all is well?\n"
    assert "?[2Jgone?leeway: all is well?" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue() and "\x9b" not in terminal.getvalue()
