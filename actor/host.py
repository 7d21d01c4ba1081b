"""Where the engine comes from: a server that the actor starts and ends, or one that somebody else runs."""

from dataclasses import replace
from pathlib import Path

from actor.engine_process import EngineProcess
from actor.engine_settings import EngineSettings
from actor.sglang_http import SGLangEngine
from configs.schema import Config
from wire.digest import digest
from wire.errors import ConfigError
from wire.folders import model_config

READY_S = 300.0


class StartedEngine:
    """A server of our own. Each start gets another random seed: a fresh engine must not repeat what the last one sampled."""

    def __init__(self, settings: EngineSettings, vocab_size: int, name: str) -> None:
        self._process, self._name, self._starts = EngineProcess(settings, vocab_size), name, 0
        self._engine: SGLangEngine | None = None

    async def start(self) -> SGLangEngine:
        await self.stop()
        self._starts += 1
        self._process.settings = replace(self._process.settings, random_seed=seed_of(self._name, self._starts))
        await self._process.start(READY_S)
        self._engine = self._process.connect()
        return self._engine

    async def stop(self) -> None:
        if self._engine:
            await self._engine.close()
        await self._process.stop()


class AttachedEngine:
    """Somebody else's server, never started or stopped by us: after trouble it is waited for."""

    def __init__(self, url: str, api_key: str | None, vocab_size: int) -> None:
        self._engine = SGLangEngine(url, api_key, vocab_size)

    async def start(self) -> SGLangEngine:
        """Raises ConfigError for a server that runs what it is sent."""
        await self._engine.wait_ready(READY_S)
        if unsafe := [setting for setting in (await self._engine.info()).unsafe if setting != NO_KEY]:
            raise ConfigError(f"actor.url: this server was started with {', '.join(unsafe)}: start it on loopback, and without settings "
                              "that run code")
        return self._engine

    async def stop(self) -> None:
        await self._engine.close()


NO_KEY = "no api_key"
"""Allowed: the server is on loopback, and its owner may have no other users on the machine."""


def host_for(config: Config, name: str, log_path: Path) -> StartedEngine | AttachedEngine:
    """Raises ConfigError for what the engine cannot be started with."""
    actor, vocab_size = config.actor, vocabulary(Path(config.model.path))
    if actor.url:
        return AttachedEngine(actor.url, read_key(actor.api_key_file), vocab_size)
    try:
        settings = EngineSettings(config.model.path, log_path, device=actor.device, dtype=actor.dtype,
                                  max_total_tokens=actor.max_total_tokens, extra_args=tuple(actor.engine_args))
    except ValueError as error:
        raise ConfigError(f"actor.engine_args: {error}") from None
    return StartedEngine(settings, vocab_size, f"{config.run.seed} {name}")


def vocabulary(model: Path) -> int:
    """Rows of the model's embedding, from its config.json."""
    try:
        return int(model_config(str(model))["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path = {str(model)!r}: its config.json gives no vocab_size ({error})") from None


def read_key(file: str | None) -> str | None:
    try:
        return Path(file).read_text().strip() if file else None
    except OSError as error:
        raise ConfigError(f"actor.api_key_file = {file!r} cannot be read: {error.strerror}") from None


def seed_of(name: str, start: int) -> int:
    """31 bits."""
    return int(digest(f"{name} {start}".encode())[:8], 16) >> 1
