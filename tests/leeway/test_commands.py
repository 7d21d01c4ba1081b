"""The command tree: documented, its flags frozen, its bad usage one line and exit 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.arguments import parser
from leeway import cli

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = '[model]\npath = "somewhere"\n[task]\ntrain = "train.jsonl"\n'

START = ["--dry-run", "--help", "--name", "--resume", "--set"]
FLAGS = {
    "run": START, "replay": sorted([*START, "--verify"]), "actor": START, "learner": START,
    "export": ["--format", "--help", "--out"],
    "sft-export": ["--help", "--min-reward", "--out"],
    "stats": ["--help", "--json"],
    "audit": ["--help", "--json", "--rollout", "--update"],
    "report": ["--help"],
    "versions": ["--help", "--json"],
    "whatif": ["--help", "--json", "--update"],
    "keys": ["--help"],
    "doctor": ["--help"],
    "recipes": ["--help"],
}
"""Frozen: knobs live in the config. A new flag is a decision."""


def leeway(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "leeway.cli", *words], cwd=cwd, capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)})


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_frozen(command: str) -> None:
    done = leeway(command, "--help")
    assert done.returncode == 0, done.stderr
    assert sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", done.stdout.split("options:")[-1]))) == FLAGS[command]


def test_every_command_has_its_flags_frozen() -> None:
    assert set(cli.COMMANDS) == set(FLAGS)


def test_every_command_and_flag_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for command, flags in FLAGS.items():
        assert re.search(rf"leeway {command}\b", text), f"docs/commands.md does not name leeway {command}"
        for flag in set(flags) - {"--help"}:
            assert flag in text, f"docs/commands.md does not name {flag} of {command}"


def test_every_command_has_a_help_line() -> None:
    for name, command in cli.COMMANDS.items():
        assert command.help
        assert f"  {name:11}{command.help}" in cli.usage()


def test_the_help_imports_nothing_heavy() -> None:
    code = ("import sys; from leeway.cli import main; main(['--help']); "
            "print(sorted({'torch', 'pydantic', 'zmq', 'rich', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("words", "line"), [
    (["recipe"], "leeway: error: no command 'recipe'; the nearest is recipes"),
    (["doctor", "now"], "leeway: error: unrecognized arguments: now"),
    (["recipes", "icepopp"], "leeway: error: no recipe 'icepopp'; the nearest is icepop"),
    (["run"], "leeway: error: the following arguments are required: CONFIG"),
    (["run", "a.toml", "--nam", "x"], "leeway: error: unrecognized arguments: --nam x"),
    (["run", ".", "--dry-run"], "leeway: error: .: cannot be read as a config file (Is a directory)"),
    (["run", "missing.toml"], "leeway: error: missing.toml: no such config file"),
    (["run", "a.toml", "--name", ".x"], "leeway: error: run name '.x': use 1 to 64 of a-z 0-9 . _ - and no leading dot"),
    (["run", "a.toml", "--set", "replay.max_stalenes=4"],
     "leeway: error: replay.max_stalenes: unknown key; the nearest one is replay.max_staleness"),
    (["run", "a.toml", "--set", "sampling.top_p=0.9"],
     "leeway: error: sampling.top_p = 0.9: the engine's log-prob is taken before top_p acts"),
    (["run", "a.toml", "--set", "replay.endpoint=tcp://0.0.0.0:5757"],
     "leeway: error: replay.endpoint = 'tcp://0.0.0.0:5757': an address beyond"),
    (["replay", "a.toml", "--verify", "RUN"], "leeway: error: `leeway replay --verify RUN` takes nothing else: leave out a.toml"),
    (["replay", "--verify"], "leeway: error: argument --verify: expected one argument"),
    (["replay", "--verify", "nosuch"], "leeway: error: no run at nosuch"),
    (["run", "a.toml", "--resume"], "leeway: error: no run at runs/a to resume: leave out --resume to start it"),
])
def test_bad_usage_is_one_line_and_exit_2(words: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(CONFIG)
    done = leeway(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(line)
    assert not (tmp_path / "runs").exists()


def test_one_recipe_is_described_alone() -> None:
    done = leeway("recipes", "kpop")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "kpop              reconstructed: Ling/Ring 2.6 report, arXiv 2606.15079"
    assert lines[2:4] == ["needs old", "ours: the threshold: none is printed, calibrate it"]
    assert lines[4:6] == ["advantages: grpo", 'engine, on old/mu: kpop, kpop_threshold = 0.03, kpop_carry = "ratio"']
    assert len(lines) == 9


def test_no_command_shows_the_usage_and_exits_2() -> None:
    done = leeway()
    assert (done.returncode, done.stderr) == (2, cli.usage() + "\n")


def test_an_existing_run_needs_resume(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(CONFIG)
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.json").touch()
    done = leeway("run", "a.toml", "--name", "demo", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == ("leeway: error: runs/demo exists: add --resume to go on with it, remove it with `rm -r runs/demo`, "
                           "or choose another --name\n")


def test_a_dry_run_prints_the_tree_and_starts_nothing(tmp_path: Path) -> None:
    here(tmp_path)
    done = leeway("run", "a.toml", "--set", "replay.max_staleness=4", "--dry-run", cwd=tmp_path)
    assert (done.returncode, "warning" in done.stderr) == (0, False)
    assert "objective: ppo on cur/old, clip_low = 0.2, clip_high = 0.2\n" in done.stderr
    assert json.loads(done.stdout)["replay"]["max_staleness"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "somewhere", "train.jsonl"]


def here(folder: Path) -> None:
    """CONFIG with what it names, as far as a dry run looks at it."""
    (folder / "a.toml").write_text(CONFIG)
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "somewhere").mkdir()
    (folder / "somewhere" / "config.json").write_text('{"vocab_size": 14}')


@pytest.mark.parametrize(("command", "words", "line"), [
    ("run", ["model.path=nowhere"], "model.path = 'nowhere': no such folder"),
    ("actor", ["model.path=."], "model.path = '.': no config.json in this folder"),
    ("run", ["task.train=nope.jsonl"], "nope.jsonl: no such file"),
    ("replay", ["task.heldout=a.toml"], "a.toml: line 1 is not JSON"),
    ("run", ["task.verifier=exat"], "verifier 'exat' is not a built-in"),
    ("actor", ["task.verifier=nosuch.module:fn"], "verifier 'nosuch.module:fn': importing 'nosuch.module' failed with ModuleNotFoundError"),
    ("run", ["security.keys=nokeys"], "security.keys = 'nokeys' cannot be read"),
    ("learner", ["learner.reference=nowhere"], "learner.reference = 'nowhere': no such folder\n"),
])
def test_a_dry_run_says_what_the_daemons_would(command: str, words: list[str], line: str, tmp_path: Path) -> None:
    here(tmp_path)
    done = leeway(command, "a.toml", "--dry-run", *(word for item in words for word in ("--set", item)), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"leeway: error: {line}")


def test_a_dry_run_looks_for_the_run_and_lets_a_cold_start_make_what_it_makes(tmp_path: Path) -> None:
    here(tmp_path)
    done = leeway("run", "a.toml", "--dry-run", "--resume", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "leeway: error: no run at runs/a to resume: leave out --resume to start it\n")
    cold = ["--set", "cold_start.out=cold", "--set", "model.path=cold/model", "--set", "task.train=cold/train.jsonl"]
    assert leeway("run", "a.toml", "--dry-run", *cold, cwd=tmp_path).returncode == 0
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.json").touch()
    done = leeway("run", "a.toml", "--dry-run", *cold, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("leeway: error: runs/a exists: add --resume")


def test_all_starting_commands_share_one_parser() -> None:
    assert parser("leeway run").format_help().split("positional")[1] == parser("leeway actor").format_help().split("positional")[1]
