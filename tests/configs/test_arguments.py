"""The one command line of all daemons."""

import json
from pathlib import Path

import pytest

from configs.arguments import parse


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('[model]\npath = "m"\n[task]\ntrain = "t.jsonl"\n')
    return path


@pytest.mark.parametrize(("program", "own"), [("leeway replay", {"--verify"}), ("leeway actor", set())])
def test_the_flags_are_these_and_no_others(program: str, own: set[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = parse([str(file), "--name", "x", "--set", "replay.max_staleness=4", "--resume"], program)
    assert (found.name, found.resume, found.dry_run, found.config.replay.max_staleness) == ("x", True, False, 4)
    assert found.run_dir == Path("runs/x")
    with pytest.raises(SystemExit):
        parse(["--help"], program)
    flags = {word.strip("[],") for word in capsys.readouterr().out.split() if word.lstrip("[").startswith("--")}
    assert flags == {"--help", "--name", "--set", "--resume", "--dry-run"} | own


def test_a_run_is_named_after_the_last_file(file: Path) -> None:
    assert parse([str(file)], "replay").name == "mine"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--set", "replay.max_stalenes=4"], "unknown key; the nearest one is replay.max_staleness"),
        (["--name", "../up"], "run name '../up'"),
        (["--wrong"], "unrecognized arguments: --wrong"),
        (["--res"], "unrecognized arguments: --res"),
        (["nowhere.toml"], "no such config file"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_two(file: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([str(file), *arguments], "replay")
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert line in error
    assert error.startswith("leeway: error: ")
    assert error.count("\n") == 1


def test_dry_run_prints_the_resolved_tree(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([str(file), "--dry-run", "--set", "learner.lr=1e-5"], "replay")
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["learner"]["lr"] == 1e-5
