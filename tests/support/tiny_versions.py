"""Versions of the tiny model as a learner publishes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.tiny_model import forward_logprobs
from wire.manifest import FILE, Probe, write_version
from wire.record import VersionNotice

PROBE = [5, 9, 1, 40, 7, 7, 30, 2, 11, 3, 47, 12, 8, 21, 33, 6]


def publish(run_dir: Path, version: int, folder: Path, spoil: Callable[[dict[str, Any]], None] | None = None) -> VersionNotice:
    """`spoil` changes the tensors after the learner made its probe, and before the digests are made."""
    staged = run_dir / "weights" / "staged"
    staged.mkdir(parents=True)
    tensors = load_file(folder / FILE)
    if spoil:
        spoil(tensors)
    save_file(tensors, staged / FILE)
    return write_version(run_dir, staged, version, None, Probe(PROBE, forward_logprobs(folder, PROBE[:1], PROBE[1:]).tolist()))
