"""Starting, refusing to start, and leaving nothing behind. All but the last with a stand-in for SGLang that starts at once."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from actor.engine_process import EngineProcess
from actor.engine_settings import EngineSettings
from tests.support.engine import group_members
from tests.support.tiny_model import VOCAB, make_tiny_model
from wire.errors import ConfigError, EngineError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("word", [
    "--enable-custom-logit-processor", "--enable-custom-logit", "--enable_custom_logit_processor", "--trust-remote-code", "--trust",
    "--host", "--host=0.0.0.0", "--ho", "--port", "--api-key", "--load-format=pt", "--config", "--enable-lora", "--lora-paths",
    "--forward-hooks", "--custom-weight-loader", "--disaggregation-mode", "--grpc-mode", "--grpc-port=1", "--preferred-sampling-params",
    "--model-path", "--model",
])
def test_dangerous_arguments_are_refused_by_name(word: str) -> None:
    with pytest.raises(ValueError, match="is refused") as caught:
        EngineSettings("m", Path("log"), extra_args=("--tp-size", "2", word))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line() -> None:
    settings = EngineSettings("/m", Path("log"), max_total_tokens=4096, weight_version=7, api_key="secret", extra_args=("--tp-size", "2"))
    assert settings.arguments(1234) == [
        "--model-path", "/m", "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", "1234",
        "--load-format", "safetensors", "--weight-version", "7", "--random-seed", "0", "--max-total-tokens", "4096",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--skip-tokenizer-init",
        "--log-level", "warning", "--disable-overlap-schedule", "--sleep-on-idle",
        "--skip-server-warmup", "--tp-size", "2"]
    assert "secret" not in repr(settings)
    on_gpu = EngineSettings("/m", Path("log"), device="cuda", dtype="bfloat16").arguments(1234)
    assert "--attention-backend" not in on_gpu
    assert "--disable-overlap-schedule" not in on_gpu


async def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} for the engine is in use"):
            await EngineProcess(EngineSettings("/m", Path("log"), port=port), VOCAB).start()


async def test_what_was_not_started() -> None:
    process = EngineProcess(EngineSettings("/m", Path("log")), VOCAB)
    assert not process.alive
    await process.stop()
    with pytest.raises(EngineError, match="not started"):
        _ = process.pid


STAND_IN = """
    import json, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    if "--die" in sys.argv:
        print("no such thing", file=sys.stderr)
        sys.exit(3)
    key = "Bearer " + sys.argv[sys.argv.index("--api-key") + 1]
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", stubborn])

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            status = 200 if self.path == "/ready" or self.headers["Authorization"] == key else 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"weight_version": "5"}).encode())

        do_GET = do_POST = answer

    if "--never" not in sys.argv:
        HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
    import time; time.sleep(600)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `sglang` of our own, found before the real one: it answers HTTP, and its two children ignore SIGTERM and watch no parent."""
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return tmp_path


def left_behind(group: int, within_s: float = 10.0) -> list[int]:
    end = time.monotonic() + within_s
    while (left := group_members(group)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


async def test_start_and_stop(stand_in: Path) -> None:
    process = EngineProcess(EngineSettings("/m", stand_in / "log"), VOCAB)
    keys = set()
    for _ in range(2):
        await process.start()
        group, folder, engine = process.pid, str(process._folder), process.connect()
        assert process.alive
        assert await engine.weight_version() == 5
        await engine.close()
        members = group_members(group)
        assert len(members) == 4
        assert process.api_key.encode() not in b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members)
        keys.add(process.api_key)
        with pytest.raises(EngineError, match="started already"):
            await process.start()
        await process.stop(grace_s=0.2)
        assert group_members(group) == []
        assert not process.alive
        assert not Path(folder).exists()
    assert len(keys) == 2


async def test_a_server_killed_with_sigkill_is_noticed_and_cleared_away(stand_in: Path) -> None:
    process = EngineProcess(EngineSettings("/m", stand_in / "log"), VOCAB)
    await process.start()
    group, engine = process.pid, process.connect()
    [server] = psutil.Process(group).children()
    server.kill()
    async with asyncio.timeout(10):
        assert await process.wait() == 128 + signal.SIGKILL
    assert not process.alive
    assert not await engine.health()
    await engine.close()
    assert len(group_members(group)) == 2
    await process.stop()
    assert group_members(group) == []


async def test_a_server_that_ends_at_start_shows_the_end_of_its_log(stand_in: Path) -> None:
    log = stand_in / "log"
    process = EngineProcess(EngineSettings("/m", log, extra_args=("--die",)), VOCAB)
    for _ in range(2):
        with pytest.raises(EngineError, match="exit code 3 before it was ready; the end of .*log:\n(.*\n)*no such thing"):
            await process.start()
        assert not process.alive
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


async def test_a_server_that_is_never_ready(stand_in: Path) -> None:
    process = EngineProcess(EngineSettings("/m", stand_in / "log", extra_args=("--never",)), VOCAB)
    with pytest.raises(EngineError, match="not ready within"):
        await process.start(ready_timeout_s=0.5)
    assert not process.alive


async def test_a_start_that_is_cancelled_leaves_nothing(stand_in: Path) -> None:
    process = EngineProcess(EngineSettings("/m", stand_in / "log", extra_args=("--never",)), VOCAB)
    starting = asyncio.create_task(process.start())
    while not process.alive:
        await asyncio.sleep(0.01)
    group = process.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert group_members(group) == []


OWNER = """
    import asyncio, sys
    from pathlib import Path
    from actor.engine_process import EngineProcess
    from actor.engine_settings import EngineSettings

    async def main():
        process = EngineProcess(EngineSettings(sys.argv[1], Path(sys.argv[2]), extra_args=tuple(sys.argv[3:])), 48)
        starting = asyncio.create_task(process.start())
        while not process.alive:
            await asyncio.sleep(0.01)
        print(process.pid, process._folder, flush=True)
        await starting
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def kill_the_owner(model: str, log: Path, processes: int, *arguments: str, ready: bool) -> None:
    """Start a server from another process and kill that; then no process of the group and no socket is left."""
    command = [sys.executable, "-c", textwrap.dedent(OWNER), model, str(log), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        if ready:
            assert owner.stdout.readline() == "ready\n"
        while len(group_members(int(pid))) < processes:
            time.sleep(0.01)
        owner.kill()
    left = left_behind(int(pid))
    for straggler in left:
        os.kill(straggler, signal.SIGKILL)
    assert left == []
    assert not Path(folder).exists()


@pytest.mark.parametrize(("ready", "arguments"), [(True, []), (False, ["--never"])])
def test_nothing_outlives_an_owner_killed_with_sigkill(stand_in: Path, ready: bool, arguments: list[str]) -> None:
    """Also in mid-start, and though the server's children do not watch their parent."""
    kill_the_owner("/m", stand_in / "log", 4, *arguments, ready=ready)


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_nothing_of_a_real_server_outlives_its_owner(tmp_path: Path) -> None:
    kill_the_owner(str(make_tiny_model(tmp_path / "m")), tmp_path / "log", 5, ready=True)
