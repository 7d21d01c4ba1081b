"""A version's files have one writer: a learner that was replaced, at whatever instant, cannot touch a committed version."""

from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from replay.handlers import arrive, handle
from tests.replay.conftest import Stage
from tests.support.replay import DirectClient, LightActor, LightLearner
from wire.errors import TryAgainError
from wire.manifest import FILE, Probe, check_file, read_manifest, seal_version, staged_path, version_path
from wire.messages import Commit, Committed, Fork, Leased
from wire.record import VersionNotice


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(learner={"updates": 20})


def staged(stage: Stage, learner: LightLearner, version: int, value: float) -> VersionNotice:
    """What `learner` writes before it asks for the version: weights that are all `value`."""
    folder = stage.core.run_dir / staged_path(version, learner.epoch)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": np.full(4, value, np.float32)}, folder / FILE)
    return seal_version(folder, version, version - 1, Probe([1, 2], [-1.0]))


def trained(learner: LightLearner, actor: LightActor) -> Leased:
    actor.pull(want=0)
    actor.work()
    learner.score()
    leased = learner.lease()
    assert isinstance(leased, Leased)
    return leased


def request(learner: LightLearner, leased: Leased, notice: VersionNotice) -> tuple[Commit, bytes]:
    record, bulk, _ = learner.record(leased, weights_digest_out=notice.weights_digest)
    return Commit(learner.epoch, record, notice), bulk


def on_disk(stage: Stage, version: int) -> float:
    """The weights in the version's folder, if they are what the store says that they are."""
    (row,) = stage.rows("SELECT version, path, manifest_digest, weights_digest FROM versions WHERE version = ?", version)
    folder = stage.core.run_dir / version_path(version)
    check_file(folder / FILE, read_manifest(folder, VersionNotice(*row)))
    return float(load_file(folder / FILE)["a.weight"][0])


def folders(stage: Stage) -> list[str]:
    return sorted(path.name for path in (stage.core.run_dir / "weights").iterdir())


def test_a_replaced_learner_writes_where_it_does_no_harm(stage: Stage) -> None:
    first, actor = stage.learner(), stage.actor()
    mine = request(first, trained(first, actor), staged(stage, first, 1, 1.0))
    second = stage.learner()
    again = second.lease()
    theirs = request(second, again, staged(stage, second, 1, 2.0))
    staged(stage, first, 1, 1.0)  # the first writes on: before the second's commit, and after it
    assert isinstance(second.client.call(*theirs)[0], Committed)
    assert (on_disk(stage, 1), folders(stage)) == (2.0, ["v000001"])  # what a learner left over is swept
    staged(stage, first, 1, 1.0)
    with pytest.raises(TryAgainError, match="replaced by a later one"):
        first.client.call(*mine)
    assert on_disk(stage, 1) == 2.0


@pytest.mark.parametrize("replaced", [False, True])
def test_replay_dies_between_the_renaming_and_the_commit(stage: Stage, replaced: bool) -> None:
    learner, actor = stage.learner(), stage.actor()
    commit, bulk = request(learner, trained(learner, actor), staged(stage, learner, 1, 1.0))
    assert isinstance(handle(stage.core, arrive(stage.core, b"peer", 9, commit, bulk)), Committed)
    assert folders(stage) == ["v000001"]
    stage.reopen()  # the transaction was never committed
    assert stage.core.committed == 0
    if replaced:  # a later learner's files take the place of what no commit names
        later = stage.learner()
        later.client.call(*request(later, later.lease(), staged(stage, later, 1, 2.0)))
    else:
        learner.client = DirectClient(stage.core)
        learner.client.call(commit, bulk)
    assert (on_disk(stage, 1), folders(stage)) == (2.0 if replaced else 1.0, ["v000001"])


def test_files_that_are_not_the_notices_are_not_committed(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    leased = trained(learner, actor)
    notice = staged(stage, learner, 1, 1.0)
    staged(stage, learner, 1, 3.0)
    with pytest.raises(TryAgainError, match=r"the files in .v000001.e1 are not those of the notice"):
        learner.client.call(*request(learner, leased, notice))
    assert (stage.core.committed, folders(stage)) == (0, [f".v000001.e{learner.epoch}"])


def test_a_fork_takes_its_files_too(stage: Stage) -> None:
    learner, actor = stage.learner(), stage.actor()
    learner.client.call(*request(learner, trained(learner, actor), staged(stage, learner, 1, 1.0)))
    later = stage.learner()
    staged(stage, learner, 2, 1.0)  # of the one that was replaced
    later.client.call(Fork(later.epoch, 0, staged(stage, later, 2, 0.0)))
    assert (on_disk(stage, 1), on_disk(stage, 2), folders(stage)) == (1.0, 0.0, ["v000001", "v000002"])
