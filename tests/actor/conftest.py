"""A whole actor in one process: fake engine, twin of replay, a tokeniser of digits, a pool that judges in place."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actor.loop import Actor
from configs.load import validate
from configs.schema import Config
from tests.actor.fake_engine import FakeEngine
from tests.support.replay_twin import ReplayTwin
from tests.support.versions import make_model, publish
from verifier.protocol import VerifyItem
from wire.record import Failed, Scored, Verdict


class Host:
    """Hands out `engines` one after the other, the last one again and again."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines, self.starts, self.stopped = list(engines), 0, False

    async def start(self) -> FakeEngine:
        self.starts += 1
        return self.engines.pop(0) if len(self.engines) > 1 else self.engines[0]

    async def stop(self) -> None:
        self.stopped = True


class Digits:
    """Token 3 + d for the digit d. `?` is a token that no engine knows."""

    digest = "digits"

    def prompt_ids(self, prompt: Any) -> list[int]:
        return [99 if character == "?" else 3 + int(character) for character in prompt]

    def texts(self, responses: list[list[int]]) -> list[str]:
        return [" ".join(map(str, ids)) for ids in responses]


class Pool:
    """Scores the number of tokens. `gate` holds verdicts back; `failing` makes every verdict a failure."""

    def __init__(self) -> None:
        self.gate, self.failing, self.calls = asyncio.Event(), False, 0
        self.gate.set()

    async def verify(self, items: list[VerifyItem]) -> list[Verdict]:
        self.calls += 1
        await self.gate.wait()
        return [Failed("timeout") if self.failing else Scored(float(len(item.completion_ids))) for item in items]


def make_config(model: Path, **actor: Any) -> Config:
    return validate({"model": {"path": str(model)}, "task": {"train": "unused.jsonl"}, "sampling": {"n": 2, "max_new_tokens": 4},
                     "actor": {"orders_per_request": 2, "requests_in_flight": 2, **actor}})


class Stage:
    """What a test plays on. `start` runs the actor with these `actor.*` keys, and returns when it serves version 0 (None: none yet)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir, self.model = folder / "run", make_model(folder / "model")
        self.engine, self.replay, self.pool = FakeEngine(), ReplayTwin(folder / "run"), Pool()
        self.host = Host(self.engine)
        self.task: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        await self.replay.commit(publish(self.run_dir, version))

    async def start(self, version: int | None = 0, **actor: Any) -> None:
        if version is not None:
            await self.publish(version)
        config = make_config(self.model, **actor)
        self.actor = Actor(config, "a1", self.replay, lambda run_dir: self.host, Digits, self.pool)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.actor.run())
        if version is not None:
            await self.until(lambda: self.replay.applied == [version])

    async def finish(self) -> None:
        """End the run as replay does. Raises what the actor raised."""
        await self.replay.finish()
        assert self.task is not None
        async with asyncio.timeout(10):
            await self.task

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for it, or for the actor's error."""
        async def watch() -> None:
            await self.replay.until(lambda: condition() or (self.task and self.task.done()))

        await watch()
        if self.task and self.task.done() and not condition():
            self.task.result()
            raise AssertionError("the actor ended")


@pytest_asyncio.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    (tmp_path / "tmpfs").mkdir()
    monkeypatch.setattr("actor.weights.TMPFS", tmp_path / "tmpfs")
    monkeypatch.setattr("actor.service.BACKOFF_S", 0.01)
    stage = Stage(tmp_path)
    yield stage
    if stage.task and not stage.task.done():
        stage.task.cancel()
        await asyncio.gather(stage.task, return_exceptions=True)
