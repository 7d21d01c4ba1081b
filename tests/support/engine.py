"""A real SGLang server on the CPU, started once per test file (a paused one keeps a core busy), and its two versions of a tiny model."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from actor.engine_process import EngineProcess
from actor.engine_settings import EngineSettings
from actor.sglang_http import SGLangEngine
from tests.support.tiny_model import VOCAB, make_tiny_model


@dataclass
class RealEngine:
    """`folders[v]` holds version v. The server starts with version 0. Models have no end token: give `stop_token_ids`."""

    process: EngineProcess
    engine: SGLangEngine
    folders: list[Path]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def real_engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealEngine]:
    """Tests that use it need `pytest.mark.asyncio(loop_scope="session")`, and leave it unpaused."""
    root = tmp_path_factory.mktemp("engine")
    folders = [make_tiny_model(root / f"v{version}", seed=version, eos=None) for version in range(2)]
    process = EngineProcess(EngineSettings(str(folders[0]), root / "sglang.log", max_total_tokens=16384), VOCAB)
    await process.start()
    engine = process.connect()
    try:
        yield RealEngine(process, engine, folders)
    finally:
        await engine.close()
        await process.stop()


def group_members(group: int) -> list[int]:
    """Pids of the living (not zombie) processes in a process group."""
    return [process.pid for process in psutil.process_iter(["status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE and process_group(process.pid) == group]


def process_group(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[2])
    except (FileNotFoundError, ProcessLookupError):
        return None
