"""The actor as a process, without an engine."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.versions import make_model


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_it_waits_for_replay_it_exits_130_and_leaves_no_child(tmp_path: Path, sign: signal.Signals) -> None:
    model = make_model(tmp_path / "model")
    config = tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "{model}"\n[task]\ntrain = "none"\n[replay]\nendpoint = "tcp://127.0.0.1:59123"\n')
    with subprocess.Popen([sys.executable, "-m", "actor", str(config)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting for replay" in process.stderr.readline()
        verifier, = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sign)
        assert process.wait(20) == 130
        assert not verifier.is_running()


@pytest.mark.parametrize(("settings", "message"), [
    ("actor.engine_args=['--trust-remote-code']", "actor.engine_args"), ("task.verifier=nonesuch", "nonesuch"),
    ("actor.urll=x", "actor.url"), ("model.path=nowhere", "model.path = 'nowhere'"),
    ("actor.url=http://127.0.0.1:9 actor.api_key_file=nowhere", "actor.api_key_file = 'nowhere'")])
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, settings: str, message: str) -> None:
    model = make_model(tmp_path / "model")
    config = tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "{model}"\n[task]\ntrain = "none"\n[replay]\nendpoint = "tcp://127.0.0.1:59123"\n')
    command = [sys.executable, "-m", "actor", str(config), *(word for setting in settings.split() for word in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
