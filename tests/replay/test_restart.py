"""Real processes: kill -9 in between, and whoever was acknowledged finds his rollouts again."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from configs.schema import Config
from replay.client import AsyncClient, BlockingClient
from replay.reader import RunReader
from tests.support.replay import LightActor, LightLearner, make_config, stats
from wire.errors import RefusedError, TryAgainError
from wire.messages import PROTOCOL, Hello, Pull, Stats, StatsReply, Work
from wire.process import free_port

ROOT = Path(__file__).parents[2]


class Process:
    """`python -m replay` on a config of its own."""

    def __init__(self, folder: Path, config: Config, *more: str) -> None:
        file = folder / "run.toml"
        file.write_text(toml(config))
        self.argv = [sys.executable, "-m", "replay", str(file), "--name", "test", *more]
        self.process = subprocess.Popen(self.argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


def toml(config: Config) -> str:
    lines = []
    for table, values in config.model_dump(mode="json", exclude_unset=True).items():
        lines.append(f"[{table}]")
        lines += [
            f"{key} = {repr(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in values.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(config: Config, *more: str) -> Process:
        started.append(Process(tmp_path, config, *more))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.end(signal.SIGKILL)
        if one.process.stderr:
            one.process.stderr.close()


def make(tmp_path: Path, **tables: dict) -> Config:
    return make_config(tmp_path, replay={"endpoint": f"tcp://127.0.0.1:{free_port()}"}, **tables)


def test_nothing_acknowledged_is_lost_by_kill_nine(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path, learner={"updates": 6})
    endpoint = config.replay.endpoint
    process = start(config)
    learner, actors = LightLearner(endpoint, config), [LightActor(endpoint, config, name) for name in ("a0", "a1")]
    acknowledged = 0
    for update in range(6):
        for actor in actors:
            actor.pull(want=0)
            acknowledged += sum(order.n for order in actor.pull(want=2).orders)
            actor.answer()
        learner.score()
        leased = learner.lease(wait_s=5.0)
        if update % 2:  # killed with a lease handed out and rollouts stored
            process.end(signal.SIGKILL)
            process = start(config, "--resume")
            assert learner.lease() == leased
        learner.commit(leased)
        if update == 2:  # killed just after a commit
            process.end(signal.SIGKILL)
            process = start(config, "--resume")
    found = stats(endpoint)
    assert (found["imbalance"], found["rollouts"]["produced"], found["updates"]) == (0, acknowledged, 6)
    assert found["rollouts"]["trained"] == 24
    learner.finish()
    assert [actor.pull().done for actor in actors] == [True, True]
    code, errors = process.wait()
    assert code == 0, errors
    for client in (learner, *actors):
        client.close()
    lines = (tmp_path / "runs/test/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6
    with RunReader(tmp_path / "runs/test") as run:
        assert run.one("SELECT count(*) FROM ledger WHERE kind = 'opened'") == 4


def test_a_call_outlives_a_replay_that_is_away(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path)
    process = start(config)

    async def scene() -> None:
        nonlocal process
        async with AsyncClient(config.replay.endpoint) as client:
            welcome, _ = await client.call(Hello("actor", "a0", PROTOCOL, config.shared()))
            waiting = asyncio.create_task(client.call(Pull(welcome.epoch, -1, 1, 2.0, [])))  # type: ignore[union-attr]
            await asyncio.sleep(0.2)
            process.end(signal.SIGKILL)
            other = asyncio.create_task(client.call(Stats()))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            process = start(config, "--resume")
            reply, _ = await waiting
            assert isinstance(reply, Work)
            values, _ = await other
            assert isinstance(values, StatsReply)

    asyncio.run(scene())


def test_interrupted_by_sigterm_it_writes_its_summary(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path)
    process = start(config)
    LightLearner(config.replay.endpoint, config).close()
    code, errors = process.end(signal.SIGTERM)
    assert code == 130, errors
    assert '"status": "interrupted"' in (tmp_path / "runs/test/summary.json").read_text()


def test_bad_starts_are_one_line_and_exit_two(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path)
    process = start(config)
    LightLearner(config.replay.endpoint, config).close()  # it is up

    def refused(*more: str) -> str:
        code, errors = start(config, *more).wait()
        assert code == 2, errors
        assert errors.count("\n") == 1
        return errors

    assert "exists: add --resume" in refused()
    assert "is in use" in refused("--resume")
    assert "is already running" in refused("--resume", "--set", f"replay.endpoint=tcp://127.0.0.1:{free_port()}")
    process.end(signal.SIGINT)
    assert "to resume: leave out --resume" in refused("--resume", "--name", "another")
    assert "sampling.n was 2 when" in refused("--resume", "--set", "sampling.n=4")
    assert "needs keys" in refused("--resume", "--set", "replay.endpoint=tcp://0.0.0.0:5757")
    assert "no longer holds what" in refused_after_edit(tmp_path, refused)


def test_a_run_of_another_schema_is_not_resumed_and_left_as_it_is(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path)
    process = start(config)
    LightLearner(config.replay.endpoint, config).close()
    process.end(signal.SIGINT)
    run = tmp_path / "runs/test"
    with closing(sqlite3.connect(run / "replay.sqlite")) as db:
        db.execute("PRAGMA user_version = 1")
        before = list(db.iterdump())
    saved = (run / "config.json").read_text()
    code, errors = start(config, "--resume", "--set", "replay.max_staleness=2").wait()
    assert code == 1
    assert errors.count("\n") == 1
    assert "replay.sqlite has schema version 1, this Leeway reads 2: go on with this run, or look into it, with the Leeway that" in errors
    assert (run / "config.json").read_text() == saved
    with closing(sqlite3.connect(run / "replay.sqlite")) as db:
        assert list(db.iterdump()) == before


def refused_after_edit(tmp_path: Path, refused: Callable[..., str]) -> str:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    return refused("--resume")


def test_what_changes_on_resume_is_a_ledger_row_and_others_say_hello_again(tmp_path: Path, start: Callable[..., Process]) -> None:
    config = make(tmp_path)
    process = start(config)
    learner = LightLearner(config.replay.endpoint, config)
    process.end(signal.SIGINT)
    process = start(config, "--resume", "--set", "replay.max_staleness=2")
    with BlockingClient(config.replay.endpoint) as client, pytest.raises(RefusedError, match="replay.max_staleness is 2 here and 1 there"):
        client.call(Hello("actor", "a0", PROTOCOL, config.shared()))
    with pytest.raises(TryAgainError, match="never said HELLO"):
        learner.lease()
    learner.close()
    with RunReader(tmp_path / "runs/test") as run:
        assert run.one("SELECT body ->> '$.changed' FROM ledger WHERE kind = 'opened'") == '{"replay.max_staleness":[1,2]}'


def test_dry_run_prints_the_tree_and_creates_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "run.toml").write_text(toml(config))
    found = subprocess.run(
        [sys.executable, "-m", "replay", str(tmp_path / "run.toml"), "--dry-run"], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0
    assert '"max_staleness": 1' in found.stdout
    assert not (tmp_path / "runs").exists()
