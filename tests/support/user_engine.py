"""An SGLang server that somebody else started: `python -m tests.support.user_engine MODEL PORT KEY_FILE LOG` serves until it is ended."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from actor.engine_process import EngineProcess
from actor.engine_settings import EngineSettings
from wire.process import free_port

ROOT = Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def serve(model: Path, home: Path) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """(url, file with its key, process)."""
    port, key_file = free_port(), home / "engine.key"
    key_file.write_text("a-key-of-the-user\n")
    key_file.chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.user_engine", str(model), str(port), str(key_file), str(home / "engine.log")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield f"http://127.0.0.1:{port}", key_file, process
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


async def main(model: str, port: str, key_file: str, log: str) -> None:
    vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    settings = EngineSettings(model, Path(log), port=int(port), api_key=Path(key_file).read_text().strip(), max_total_tokens=8192)
    process = EngineProcess(settings, vocab)
    await process.start()
    print("ready", flush=True)
    await process.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
