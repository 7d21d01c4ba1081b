"""Weights that do not match, seen by a whole actor: refused, counted, and the engine goes on serving what it has."""

import asyncio
import shutil
from typing import Any

import numpy as np
import pytest

from tests.actor.conftest import Stage
from tests.actor.fake_engine import FakeEngine
from tests.actor.orders import evaluation, train
from tests.support.versions import damage_kinds, publish, publish_bad
from wire.errors import EngineError
from wire.messages import GiveBack, Note
from wire.record import Span, VersionNotice


async def serving(stage: Stage, number: int) -> int:
    """The version that a fresh order is answered with."""
    await stage.replay.grant(train(number, n=1))
    await stage.until(lambda: f"t{number}.1.0" in stage.replay.heads)
    head = stage.replay.heads[f"t{number}.1.0"]
    version = head.spans[0].version
    assert head.spans == (Span(version, 0, 4),)
    tokens = [*stage.replay.payloads[head.rollout_id].prompt_ids.tolist(), *stage.replay.payloads[head.rollout_id].response_ids.tolist()]
    assert stage.replay.payloads[head.rollout_id].mu.tolist() == stage.engine.logprobs(version, tokens, head.prompt_len).tolist()
    return version


def loads(stage: Stage) -> list[int]:
    return [argument[1] for name, argument in stage.engine.calls if name == "load_weights"]


@pytest.mark.parametrize("kind", damage_kinds())
async def test_each_kind_of_bad_weights_is_refused_and_the_old_version_goes_on(stage: Stage, kind: str) -> None:
    await stage.start()
    assert await serving(stage, 1) == 0
    await stage.replay.commit(publish_bad(stage.run_dir, 1, kind))
    await stage.until(lambda: "weights_refused" in stage.replay.notes)
    assert await serving(stage, 2) == 0
    assert stage.replay.applied == [0]
    assert loads(stage) == ([0, 1, 0] if kind == "swapped" else [0])  # only the probe can tell, and then the good ones are loaded again
    if kind == "swapped":
        assert stage.replay.notes[0] == "engine_suspect"
    await stage.publish(2)  # the next good version is taken
    await stage.until(lambda: stage.replay.applied == [0, 2])
    assert await serving(stage, 3) == 2
    assert stage.host.starts == 1
    await stage.finish()


async def test_an_old_notice_replayed_is_refused_and_counted(stage: Stage) -> None:
    await stage.start()
    await stage.publish(1)
    await stage.until(lambda: stage.replay.applied[-1:] == [1])
    stage.replay.replayed = stage.replay.versions[0]
    assert await serving(stage, 1) == 1
    await stage.until(lambda: stage.replay.notes)
    note, = stage.replay.of(Note)
    assert (note.kind, note.detail) == ("weights_refused", "version 0: an old notice, version 1 came before it")
    assert loads(stage) == [0, 1]
    await stage.finish()


async def test_a_notice_for_a_version_never_published_is_refused(stage: Stage) -> None:
    await stage.start()
    await stage.replay.commit(VersionNotice(9, "weights/v000009", "0" * 64, "0" * 64))
    await stage.until(lambda: "weights_refused" in stage.replay.notes)
    assert await serving(stage, 1) == 0
    await stage.finish()


async def test_a_refused_version_is_not_tried_again_at_once_but_when_its_files_change(stage: Stage) -> None:
    await stage.start()
    good = publish(stage.run_dir, 1)
    kept = stage.run_dir / "kept"
    shutil.copytree(stage.run_dir / good.path, kept)
    (stage.run_dir / good.path / "model.safetensors").write_bytes(b"damaged")
    await stage.replay.commit(good)
    await stage.until(lambda: "weights_refused" in stage.replay.notes)
    pulls = stage.replay.pulls
    await asyncio.sleep(0.3)
    assert stage.replay.pulls - pulls < 10  # the same notice comes with each Pull
    assert stage.replay.notes == ["weights_refused"]
    shutil.rmtree(stage.run_dir / good.path)
    shutil.copytree(kept, stage.run_dir / good.path)
    await stage.until(lambda: stage.replay.applied == [0, 1])
    assert await serving(stage, 1) == 1
    await stage.finish()


