"""`leeway keys`, and what processes say at their start when keys are missing or open to others."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from leeway.feed import Feed
from leeway.keys_command import main
from leeway.plan import settle_endpoint
from tests.support.keys import KeyRing
from tests.support.replay import write_prompts
from tests.support.versions import make_model
from wire.errors import ConfigError
from wire.process import free_port


def test_it_says_what_it_made_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert main([folder, "gpu-2"]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: made learner, actor, gpu-2, server" in out
    assert f"{folder}/server.key and {folder}/gpu-2.key_secret" in out
    assert 'security.actor_key = "gpu-2"' in out
    assert main([folder, "gpu-3"]) == 0
    assert "a running replay sees the longer list" in capsys.readouterr().out
    assert main([folder]) == 0
    assert "nothing to make" in capsys.readouterr().out
    assert main([folder, "Gpu"]) == 2
    assert capsys.readouterr().err.startswith("leeway: error: key name 'Gpu'")
    (tmp_path / "README.md").touch()
    assert main([str(tmp_path / "README.md")]) == 2
    assert "README.md: cannot be made a folder for keys (File exists)" in capsys.readouterr().err


def config(tmp_path: Path) -> Path:
    file = tmp_path / "c.toml"
    file.write_text(f'[model]\npath = "{make_model(tmp_path / "model")}"\n[task]\ntrain = "{write_prompts(tmp_path / "p.jsonl", 3)}"\n'
                    f'[run]\ndir = "{tmp_path}/runs"\n')
    return file


def start(module: str, file: Path, *sets: str) -> subprocess.CompletedProcess[str]:
    words = [word for item in sets for word in ("--set", item)]
    return subprocess.run([sys.executable, "-m", module, str(file), *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["replay", "actor"])
def test_beyond_loopback_without_keys_no_process_starts(tmp_path: Path, module: str) -> None:
    done = start(module, config(tmp_path), "replay.endpoint=tcp://10.0.0.1:5757")
    assert done.returncode == 2
    assert "an address beyond loopback needs keys (`leeway keys FOLDER`" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("module", "file"), [("replay", "server.key_secret"), ("actor", "actor.key_secret"),
                                              ("leeway.cli", "allowed.toml"), ("learner", "learner.key_secret")])
def test_keys_that_others_can_read_are_refused_by_every_process(tmp_path: Path, module: str, file: str) -> None:
    ring = KeyRing(tmp_path / "keys")
    (ring.folder / file).chmod(0o640)
    words = ["run"] if module == "leeway.cli" else []
    done = subprocess.run([sys.executable, "-m", module, *words, str(config(tmp_path)), "--set", f"security.keys={ring.folder}"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"others have access to {ring.folder / file}: chmod 600" in done.stderr.splitlines()[-1]


def test_a_real_replay_with_keys_answers_the_live_table(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    endpoint = f"tcp://127.0.0.2:{free_port('127.0.0.2')}"
    command = [sys.executable, "-m", "replay", str(config(tmp_path)), "--set", f"security.keys={ring.folder}", "--set",
               f"replay.endpoint={endpoint}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        feed, stranger = Feed(endpoint, ring.client("learner")), Feed(endpoint)
        try:
            end, values = time.monotonic() + 30, None
            while values is None and time.monotonic() < end:
                values = feed.poll()
                assert stranger.poll() is None
                time.sleep(0.02)
            assert values is not None
            assert values["awaited"].startswith("the learner's initial weights")
        finally:
            feed.close()
            stranger.close()
            process.terminate()


def test_an_address_beyond_loopback_is_settled_with_keys_only() -> None:
    with pytest.raises(ConfigError, match="needs keys"):
        settle_endpoint("tcp://0.0.0.0:0")
    assert settle_endpoint("tcp://0.0.0.0:0", keyed=True).startswith("tcp://0.0.0.0:")
