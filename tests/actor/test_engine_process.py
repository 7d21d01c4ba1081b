"""Starting, refusing to start, and leaving nothing behind. The last two start a real server."""

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

from actor.engine_process import EngineProcess, free_port
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
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--skip-tokenizer-init", "--log-level", "warning", "--disable-overlap-schedule", "--sleep-on-idle",
        "--skip-server-warmup", "--tp-size", "2"]
    assert "secret" not in repr(settings)
    on_gpu = EngineSettings("/m", Path("log"), device="cuda", dtype="bfloat16").arguments(1234)
    assert "--attention-backend" not in on_gpu
    assert "--disable-overlap-schedule" not in on_gpu


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} for the engine is in use"):
            free_port(port)
    assert free_port(0) > 0


async def test_a_server_that_ends_at_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    process = EngineProcess(EngineSettings(str(tmp_path / "no-model"), log, extra_args=("--no-such-flag",)), VOCAB)
    for _ in range(2):
        with pytest.raises(EngineError, match="unrecognized arguments: --no-such-flag"):
            await process.start()
        assert not process.alive
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    await process.stop()


async def test_what_was_not_started() -> None:
    process = EngineProcess(EngineSettings("/m", Path("log")), VOCAB)
    assert not process.alive
    await process.stop()
    with pytest.raises(EngineError, match="not started"):
        _ = process.pid


def left_behind(group: int, within_s: float = 10.0) -> list[int]:
    end = time.monotonic() + within_s
    while (left := group_members(group)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


OWNER = """
    import asyncio, sys
    from pathlib import Path
    from actor.engine_process import EngineProcess
    from actor.engine_settings import EngineSettings

    async def main():
        process = EngineProcess(EngineSettings(sys.argv[1], Path(sys.argv[2])), int(sys.argv[3]))
        starting = asyncio.create_task(process.start())
        while not process.alive:
            await asyncio.sleep(0.01)
        print(process.pid, process._folder, flush=True)
        await starting
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.sglang
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill_when_ready", [True, False])
def test_nothing_outlives_an_owner_killed_with_sigkill(tmp_path: Path, kill_when_ready: bool) -> None:
    """Also in mid-start, when SGLang's processes are born but do not watch their parent yet."""
    model = make_tiny_model(tmp_path / "m")
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER), str(model), str(tmp_path / "log"), str(VOCAB)],
                             stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    with owner.stdout:
        pid, folder = owner.stdout.readline().split()
        if kill_when_ready:
            assert owner.stdout.readline() == "ready\n"
        while len(group_members(int(pid))) < 5:
            time.sleep(0.01)
        owner.kill()
        owner.wait()
        assert left_behind(int(pid)) == []
        assert not Path(folder).exists()


@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_a_server_process_killed_with_sigkill_is_noticed_and_cleared_away(tmp_path: Path) -> None:
    process = EngineProcess(EngineSettings(str(make_tiny_model(tmp_path / "m")), tmp_path / "log", weight_version=5), VOCAB)
    await process.start()
    group, engine = process.pid, process.connect()
    assert await engine.weight_version() == 5
    [server] = [child.pid for child in psutil.Process(group).children()]
    assert process.api_key.encode() not in b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in group_members(group))
    os.kill(server, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await process.wait() == 128 + signal.SIGKILL
    assert not process.alive
    with pytest.raises(EngineError):
        await engine.health()
    await engine.close()
    await process.stop()
    assert group_members(group) == []