async def test_while_the_first_version_is_bad_nothing_is_generated(stage: Stage) -> None:
    await stage.start(version=None)
    await stage.replay.commit(publish_bad(stage.run_dir, 0, "swapped"))
    await stage.replay.grant(train(1))
    await stage.until(lambda: "weights_refused" in stage.replay.notes)
    assert stage.engine.tokens_made == 0
    assert stage.host.starts == 1  # the engine is well: a full, proved load will do
    await stage.publish(1)
    await stage.until(lambda: "t1.1.1" in stage.replay.heads)
    assert stage.replay.applied == [1]
    await stage.finish()


async def test_an_eval_of_bad_weights_is_given_back(stage: Stage) -> None:
    await stage.start()
    stage.replay.versions[1] = publish_bad(stage.run_dir, 1, "truncated")
    await stage.replay.grant(evaluation(1, 1))
    await stage.until(lambda: stage.replay.of(GiveBack))
    back, = stage.replay.of(GiveBack)
    assert (back.group_ids, back.reason) == (["e1.1"], "weights_refused")
    await stage.finish()


async def test_a_label_that_is_not_the_version_is_a_doubt(stage: Stage) -> None:
    await stage.start()
    stage.engine.label = 0
    await stage.publish(1)
    await stage.until(lambda: "engine_suspect" in stage.replay.notes)
    assert await serving(stage, 1) == 0
    await stage.finish()


async def test_a_load_that_fails_half_way_ends_in_a_reload_of_the_good_version(stage: Stage) -> None:
    await stage.start()
    stage.engine.fail["load_weights"] = EngineError("broken off", suspect=True)
    await stage.publish(1)
    await stage.until(lambda: stage.replay.applied[-1:] == [1])  # tried again after the pause
    assert loads(stage) == [0, 1, 0, 1]
    assert stage.replay.notes == ["engine_suspect"]  # the engine's fault, not the weights'
    assert await serving(stage, 1) == 1
    await stage.finish()


async def test_a_private_copy_that_was_spoilt_is_fetched_again_after_a_restart(stage: Stage) -> None:
    fresh = FakeEngine()
    stage.host.engines.append(fresh)
    await stage.start()
    for file in (stage.folder / "tmpfs").glob("*/v*/model.safetensors"):
        file.write_bytes(b"spoilt")
    stage.engine.fail["generate"] = EngineError("broken off")
    stage.engine.hang = True
    await stage.replay.grant(train(1))
    await stage.until(lambda: stage.replay.applied == [0, 0])
    assert stage.replay.of(GiveBack)[0].group_ids == ["t1.1"]  # there was nothing to answer it with
    await stage.replay.grant(train(2))
    await stage.until(lambda: "t2.1.1" in stage.replay.heads)
    assert fresh.version == 0
    await stage.finish()


class Apart(FakeEngine):
    """Log-probs that differ from the engine's by 0.25 nats."""

    def logprobs(self, *arguments: Any, **named: Any) -> np.ndarray:
        return super().logprobs(*arguments, **named) - np.float32(0.25)


@pytest.mark.parametrize(("baseline", "applied"), [(None, [1]), (0.08, []), (0.09, [1])])
async def test_an_engine_is_held_to_the_baseline_of_the_run_not_to_what_it_loads_first(
        stage: Stage, baseline: float | None, applied: list[int]) -> None:
    stage.replay.baseline = baseline
    await stage.replay.commit(publish(stage.run_dir, 1, engine=Apart()))
    await stage.start(None, dtype="bfloat16")
    await stage.until(lambda: stage.replay.applied or stage.replay.notes)
    assert stage.replay.applied == applied
    assert (stage.replay.notes == []) == bool(applied)
