import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from actor.scratch import PREFIX, Scratch
from actor.weights import PrivateWeights, model_shapes
from tests.support.versions import SHAPES, damage_kinds, make_model, publish, publish_bad, tensors
from wire.errors import ConfigError, WeightsError
from wire.manifest import FILE, read_entries


@pytest.fixture
def private(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "tmpfs").mkdir()
    weights = PrivateWeights(tmp_path / "run", make_model(tmp_path / "model"), "none", tmp_path / "tmpfs")
    yield weights
    weights.close()


def copies(tmp_path: Path) -> list[str]:
    return sorted(entry.name[:7] for entry in next((tmp_path / "tmpfs").glob(PREFIX + "*")).iterdir() if entry.is_dir())


def test_what_is_loaded_is_a_private_checked_copy(tmp_path: Path, private: PrivateWeights) -> None:
    notice = publish(tmp_path / "run", 3)
    taken = private.take(notice)
    (tmp_path / "run" / notice.path / FILE).write_bytes(b"changed later")
    assert (taken.version, taken.weights_digest) == (3, notice.weights_digest)
    assert taken.entries == read_entries(taken.folder / FILE)
    np.testing.assert_array_equal(load_file(taken.folder / FILE)["model.norm.weight"], tensors(3)["model.norm.weight"])
    private.check_again(taken)


@pytest.mark.parametrize("kind", [kind for kind in damage_kinds() if kind != "swapped"])
def test_files_that_do_not_match_are_refused_and_removed(tmp_path: Path, private: PrivateWeights, kind: str) -> None:
    notice = publish_bad(tmp_path / "run", 1, kind)
    with pytest.raises(WeightsError, match="version 1|truncated"):
        private.take(notice)
    assert copies(tmp_path) == []


def test_swapped_tensors_with_true_digests_pass_the_files_check(tmp_path: Path, private: PrivateWeights) -> None:
    """Only the probe can tell: see test_service.py."""
    private.take(publish_bad(tmp_path / "run", 1, "swapped"))


def test_other_copies_are_removed(tmp_path: Path, private: PrivateWeights) -> None:
    private.take(publish(tmp_path / "run", 1))
    second = private.take(publish(tmp_path / "run", 2))
    private.keep_only(second)
    assert copies(tmp_path) == ["v000002"]
    private.keep_only(None)
    assert copies(tmp_path) == []


def test_a_private_copy_that_changed_is_found(tmp_path: Path, private: PrivateWeights) -> None:
    taken = private.take(publish(tmp_path / "run", 1))
    body = bytearray((taken.folder / FILE).read_bytes())
    body[-1] ^= 1
    (taken.folder / FILE).write_bytes(bytes(body))
    with pytest.raises(WeightsError, match="has changed"):
        private.check_again(taken)
    shutil.rmtree(taken.folder)
    with pytest.raises(WeightsError, match="has changed"):
        private.check_again(taken)


def test_rounded_copies_are_checked_in_their_rounded_form(tmp_path: Path) -> None:
    (tmp_path / "tmpfs").mkdir()
    weights = PrivateWeights(tmp_path / "run", make_model(tmp_path / "model"), "fp8", tmp_path / "tmpfs")
    notice = publish(tmp_path / "run", 1)
    taken = weights.take(notice)
    assert taken.weights_digest == notice.weights_digest  # what was published is what is confirmed
    weights.check_again(taken)
    rounded, published = load_file(taken.folder / FILE), tensors(1)
    changed = {name for name in SHAPES if not np.array_equal(rounded[name], published[name])}
    assert changed == {"model.layers.0.mlp.a.weight", "model.layers.0.mlp.b.weight"}
    weights.close()


def test_a_tied_head_may_be_left_out_or_written(tmp_path: Path) -> None:
    (tmp_path / "tmpfs").mkdir()
    model = make_model(tmp_path / "model")
    (model / "config.json").write_text('{"tie_word_embeddings": true}')
    weights = PrivateWeights(tmp_path / "run", model, "none", tmp_path / "tmpfs")
    weights.take(publish(tmp_path / "run", 1, tensors(1, {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"})))
    weights.close()


def test_changed_files_change_the_signature(tmp_path: Path, private: PrivateWeights) -> None:
    notice = publish(tmp_path / "run", 1)
    before = private.signature(notice)
    assert private.signature(notice) == before
    os.utime(tmp_path / "run" / notice.path / FILE, (1, 1))
    assert private.signature(notice) != before
    shutil.rmtree(tmp_path / "run" / notice.path)
    assert private.signature(notice) == (None, None)


def test_a_model_without_safetensors_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        model_shapes(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no safetensors"):
        model_shapes(tmp_path)


def test_what_a_dead_actor_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    living = Scratch(0, tmp_path)
    dead = Scratch(0, tmp_path)
    dead._lock.close()
    new = Scratch(0, tmp_path)
    assert living.folder.exists()
    assert not dead.folder.exists()
    living.close()
    new.close()
    assert list(tmp_path.iterdir()) == []


def test_without_room_the_temporary_folder_is_used(tmp_path: Path) -> None:
    scratch = Scratch(1 << 60, tmp_path)
    assert scratch.folder.parent != tmp_path
    scratch.close()
