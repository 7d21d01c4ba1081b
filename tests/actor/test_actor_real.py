"""A whole actor with a real SGLang server: what it puts matches transformers under the version it names, whatever weights it is sent."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from actor.host import AttachedEngine
from actor.loop import Actor
from actor.rounding import round_file
from tests.actor.conftest import Digits, Pool, make_config
from tests.actor.orders import train
from tests.support.engine import RealEngine, real_engine  # noqa: F401
from tests.support.replay_twin import ReplayTwin
from tests.support.tiny_model import VOCAB, forward_logprobs, make_tiny_model
from tests.support.tiny_versions import publish
from wire.manifest import FILE
from wire.messages import Applied
from wire.record import Sampling, VersionNotice

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]
BAD = ["truncated", "wrong_digest", "wrong_shape", "unknown_name", "swapped", "old_notice"]


class RealStage:
    """An actor attached to the session's server, and the twin of replay."""

    def __init__(self, real: RealEngine, folder: Path) -> None:
        self.real, self.run_dir, self.replay = real, folder / "run", ReplayTwin(folder / "run")
        self.folders = dict(enumerate(real.folders))
        self.task: asyncio.Task[None] | None = None
        self.number = 0

    def publish(self, version: int, folder: Path, spoil: Callable[[dict[str, Any]], None] | None = None) -> VersionNotice:
        return publish(self.run_dir, version, folder, spoil)

    async def start(self, **actor: Any) -> None:
        process = self.real.process
        config = make_config(self.real.folders[0], **actor)
        host = AttachedEngine(process.url, process.api_key, VOCAB)
        self.task = asyncio.create_task(Actor(config, "a1", self.replay, lambda _: host, Digits, Pool()).run())  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], Any]) -> None:
        assert self.task is not None
        task = self.task
        await self.replay.until(lambda: condition() or task.done(), 60)
        if task.done():
            task.result()

    async def answers(self, tokens: int = 8) -> dict[int, float]:
        """By version, the largest difference between a fresh rollout's log-probs and transformers'."""
        self.number += 1
        await self.replay.grant(train(self.number, n=1, prompt="123", sampling=Sampling(1.0, tokens)))
        await self.until(lambda: f"t{self.number}.1.0" in self.replay.heads)
        return self.errors(f"t{self.number}.1.0")

    def errors(self, rollout: str) -> dict[int, float]:
        head, payload = self.replay.heads[rollout], self.replay.payloads[rollout]
        found = {}
        for span in head.spans:
            expected = forward_logprobs(self.folders[span.version], payload.prompt_ids.tolist(), payload.response_ids.tolist())
            found[span.version] = float(np.abs(expected - payload.mu)[span.start:span.end].max())
        return found


@pytest_asyncio.fixture(loop_scope="session")
async def stage(real_engine: RealEngine, tmp_path: Path) -> AsyncIterator[RealStage]:  # noqa: F811
    stage = RealStage(real_engine, tmp_path)
    await stage.replay.commit(stage.publish(0, real_engine.folders[0]))
    yield stage
    assert stage.task is not None
    stage.task.cancel()
    await asyncio.gather(stage.task, return_exceptions=True)


async def test_six_kinds_of_bad_weights_are_refused_and_the_engine_serves_the_right_version(stage: RealStage) -> None:
    await stage.start()
    answers = await stage.answers()
    assert list(answers) == [0]
    assert answers[0] < 1e-4
    applied, = stage.replay.of(Applied)
    assert applied.probe_max < 1e-4
    for version, kind in enumerate(BAD, start=1):
        refused = stage.replay.notes.count("weights_refused")
        if kind == "old_notice":
            await stage.replay.commit(stage.publish(version, stage.real.folders[1]))
            stage.folders[version] = stage.real.folders[1]
            await stage.until(lambda: len(stage.replay.applied) == 2)
            stage.replay.replayed = stage.replay.versions[0]
        else:
            await stage.replay.commit(spoilt(stage, version, kind))
        await stage.until(lambda: stage.replay.notes.count("weights_refused") > refused)  # noqa: B023
        answers = await stage.answers()
        assert list(answers) == [version if kind == "old_notice" else 0], kind
        assert max(answers.values()) < 1e-4, kind
    assert stage.replay.applied == [0, len(BAD)]


def spoilt(stage: RealStage, version: int, kind: str) -> VersionNotice:
    def spoil(tensors: dict[str, Any]) -> None:
        query = "model.layers.{}.self_attn.q_proj.weight"
        if kind == "swapped":
            tensors[query.format(0)], tensors[query.format(1)] = tensors[query.format(1)], tensors[query.format(0)]
        if kind == "wrong_shape":
            tensors[query.format(0)] = tensors[query.format(0)][:, :64].contiguous()
        if kind == "unknown_name":
            tensors["model.layers.0.self_attn.r_proj.weight"] = tensors[query.format(0)].clone()

    notice = stage.publish(version, stage.real.folders[1], spoil)
    file = stage.run_dir / notice.path / FILE
    if kind == "truncated":
        os.truncate(file, file.stat().st_size - 100)
    if kind == "wrong_digest":
        with file.open("r+b") as body:
            body.seek(-1, os.SEEK_END)
            body.write(b"\x42")
    return notice


async def test_weights_that_arrive_in_mid_response_give_spans_that_match_their_versions(stage: RealStage) -> None:
    await stage.start()
    await stage.until(lambda: stage.replay.applied == [0])
    await stage.replay.grant(train(1, n=2, prompt="123", sampling=Sampling(1.0, 600)))
    await asyncio.sleep(0.5)
    await stage.replay.commit(stage.publish(1, stage.real.folders[1]))
    await stage.until(lambda: len(stage.replay.heads) == 2)
    for rollout in ("t1.1.0", "t1.1.1"):
        assert [span.version for span in stage.replay.heads[rollout].spans] == [0, 1]
        assert all(span.kv_clean for span in stage.replay.heads[rollout].spans)
        assert max(stage.errors(rollout).values()) < 1e-4


async def test_a_rounding_actor_samples_from_the_rounded_weights(stage: RealStage, tmp_path: Path) -> None:
    await stage.start(round_weights="fp8")
    rounded = make_tiny_model(tmp_path / "rounded", seed=0, eos=None)
    round_file(rounded / FILE, "fp8")
    stage.folders[0] = rounded
    assert (await stage.answers())[0] < 1e-4
    applied, = stage.replay.of(Applied)
    assert 1e-3 < applied.probe_mean < 0.5  # and yet the version is confirmed: the probe is the learner's, of the published weights
