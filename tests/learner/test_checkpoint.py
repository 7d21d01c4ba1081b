"""A checkpoint goes on bit for bit, and only a sound one is ever loaded."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from learner import checkpoint
from learner.deepspeed_engine import digest_state
from tests.support.leases import anchored_by, make_engine, make_lease, state_hash, tiny_config, update
from wire.errors import RunError

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "float32"), (0, "bfloat16")])
def test_loading_goes_on_bit_for_bit(folder: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    config = tiny_config(folder, learner={"zero_stage": stage}, model={"path": str(folder), "dtype": dtype})
    engine = make_engine(config)
    leases = [anchored_by(engine, make_lease(config, seed=seed)) for seed in range(4)]
    for lease in leases[:2]:
        update(engine, config, lease)
    saved = checkpoint.save(engine, tmp_path, 2, update=2, weights_digest=digest_state(engine.full_state()), ledger_head="h", seed=0)
    assert saved is not None
    straight = [update(engine, config, lease) for lease in leases[2:]]

    fresh = make_engine(config)
    found = checkpoint.read(tmp_path, tmp_path / saved.path)
    assert found == saved
    checkpoint.load(fresh, tmp_path, found)
    assert digest_state(fresh.full_state()) == saved.saved.weights_digest
    assert fresh.steps == 2
    resumed = [update(fresh, config, lease) for lease in leases[2:]]
    assert [outcome.columns for outcome in resumed] == [outcome.columns for outcome in straight]
    assert [outcome.steps for outcome in resumed] == [outcome.steps for outcome in straight]
    assert digest_state(fresh.full_state()) == digest_state(engine.full_state())
    if stage == 0 and dtype == "float32":
        assert state_hash(fresh) == state_hash(engine)


def test_a_new_learning_rate_is_taken_up(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(folder, learner={"lr_final_ratio": 0.5, "updates": 3})
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    update(engine, config, lease)
    saved = checkpoint.save(engine, tmp_path, 1, update=1, weights_digest="w", ledger_head="h", seed=0)
    assert saved is not None
    other = tiny_config(folder, learner={"lr_final_ratio": 0.5, "updates": 3, "lr": 4e-2})
    fresh = make_engine(other)
    checkpoint.load(fresh, tmp_path, saved)
    assert [update(fresh, other, lease).metrics["lr"] for _ in range(2)] == pytest.approx([3e-2, 2e-2])


@pytest.fixture
def stored(folder: Path, tmp_path: Path) -> Path:
    config = tiny_config(folder)
    checkpoint.save(make_engine(config), tmp_path, 3, update=3, weights_digest="w", ledger_head="h", seed=0)
    return tmp_path / "checkpoints" / "v000003"


def refused(stored: Path, why: str) -> None:
    with pytest.raises(RunError, match=why):
        checkpoint.read(stored.parent.parent, stored)
    assert checkpoint.complete_versions(stored.parent.parent, 9) == []


def test_a_sound_one_is_offered_newest_first_and_not_beyond_the_commit(stored: Path, folder: Path) -> None:
    run_dir = stored.parent.parent
    checkpoint.save(make_engine(tiny_config(folder)), run_dir, 5, update=5, weights_digest="w", ledger_head="h", seed=0)
    assert checkpoint.complete_versions(run_dir, 9) == [5, 3]
    assert checkpoint.complete_versions(run_dir, 4) == [3]
    assert oct(stored.stat().st_mode)[-3:] == "700"


def test_what_a_killed_saver_left_is_no_checkpoint_and_goes_with_the_next_one(stored: Path, folder: Path) -> None:
    left = stored.with_name(".v000004.tmp")
    (left / "state").mkdir(parents=True)
    assert checkpoint.complete_versions(stored.parent.parent, 9) == [3]
    checkpoint.save(make_engine(tiny_config(folder)), stored.parent.parent, 5, update=5, weights_digest="w", ledger_head="h", seed=0)
    assert sorted(path.name for path in stored.parent.iterdir()) == ["v000003", "v000005"]


def state_file(stored: Path) -> Path:
    return next(path for path in stored.rglob("*") if path.is_file() and path.name != "manifest.json")


def test_a_changed_byte_is_refused(stored: Path) -> None:
    file = state_file(stored)
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)
    refused(stored, "digest of .* does not match")


def test_a_missing_or_added_file_is_refused(stored: Path) -> None:
    extra = stored / "state" / "extra.pt"
    extra.write_bytes(b"\x80\x04.")
    refused(stored, "extra.pt is in only one of folder and manifest")
    extra.unlink()
    state_file(stored).unlink()
    refused(stored, "is in only one of folder and manifest")


def test_one_that_others_may_write_is_refused(stored: Path) -> None:
    os.chmod(stored / "state", 0o770)
    refused(stored, "others may write to it")
    os.chmod(stored / "state", 0o700)
    os.chmod(state_file(stored), 0o620)
    refused(stored, "others may write to it")


def test_one_of_another_user_is_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(stored, "belongs to another user")


def test_a_link_is_refused(stored: Path, tmp_path: Path) -> None:
    file = state_file(stored)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(stored, "symbolic link")


def test_an_incomplete_one_is_refused(stored: Path) -> None:
    (stored / "manifest.json").unlink()
    refused(stored, "not complete")
    (stored / "manifest.json").write_text("{")
    refused(stored, "cannot be read")


def test_one_under_another_number_is_refused(stored: Path) -> None:
    stored.rename(stored.with_name("v000004"))
    with pytest.raises(RunError, match="speaks of version 3"):
        checkpoint.read(stored.parent.parent, stored.with_name("v000004"))


def test_another_number_of_ranks_is_refused(stored: Path, folder: Path) -> None:
    one = checkpoint.read(stored.parent.parent, stored)
    other = one._replace(saved=msgspec.structs.replace(one.saved, world=2))
    with pytest.raises(RunError, match="made by 2 ranks at ZeRO stage 0"):
        checkpoint.load(make_engine(tiny_config(folder)), stored.parent.parent, other)


def test_the_generator_of_random_numbers_goes_on(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_config(folder))
    torch.manual_seed(5)
    saved = checkpoint.save(engine, tmp_path, 1, update=None, weights_digest="w", ledger_head="h", seed=0)
    assert saved is not None
    wanted = torch.rand(3)
    checkpoint.load(make_engine(tiny_config(folder)), tmp_path, saved)
    assert torch.equal(torch.rand(3), wanted)
