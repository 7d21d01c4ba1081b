"""Exit codes, signals, parents, packages."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wire import process
from wire.errors import ConfigError, RefusedError, RunError, StoreError, TryAgainError
from wire.text import printable, printable_lines

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (None, 0, ""),
        (ConfigError("a.b: wrong"), 2, "leeway: error: a.b: wrong\n"),
        (RefusedError("no"), 2, "leeway: error: no\n"),
        (TryAgainError("moved on"), 75, "leeway: error: moved on\n"),
        (StoreError("disk full"), 1, "leeway: error: disk full\n"),
        (KeyboardInterrupt(), 130, ""),
        (asyncio.CancelledError(), 130, ""),
    ],
)
def test_exit_codes(raised: BaseException | None, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        if raised is not None:
            raise raised

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert process.run_main(main) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == line


HOSTILE = "a\x1b[31mb\rc\x07\u202ed\x9be\nf\ud800 \u4e00"
SHOWN = "a?[31mb?c??d?e?f? \u4e00"


def test_what_a_peer_says_reaches_a_terminal_as_one_harmless_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable_lines("one\ntwo\r") == "one\ntwo?"
    before, handlers = logging.root.level, logging.root.handlers[:]
    try:
        process.set_up_logging("replay", "INFO", tmp_path)
        logging.getLogger("replay.x").warning("actor %s: %s", "a0", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logging.getLogger("replay.x").exception("it failed")
    finally:
        logging.basicConfig(level=before, handlers=handlers, force=True)
    shown = capsys.readouterr().err
    assert shown.splitlines()[0].endswith(f"replay WARNING actor a0: {SHOWN}")
    assert f"ValueError: {SHOWN.replace('?f', chr(10) + 'f')}" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    written = (tmp_path / "logs/replay.jsonl").read_bytes()
    assert not set(written) & {0x1B, 0x0D, 0x07}
    assert json.loads(written.splitlines()[0])["message"] == f"actor a0: {HOSTILE}"
    signals = signal.getsignal(signal.SIGTERM)

    def refused() -> None:
        raise RunError(HOSTILE)

    try:
        process.run_main(refused)
    finally:
        signal.signal(signal.SIGTERM, signals)
    assert capsys.readouterr().err == f"leeway: the run cannot go on: {SHOWN}\n"


def test_what_is_not_ours_is_not_hidden() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ZeroDivisionError):
            process.run_main(lambda: 1 // 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def run(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


SLEEPER = (
    "import sys, time; from wire.process import run_main\ndef main():\n print('up', flush=True); time.sleep(60)\nsys.exit(run_main(main))"
)


def test_the_end_of_a_rank_says_what_was_said_and_tears_nothing_down() -> None:
    with run("import atexit; from wire.process import end; atexit.register(print, 'torn down'); print('said', end=''); end(75)") as child:
        assert child.communicate() == ("said", None)
    assert child.returncode == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_130(number: signal.Signals) -> None:
    with run(SLEEPER) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(number)
        assert child.wait(20) == 130


def test_a_child_dies_with_the_supervisor_it_was_told_of() -> None:
    parent = ("import os, subprocess, sys, time\n"
              f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], env={{**os.environ, 'LEEWAY_PARENT_PID': str(os.getpid())}}, "
              "stdout=subprocess.PIPE, text=True)\nchild.stdout.readline(); print(child.pid, flush=True); time.sleep(60)")
    with run(parent) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        supervisor.kill()
        supervisor.wait()
    for _ in range(200):
        if not alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("the child is still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_whose_supervisor_is_already_gone_does_not_start() -> None:
    with run(SLEEPER, LEEWAY_PARENT_PID="1") as child:
        assert child.wait(20) == 130


def test_all_packages_come_from_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process.check_packages()
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "replay", raising=False)
    with pytest.raises(ConfigError, match="package 'replay' comes from .*another distribution"):
        process.check_packages()


def test_the_clock_for_decisions_is_not_the_one_that_people_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5e9)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    assert (process.Clock().monotonic(), process.Clock().wall()) == (7.0, 5e9)


def test_logs_are_lines_for_people_and_json_for_machines(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        process.set_up_logging("replay", "INFO", tmp_path)
        logging.getLogger("replay.x").info("seen %d", 3)
        logging.getLogger("replay.x").debug("not seen")
        logging.getLogger().info("gcc -pthread -c x.c")  # setuptools, for each command
        logging.getLogger("numexpr.utils").info("NumExpr defaulting to 2 threads.")
        logging.getLogger("asyncio").warning("slow")
        for handler in root.handlers:
            handler.close()
    finally:
        root.handlers[:], root.level = handlers, level
    lines = [json.loads(line) for line in (tmp_path / "logs" / "replay.jsonl").read_text().splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("INFO", "replay.x", "seen 3"), ("WARNING", "asyncio", "slow")]
