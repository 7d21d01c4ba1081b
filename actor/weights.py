"""A version notice becomes a checked copy in a folder that only this actor writes: what was checked is what the engine loads.

    copy, or fetch from replay -> manifest (digest of the notice) -> every tensor's digest -> names and shapes of the model -> (rounding)

Any difference raises WeightsError before the engine has seen a byte of it.
"""

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from actor.fetch import Fetcher
from actor.rounding import Rounding, round_file
from actor.scratch import TMPFS, Scratch
from wire.digest import digest
from wire.errors import ConfigError, WeightsError
from wire.manifest import FILE, MANIFEST, Probe, TensorEntry, check_file, read_entries, read_manifest, version_path
from wire.record import VersionNotice

COPIES = 4
"""Free tmpfs wanted, in sizes of the model: the version in use, the next one, its rounded form, and one to spare."""

MOST_GROWTH, MARGIN = 4, 64 << 20
"""A version's file is at most so many times the model's on disk (float32 where that is 8-bit), and a little."""


@dataclass(frozen=True)
class Loadable:
    """A checked version in the private folder. `entries` digest the file as the engine loads it, which rounding may have changed."""

    version: int
    weights_digest: str
    folder: Path
    entries: dict[str, TensorEntry]
    probe: Probe


class PrivateWeights:
    """Checked copies of the versions in `run_dir`. `model` is the folder the engine starts from. Call `close` in the end."""

    def __init__(self, run_dir: Path, model: Path, rounding: Rounding, tmpfs: Path | None = None, fetcher: Fetcher | None = None) -> None:
        self._run_dir, self._rounding, self._fetcher = run_dir, rounding, fetcher
        self._shapes, self._tied = model_shapes(model)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        self._limit = MOST_GROWTH * size + MARGIN
        self._scratch = Scratch(COPIES * size, tmpfs or TMPFS)
        self._fetched = self._scratch.folder / "fetched"

    async def bring(self, notice: VersionNotice) -> None:
        """Have the version's files where `take` finds them: fetched from replay unless the run directory is visible here. Raises
        WeightsError."""
        if self._fetcher is not None and (self._fetcher.always or not await asyncio.to_thread(self._visible, notice)):
            await self._fetcher.fetch(notice, self._fetched, self._limit)

    def take(self, notice: VersionNotice) -> Loadable:
        """Copy and check. Raises WeightsError; then nothing is left of the copy."""
        if notice.path != version_path(notice.version):
            raise WeightsError(f"version {notice.version}: its files cannot be at {notice.path!r}")
        target = Path(tempfile.mkdtemp(prefix=f"v{notice.version:06d}-", dir=self._scratch.folder))
        try:
            return self._checked_copy(notice, target)
        except BaseException:
            shutil.rmtree(target)
            raise

    def check_again(self, loadable: Loadable) -> None:
        """Raises WeightsError when the private copy is no longer what was checked."""
        file = loadable.folder / FILE
        if not file.exists() or read_entries(file) != loadable.entries:
            raise WeightsError(f"version {loadable.version}: the private copy has changed")

    def keep_only(self, loadable: Loadable | None) -> None:
        """Remove every other copy."""
        for folder in self._scratch.folder.iterdir():
            if folder.is_dir() and folder != self._fetched and (loadable is None or folder != loadable.folder):
                shutil.rmtree(folder)

    def signature(self, notice: VersionNotice) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when the version's files change: a refused version is worth another look then."""
        return tuple(_stat(self._run_dir / version_path(notice.version) / name) for name in (MANIFEST, FILE))

    def close(self) -> None:
        self._scratch.close()

    def _checked_copy(self, notice: VersionNotice, target: Path) -> Loadable:
        fetched = self._fetched / str(notice.version)
        try:
            for name in (MANIFEST, FILE):
                if fetched.exists():
                    (fetched / name).rename(target / name)
                else:
                    shutil.copyfile(self._run_dir / notice.path / name, target / name)
        except OSError as error:
            raise WeightsError(f"version {notice.version}: {name} cannot be copied: {error.strerror}") from None
        finally:
            if fetched.exists():
                shutil.rmtree(fetched)
        manifest = read_manifest(target, notice)
        check_file(target / FILE, manifest)
        self._check_shapes(notice.version, {name: entry.shape for name, entry in manifest.tensors.items()})
        entries = manifest.tensors
        if self._rounding != "none":
            round_file(target / FILE, self._rounding)
            entries = read_entries(target / FILE)
        return Loadable(notice.version, manifest.weights_digest, target, entries, manifest.probe)

    def _visible(self, notice: VersionNotice) -> bool:
        """Whether the run directory is here: another run's may lie at the same place."""
        manifest = self._run_dir / version_path(notice.version) / MANIFEST
        try:
            return digest(manifest.read_bytes()) == notice.manifest_digest
        except OSError:
            return False

    def _check_shapes(self, version: int, shapes: dict[str, list[int]]) -> None:
        """The engine ignores a name it does not know, keeps the old tensor for one it is not given, and dies of a wrong shape."""
        ignored = {"lm_head.weight"} if self._tied else set()
        if odd := sorted((shapes.keys() ^ self._shapes.keys()) - ignored):
            raise WeightsError(f"version {version}: tensor {odd[0]} is {'not in the model' if odd[0] in shapes else 'missing'}")
        for name in sorted(shapes.keys() & self._shapes.keys()):
            if shapes[name] != self._shapes[name]:
                raise WeightsError(f"version {version}: {name} has shape {shapes[name]}, the model's is {self._shapes[name]}")


def model_shapes(model: Path) -> tuple[dict[str, list[int]], bool]:
    """Shape of every tensor in the model's safetensors files, and whether its output head is its embedding. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    try:
        tied = bool(json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False))
        for file in model.glob("*.safetensors"):
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path = {str(model)!r} cannot be read: {error}") from None
    if not shapes:
        raise ConfigError(f"model.path = {str(model)!r} holds no safetensors files")
    return shapes, tied


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
