"""`python -m actor` as a user starts it: a real SGLang server of its own, a real replay daemon."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from configs.load import load
from replay.client import BlockingClient
from tests.actor.test_tokenise import save as save_tokenizer
from tests.support.replay import DaemonThread, write_prompts
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_versions import publish
from wire.messages import PROTOCOL, Hello, Initial, Stats, StatsReply, Welcome

CONFIG = """
[model]
path = "{folder}/model"
[task]
train = "{folder}/train.jsonl"
[run]
dir = "{folder}/runs"
[sampling]
n = 4
max_new_tokens = 16
[replay]
endpoint = "tcp://127.0.0.1:*"
max_staleness = 1000
[learner]
groups_per_update = 2
updates = 1000
[actor]
max_total_tokens = 4096
"""




@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_sglang_killed_in_mid_run_is_restarted_and_nothing_outlives_the_actor(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", eos=None)
    save_tokenizer(model)
    write_prompts(tmp_path / "train.jsonl", 40)
    (tmp_path / "c.toml").write_text(CONFIG.format(folder=tmp_path))
    config = load([tmp_path / "c.toml"], [])
    command = [sys.executable, "-m", "actor", str(tmp_path / "c.toml"), "--set", "actor.name=a1", "--set"]
    with (DaemonThread(config) as daemon, BlockingClient(daemon.endpoint) as client,
          subprocess.Popen([*command, f"replay.endpoint={daemon.endpoint}"]) as process):
        try:
            welcome, _ = client.call(Hello("learner", "l", PROTOCOL, config.shared()))
            assert isinstance(welcome, Welcome)
            client.call(Initial(welcome.epoch, publish(daemon.run_dir, 0, model)))
            before = produced(client, more_than=0)
            mine = psutil.Process(process.pid).children(recursive=True)
            next(child for child in mine if "scheduler" in child.cmdline()[0]).kill()
            produced(client, more_than=before + 200)  # more than what was finished when it died
            mine += psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 130
            assert not [child for child in mine if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        finally:
            process.kill()
    with closing(sqlite3.connect(daemon.run_dir / "replay.sqlite")) as db:
        notes = [json.loads(body)["kind"] for body, in db.execute("SELECT body FROM ledger WHERE kind = 'note' ORDER BY rowid")]
        assert notes == ["engine_suspect", "engine_restarted"]
        assert db.execute("SELECT count(*) FROM groups WHERE state = 'granted'").fetchone() == (0,)  # given back
        assert db.execute("SELECT count(*) FROM quarantine").fetchone() == (0,)


def produced(client: BlockingClient, more_than: int) -> int:
    """Wait for more rollouts than that."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        reply, _ = client.call(Stats())
        assert isinstance(reply, StatsReply)
        if (count := reply.values["rollouts"]["produced"]) > more_than:
            return int(count)
        time.sleep(0.1)
    raise AssertionError(f"only {count} rollouts, {more_than} were waited for")
