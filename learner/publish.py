"""A version's files: weights as transformers names them, config and tokenizer beside them, so that the folder loads by itself."""

import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.deepspeed_engine import TrainEngine
from wire.errors import TryAgainError, WeightsError
from wire.manifest import FILE, MANIFEST, Manifest, Probe, check_file, seal_version, staged_path, version_path
from wire.record import VersionNotice

PROBE_TOKENS = 64
COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


class Publisher:
    """Writes versions of one run. `model_path`: where tokenizer and the like come from; `tokens`: how many ids the tokenizer knows."""

    def __init__(self, engine: TrainEngine, run_dir: Path, model_path: Path, tokens: int, seed: int) -> None:
        self.engine, self.run_dir = engine, run_dir
        self.companions = {path.name: path.read_bytes() for path in sorted(model_path.iterdir()) if is_companion(path)}
        self.companions["config.json"] = engine.policy.model.config.to_json_string().encode()
        generator = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, engine.policy.model.config.max_position_embeddings)
        self.probe_ids = torch.randint(min(tokens, engine.policy.vocabulary), (1, length), generator=generator)
        self.bytes = 0
        """Of the weights published last, on rank 0."""

    def publish(self, version: int, parent: int | None, epoch: int) -> tuple[VersionNotice | None, dict[str, Tensor]]:
        """Write the live weights as `version`, where replay takes them from when it accepts them. Every rank calls it; rank 0 gets the
        notice and the tensors. TryAgainError when replay has removed the folder: a later learner published this version."""
        state, probe = self.engine.full_state(), self.probe()
        if not self.engine.ranks.is_first:
            return None, {}
        staged = self.run_dir / staged_path(version, epoch)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            self.write_model(staged, state)
            self.bytes = (staged / FILE).stat().st_size
            return seal_version(staged, version, parent, probe), state
        except (OSError, SafetensorError):
            if staged.exists():
                raise
            raise TryAgainError(f"version {version} was published by a later learner") from None

    def write_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        save_file(state, folder / FILE, metadata={"format": "pt"})
        for name, content in self.companions.items():
            (folder / name).write_bytes(content)

    def probe(self) -> Probe:
        """Fixed random tokens and the live weights' log-probs of them, at temperature 1."""
        device, length = self.engine.device, self.probe_ids.shape[1]
        values = self.engine.score(self.probe_ids.to(device), torch.ones(1, device=device), torch.arange(length - 1, device=device))
        return Probe(self.probe_ids[0].tolist(), values.tolist())


def is_companion(path: Path) -> bool:
    """A tokenizer's file, a chat template, generation defaults; not the weights' index, and not what we write ourselves."""
    return path.suffix in COPIED and path.name not in (MANIFEST, "config.json") and not path.name.endswith(".index.json")


def read_version(run_dir: Path, version: int) -> tuple[str, dict[str, Tensor]] | None:
    """Weights digest and tensors of a stored version, digests checked; None when it is gone. Raises WeightsError when it is damaged."""
    folder = run_dir / version_path(version)
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        check_file(folder / FILE, manifest)
        return manifest.weights_digest, load_file(folder / FILE)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"version {version}: not readable: {error}") from None
