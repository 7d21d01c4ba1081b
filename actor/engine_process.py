"""Starts one SGLang server on loopback, and sees to it that nothing of it stays behind."""

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from actor.engine_launch import API_KEY, FOLDER, OWNER
from actor.engine_settings import CPU_ENVIRONMENT, EngineSettings
from actor.sglang_http import SGLangEngine
from wire.errors import ConfigError, EngineError
from wire.process import free_port, signal_group

HERE = Path(__file__).resolve().parent
ENGINE_ONLY = str(Path(sys.prefix) / "engine-only")
"""What `make setup` keeps for SGLang alone on a CPU: a torchvision built for CUDA, over which transformers elsewhere would stumble."""
LOG_TAIL_LINES, LOG_TAIL_BYTES = 15, 8192
POLL_S = 0.05
CHANGES_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"


class EngineProcess:
    """One server; start it again after `stop` for a fresh one. The server dies with the process (and the thread) that called `start`."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        self.settings, self._vocab_size = settings, vocab_size
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        self.url = self.api_key = ""

    @property
    def pid(self) -> int:
        """Leader of the process group that all of SGLang's processes are in."""
        if self._process is None:
            raise EngineError("the engine was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def connect(self) -> SGLangEngine:
        return SGLangEngine(self.url, self.api_key, self._vocab_size)

    async def start(self, ready_timeout_s: float = 300.0) -> None:
        """Return when the server takes requests. Raises ConfigError for a port in use, EngineError with the end of its log if it ends or is
        not ready in time; then nothing of it is left."""
        if self._process is not None:
            raise EngineError("the engine was started already; stop it first")
        try:
            port = free_port(wanted=self.settings.port)
        except OSError as error:
            raise ConfigError(f"port {self.settings.port} for the engine is in use: choose another, or 0 for any") from error
        self.url, self.api_key = f"http://127.0.0.1:{port}", self.settings.api_key or secrets.token_urlsafe(32)
        self._folder = tempfile.mkdtemp(prefix="leeway-engine-")
        # By path and with -P: neither the working directory nor our own packages are on SGLang's sys.path.
        command = [sys.executable, "-P", str(HERE / "engine_launch.py"), *self.settings.arguments(port)]
        log = os.open(self.settings.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self._environment())
        finally:
            os.close(log)
        try:
            await self._ready(ready_timeout_s)
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def wait(self) -> int:
        """The server's exit code, once it has ended."""
        if self._process is None:
            raise EngineError("the engine was not started")
        return await self._process.wait()

    async def stop(self, grace_s: float = 2.0) -> None:
        """SIGTERM to the group, SIGKILL after `grace_s`; returns when none of its processes is left. Does nothing when there is none."""
        if self._process is None:
            return
        group = self._process.pid
        try:
            if self.alive and grace_s > 0:
                signal_group(group, signal.SIGTERM)
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        except TimeoutError:
            pass  # it is killed below
        finally:
            signal_group(group, signal.SIGKILL)
            await self._process.wait()
            while signal_group(group, signal.SIGKILL):  # noqa: ASYNC110  (nobody can tell us)
                await asyncio.sleep(POLL_S)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._process = self._folder = None

    async def _ready(self, timeout_s: float) -> None:
        """Whichever comes first: the server answers, or it has ended."""
        engine = self.connect()
        answering, ended = asyncio.create_task(engine.wait_ready(timeout_s)), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({answering, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineError(f"SGLang ended with exit code {ended.result()} before it was ready; {log_tail(self.settings.log_path)}")
            try:
                answering.result()
            except EngineError as error:
                raise EngineError(f"{error}; {log_tail(self.settings.log_path)}") from error
        finally:
            answering.cancel()
            ended.cancel()
            await asyncio.gather(answering, ended, return_exceptions=True)
            await engine.close()

    def _environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != CHANGES_LOGPROBS}
        environment |= {OWNER: str(os.getpid()), API_KEY: self.api_key, FOLDER: str(self._folder)}
        if Path(self.settings.model_path).is_dir():
            environment |= {"HF_HUB_OFFLINE": "1"}
        if self.settings.device == "cpu":
            path = [str(HERE / "cpu_shim"), ENGINE_ONLY, os.environ.get("PYTHONPATH", "")]
            environment |= CPU_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        return environment


def log_tail(path: Path) -> str:
    """The last lines, for an error message."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([f"the end of {path}:", *lines[-LOG_TAIL_LINES:]])
