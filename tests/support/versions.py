"""Version files of a toy model, for actors with a fake engine: real safetensors and manifests, a probe that the fake engine agrees with."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.actor.fake_engine import FakeEngine
from wire.manifest import FILE, Probe, write_version
from wire.record import VersionNotice

SHAPES = {"model.embed_tokens.weight": (16, 4), "model.layers.0.mlp.a.weight": (4, 4), "model.layers.0.mlp.b.weight": (4, 4),
          "model.norm.weight": (4,), "lm_head.weight": (16, 4)}
PROBE = [1, 2, 3, 4, 5, 6, 7, 8]


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_model(folder: Path) -> Path:
    """What the engine starts from."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16, "tie_word_embeddings": False}))
    save_file(tensors(0), folder / FILE)
    return folder


def publish(run_dir: Path, version: int, content: dict[str, np.ndarray] | None = None, engine: FakeEngine | None = None) -> VersionNotice:
    """Write version `version`; its probe is what `engine` (default: a fresh FakeEngine) computes under it."""
    staged = run_dir / "weights" / "staged"
    staged.mkdir(parents=True)
    save_file(content or tensors(version), staged / FILE)
    logprobs = (engine or FakeEngine()).logprobs(version, PROBE)
    return write_version(run_dir, staged, version, version - 1 if version else None, Probe(PROBE, logprobs.tolist()))


def damage_kinds() -> list[str]:
    return ["truncated", "wrong_digest", "wrong_shape", "unknown_name", "missing_name", "swapped", "no_files", "elsewhere"]


def publish_bad(run_dir: Path, version: int, kind: str) -> VersionNotice:
    """A version that must be refused. `swapped`: two tensors of one shape exchanged, all digests and the probe of the true weights."""
    content = tensors(version)
    if kind == "wrong_shape":
        content["model.layers.0.mlp.a.weight"] = content["model.layers.0.mlp.a.weight"].reshape(2, 8)
    if kind == "unknown_name":
        content["model.layers.9.weight"] = np.ones(4, np.float32)
    if kind == "missing_name":
        del content["model.norm.weight"]
    if kind == "swapped":
        first, second = "model.layers.0.mlp.a.weight", "model.layers.0.mlp.b.weight"
        content[first], content[second] = content[second], content[first]
    other = FakeEngine(seed=1) if kind == "swapped" else None  # its log-probs are not those of the engine under test
    notice = publish(run_dir, version, content, other)
    file = run_dir / notice.path / FILE
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    if kind == "wrong_digest":
        body = bytearray(file.read_bytes())
        body[-1] ^= 1
        file.write_bytes(bytes(body))
    if kind == "no_files":
        shutil.rmtree(run_dir / notice.path)
    if kind == "elsewhere":
        return VersionNotice(version, f"../elsewhere/v{version}", notice.manifest_digest, notice.weights_digest)
    return notice
