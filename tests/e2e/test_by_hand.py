"""The daemons started by hand, in an awkward order: two actors first, one attached to the user's own SGLang server, one with its own engine
rounded to fp8; then replay; last a learner on two ranks. The data's shape and the reward are those of the README, as they stand there."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.recompute import icepop_ppo_token_mean, open_store, read_update
from tests.support.user_engine import ROOT, serve
from wire.process import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(900)]

UPDATES = 4
SMALL = {
    "learner.updates": UPDATES,
    "learner.groups_per_update": 8,
    "learner.micro_batch_rows": 16,
    "learner.score_rows": 32,
    "learner.length_bucket": 10,
    "learner.zero_stage": 2,
    "actor.orders_per_request": 2,
    "actor.requests_in_flight": 1,
    "sampling.n": 4,
    "replay.max_staleness": 1,
    "eval.prompts": 4,
    "recipe.engine": "icepop",
    "recipe.engine_low": 0.995,
    "recipe.engine_high": 1.005,
    "recipe.clip_low": 0.001,
    "recipe.clip_high": 0.001,
}


def until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.2)


def readme_block(language: str, first_line: str) -> str:
    text = (ROOT / "README.md").read_text()
    return next(block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if block.startswith(first_line))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the README's reward and config, a model and data."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_rewards.py").write_text(readme_block("python", "# my_rewards.py"))
    (home / "mine.toml").write_text(readme_block("toml", "# mine.toml").replace("path/to/a/model", "model"))
    made = ROOT / "runs" / ".cold-start" / "addition"
    subprocess.run(
        [sys.executable, "-m", "learner.coldstart", "configs/tiny-cpu.toml"],
        cwd=ROOT,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for name in ("model", "train.jsonl", "heldout.jsonl"):
        (home / name).symlink_to(made / name)
    return home


@pytest.fixture(scope="module")
def finished(home: Path) -> Iterator[dict[str, Any]]:
    port = free_port("127.0.0.1")
    common = [
        "mine.toml",
        "--name",
        "hand",
        "--set",
        f'replay.endpoint="tcp://127.0.0.1:{port}"',
        *(word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *words: str) -> None:
        with (home / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    with serve(home / "model", home) as (url, key_file, server):
        start("own", "actor", *common, "--set", "actor.name=own", "--set", "actor.round_weights=fp8")
        attached = ("--set", f"actor.url={url}", "--set", f"actor.api_key_file={key_file}", "--set", "actor.name=attached")
        start("attached", "actor", *common, *attached)
        time.sleep(2)
        start("replay", "replay", *common)
        until(lambda: "is ready" in (home / "own.log").read_text(), "own's engine")
        ranks = ("--nproc-per-node", "2", "--master-port", str(free_port("127.0.0.1")))
        start("learner", "torch.distributed.run", *ranks, "-m", "learner", *common)
        try:
            codes = {name: running[name].wait(200) for name in ("learner", "attached", "own", "replay")}
            yield {
                "codes": codes,
                "logs": {name: (home / f"{name}.log").read_text()[-3000:] for name in running},
                "dir": home / "runs" / "hand",
                "engine_lives": server.poll() is None,
            }
        finally:
            for process in running.values():
                if process.poll() is None:
                    for one in (*psutil.Process(process.pid).children(recursive=True), process):
                        one.kill()
                    process.wait()


def test_every_process_ends_with_0(finished: dict[str, Any]) -> None:
    assert set(finished["codes"].values()) == {0}, finished["logs"]


def test_the_user_s_engine_is_left_running(finished: dict[str, Any]) -> None:
    assert finished["engine_lives"]


def test_both_actors_gave_trained_rollouts(finished: dict[str, Any]) -> None:
    with sqlite3.connect(finished["dir"] / "replay.sqlite") as db:
        trained = dict(db.execute("SELECT actor, count(*) FROM rollouts WHERE state = 'trained' GROUP BY actor"))
    assert set(trained) == {"attached", "own"}
    assert sum(trained.values()) >= UPDATES * 8 * 4 - 16


def test_two_ranks_trained_under_zero_2(finished: dict[str, Any]) -> None:
    with sqlite3.connect(finished["dir"] / "replay.sqlite") as db:
        records = [json.loads(text) for (text,) in db.execute("SELECT record FROM updates WHERE NOT skipped")]
    assert len(records) == UPDATES
    assert {(record["state"]["world"], record["state"]["zero_stage"]) for record in records} == {(2, 2)}


def test_the_audit_is_clean(finished: dict[str, Any], home: Path) -> None:
    audit = subprocess.run(
        [sys.executable, "-m", "leeway.cli", "audit", "hand", "--json"],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_corrections_acted_on_the_rounded_engine(finished: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in (finished["dir"] / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["masked"] for line in lines if not line["skipped"]) > 0
    assert sum(line["clipped"] for line in lines if not line["skipped"]) > 0


def test_the_logged_loss_is_what_the_store_says(finished: dict[str, Any]) -> None:
    """Group advantages, IcePop on old/mu, PPO clip on cur/old, token mean: loop by loop, over both ranks' rows."""
    db, masked = open_store(finished["dir"]), 0
    for (update,) in db.execute("SELECT update_id FROM updates WHERE NOT skipped").fetchall():
        found = read_update(db, update)
        loss, weights = icepop_ppo_token_mean(found["rows"], low=0.995, high=1.005, clip_low=0.001, clip_high=0.001)
        (step,) = found["record"]["steps"]
        assert step["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert [w for row in found["rows"] for w in row["weight"]] == pytest.approx(weights, rel=1e-5)
        masked += weights.count(0.0)
    assert masked > 0
