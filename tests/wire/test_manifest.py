"""A version's files: what is written is what is read, and every kind of damage is named."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wire.errors import WeightsError
from wire.manifest import FILE, MANIFEST, Manifest, Probe, check_file, read_entries, read_manifest, weights_digest, write_version
from wire.record import VersionNotice

TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
           "b.weight": np.ones((2, 3), np.float32), "c.bias": np.zeros(3, np.float32)}
PROBE = Probe([1, 2, 3], [-0.5, -0.25])


def make_version(run: Path, tensors: dict[str, np.ndarray] = TENSORS, version: int = 3) -> VersionNotice:
    staged = run / "weights" / "staged"
    staged.mkdir(parents=True)
    save_file(tensors, staged / FILE)
    return write_version(run, staged, version, version - 1, PROBE)


def reread(run: Path, notice: VersionNotice) -> Manifest:
    folder = run / notice.path
    manifest = read_manifest(folder, notice)
    check_file(folder / FILE, manifest)
    return manifest


def test_round_trip(tmp_path: Path) -> None:
    notice = make_version(tmp_path)
    manifest = reread(tmp_path, notice)
    assert notice.path == "weights/v000003"
    assert (manifest.version, manifest.parent, manifest.probe) == (3, 2, PROBE)
    assert manifest.tensors["a.weight"].shape == [2, 3] and manifest.tensors["a.weight"].dtype == "F32"
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v000003"]


def test_all_of_a_version_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was flushed, with its size at that moment, and when the folder was renamed."""
    seen: list[tuple[str, str, int]] = []
    flush, rename = os.fsync, Path.rename

    def watched_flush(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append(("flushed", str(path.relative_to(tmp_path)), path.stat().st_size if path.is_file() else len(list(path.iterdir()))))
        flush(handle)

    def watched_rename(path: Path, target: Path) -> Path:
        seen.append(("renamed", str(path.relative_to(tmp_path)), 0))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_flush)
    monkeypatch.setattr(Path, "rename", watched_rename)
    folder = tmp_path / make_version(tmp_path).path
    sizes = [(folder / name).stat().st_size for name in (FILE, MANIFEST)]
    assert seen == [("flushed", "weights/staged/model.safetensors", sizes[0]), ("flushed", "weights/staged/manifest.json", sizes[1]),
                    ("flushed", "weights/staged", 2), ("renamed", "weights/staged", 0), ("flushed", "weights", 1)]


def test_digest_ignores_layout_but_not_names_or_values(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one")
    save_file(dict(reversed(TENSORS.items())), tmp_path / "two", metadata={"format": "pt"})
    swapped = TENSORS | {"a.weight": TENSORS["b.weight"], "b.weight": TENSORS["a.weight"]}
    save_file(swapped, tmp_path / "three")
    one, two, three = (weights_digest(read_entries(tmp_path / name)) for name in ("one", "two", "three"))
    assert one == two != three


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    notice = make_version(tmp_path)
    file = tmp_path / notice.path / FILE
    whole = file.read_bytes()
    manifest = read_manifest(tmp_path / notice.path, notice)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            check_file(file, manifest)


def test_every_flipped_data_bit_is_refused(tmp_path: Path) -> None:
    notice = make_version(tmp_path)
    file = tmp_path / notice.path / FILE
    whole = file.read_bytes()
    manifest = read_manifest(tmp_path / notice.path, notice)
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(start, len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        with pytest.raises(WeightsError, match="digest of"):
            check_file(file, manifest)


@pytest.mark.parametrize(("change", "says"), [
    ({"a.weight": np.arange(6, dtype=np.float32).reshape(3, 2)}, r"a.weight is F32\[3, 2\]"),
    ({"a.weight": np.arange(6, dtype=np.float64).reshape(2, 3)}, "a.weight is F64"),
    ({"unknown.weight": np.ones(1, np.float32)}, "unknown.weight is in only one"),
    ({"a.weight": TENSORS["b.weight"], "b.weight": TENSORS["a.weight"]}, "digest of a.weight"),
])
def test_other_tensors_are_named(tmp_path: Path, change: dict[str, np.ndarray], says: str) -> None:
    notice = make_version(tmp_path)
    manifest = read_manifest(tmp_path / notice.path, notice)
    save_file(load_file(tmp_path / notice.path / FILE) | change, tmp_path / "other")
    with pytest.raises(WeightsError, match=says):
        check_file(tmp_path / "other", manifest)


@pytest.mark.parametrize("header", [
    b'[]', b'{"w": 5}', *(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": %b}}' % offsets
                          for offsets in (b"[0]", b"[0, 1, 2]", b'["0", "4"]', b"[0, 2.5]", b"null")),
    b'{"w": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}', b'{"w": {"dtype": "F32", "shape": "11", "data_offsets": [0, 4]}}',
    b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    b"[" * 100_000, b'{"a":' * 100_000, b'{"__metadata__": ' + b"[" * 5_000])
def test_a_header_that_is_json_and_no_safetensors_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightsError, match="its header is not safetensors"):
        read_entries(tmp_path / FILE)


def test_a_manifest_that_was_not_committed_is_refused(tmp_path: Path) -> None:
    notice = make_version(tmp_path)
    path = tmp_path / notice.path / MANIFEST
    body = json.loads(path.read_text())
    body["probe"]["logprobs"][0] = -0.125
    path.write_text(json.dumps(body))
    with pytest.raises(WeightsError, match="not the one committed"):
        read_manifest(tmp_path / notice.path, notice)


def test_another_version_s_manifest_is_refused(tmp_path: Path) -> None:
    notice = make_version(tmp_path)
    other = VersionNotice(4, notice.path, notice.manifest_digest, notice.weights_digest)
    with pytest.raises(WeightsError, match="speaks of version 3"):
        read_manifest(tmp_path / notice.path, other)


def test_a_leftover_of_the_same_number_is_replaced(tmp_path: Path) -> None:
    make_version(tmp_path, {"a.weight": np.zeros(1, np.float32)})
    notice = make_version(tmp_path)
    assert set(reread(tmp_path, notice).tensors) == set(TENSORS)
