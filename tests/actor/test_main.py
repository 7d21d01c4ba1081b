"""The actor as a process, without an engine."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actor.name import free_name
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


def test_an_actor_that_died_gets_its_name_again_and_a_second_one_another(tmp_path: Path) -> None:
    """Two processes without a name; the first is killed and started again. What they say holds their names."""
    model, config = make_model(tmp_path / "model"), tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "{model}"\n[task]\ntrain = "none"\n[replay]\nendpoint = "tcp://127.0.0.1:59124"\n')
    running: list[subprocess.Popen[str]] = []

    def start() -> str:
        running.append(subprocess.Popen([sys.executable, "-m", "actor", str(config)], stderr=subprocess.PIPE, text=True))
        assert (stderr := running[-1].stderr) is not None
        line = stderr.readline()
        assert "waiting for replay" in line
        return line.split()[2]

    try:
        first, second = start(), start()
        assert (first.rpartition("-")[2], second.rpartition("-")[2]) == ("0", "1")
        host = "".join(c if c.isalnum() or c in ".-" else "-" for c in socket.gethostname())
        assert first.rpartition("-")[0] == second.rpartition("-")[0] == host
        for killed, name in ((0, first), (1, second)):
            running[killed].kill()
            running[killed].wait()
            assert start() == name
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_names_are_per_replay_and_free_again_at_once() -> None:
    (name, holder), (other, second), (elsewhere, third) = free_name("tcp://x:1"), free_name("tcp://x:1"), free_name("tcp://x:2")
    assert [one.rpartition("-")[2] for one in (name, other, elsewhere)] == ["0", "1", "0"]
    holder.close()
    again, holder = free_name("tcp://x:1")
    assert again == name
    for one in (holder, second, third):
        one.close()
