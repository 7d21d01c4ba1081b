"""The built-in rewards against literal cases."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verifier.helpers import item
from verifier import VerifierPool
from verifier.builtin import sandbox
from verifier.builtin.exact import exact, extracted
from verifier.builtin.maths import equivalent
from verifier.builtin.program import passes
from verifier.builtin.tool_calls import conforms
from wire.record import Failed, Scored

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("7", "7", 1.0), (" 7\n", "7", 1.0), ("7", 7, 1.0), ("17", "7", 0.0), ("", "7", 0.0), ("7", None, None)],
)
def test_exact(completion: str, answer: Any, reward: float | None) -> None:
    assert exact([completion], [answer]) == [reward]
    assert exact([[{"role": "assistant", "content": completion}]], [answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("17x", 0.0),
        ("7", 1.0),
        ("<answer>7</answer>", 1.0),
        ("so\n<answer>\n7 </answer> done", 1.0),
        ("<answer>17x</answer>", 0.0),
        ("<answer>7</answer> no, <answer>8</answer>", 0.0),
        ("<answer>8</answer> no, <answer>7</answer>", 1.0),
        ("the answer is 7", 0.0),
    ],
)
def test_reasoning_gym_extracts_and_requires_equality(completion: str, reward: float) -> None:
    assert extracted([completion], ["7"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1.0),
        ("The final answer is 72.", "72", 1.0),
        ("17x", "7", 0.0),
        ("no idea", "7", 0.0),
        ("", "7", 0.0),
        ("7", 7, 1.0),
        ("7", None, None),
    ],
)
def test_math(completion: str, answer: Any, reward: float | None) -> None:
    assert equivalent([completion], [answer]) == [reward]


def test_math_with_an_answer_that_cannot_be_read_is_a_failure() -> None:
    assert equivalent(["7"], [""]) == [Failed("unreadable_answer")]


def test_math_sets_no_alarm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify's alarm would make a hang "not equal", a 0."""
    monkeypatch.setattr(signal, "alarm", lambda seconds: pytest.fail("an alarm was set"))
    assert equivalent([r"\boxed{8}"], ["8"]) == [1.0]


@pytest.mark.asyncio
async def test_math_that_never_ends_is_a_timeout_not_a_zero() -> None:
    pool = VerifierPool("math", deadline_s=3.0, slots=2)
    await pool.start()
    verdicts = await pool.verify([item("7", answer="7"), item("9**9**9**9", answer="7"), item("8", answer="7")])
    await pool.close()
    assert [getattr(verdict, "reward", None) for verdict in verdicts] == [1.0, None, 0.0]
    assert isinstance(verdicts[1], Failed) and verdicts[1].reason == "timeout"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": "get_weather"}, "arguments": {"type": "object", "required": ["city"]}},
    "required": ["name", "arguments"],
}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (CALL, 1.0),
        (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", 1.0),
        (f"```json\n{CALL}\n```", 1.0),
        (f"<tool_call>{CALL}</tool_call><tool_call>{{}}</tool_call>", 0.0),
        ('{"name": "get_weather", "arguments": {}}', 0.0),
        (f"Let me see. {CALL}", 0.0),
        (CALL.replace('"Oslo"', "NaN"), 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(completion: str, reward: float) -> None:
    assert conforms([completion], [SCHEMA]) == [reward]
    assert conforms([completion], [json.dumps(SCHEMA)]) == [reward]


def test_json_schema_faults_of_the_schema_are_not_zeros() -> None:
    with pytest.raises(Exception, match="is not valid under any of the given schemas"):
        conforms(["{}"], [{"type": "no such type"}])
    with pytest.raises(Exception, match="Unresolvable"):
        conforms(["{}"], [{"$ref": "http://127.0.0.1:9/schema.json"}])
    assert conforms(["{}"], [None]) == [None]


SUM = "print(sum(map(int, input().split())))"
STDLIB = os.path.dirname(os.__file__)
TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "10 20 30", "output": "60\n"}]


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (SUM, 1.0),
        (f"Like this:\n```python\n{SUM}\n```\nas asked", 1.0),
        ("print(3)", 0.0),
        (SUM + "\nraise SystemExit(1)", 0.0),
        ("while True: pass", 0.0),
        (SUM + "\nprint('x' * 10**6)", 0.0),
        ("this is no program", 0.0),
    ],
)
def test_code(program: str, reward: float) -> None:
    [verdict] = passes([program], [TESTS], test_s=1.0)
    assert isinstance(verdict, Scored)
    assert verdict.reward == reward
    assert sandbox.LAYERS in verdict.detail


@needs_bwrap
@pytest.mark.parametrize(
    "attempt",
    [
        "open('{secret}').read()",
        "open('{secret}', 'w').write('mine')",
        "open('/mine', 'w')",
        "open('/usr/mine', 'w')",
        "open('/tmp/big', 'wb').write(bytes(20 * 2**20))",
        "bytearray(2 * 2**30)",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import os; os.kill({pid}, 0)",
        "import os; os.environ['PATH']",
        "open('/proc/1/root{secret}')",
    ],
)
def test_what_the_sandbox_stops(attempt: str, tmp_path: Path) -> None:
    secret = tmp_path / "answers.json"
    secret.write_text("60")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, pid = server.getsockname()[1], os.getpid()
        statement = attempt.replace("{secret}", str(secret)).replace("{port}", str(port)).replace("{pid}", str(pid))
        program = f"try:\n    {statement}\nexcept BaseException as e: print('stopped')\nelse: print('escaped')"
        assert sandbox.run_python(program, "", 10.0) == "stopped\n"
    assert secret.read_text() == "60"


@needs_bwrap
@pytest.mark.asyncio
async def test_the_deadline_ends_what_runs_in_the_sandbox() -> None:
    pool = VerifierPool("code", deadline_s=1.5, arguments={"test_s": 600.0})
    await pool.start()
    [verdict] = await pool.verify([item("while True: pass", tests=TESTS)])
    await pool.close()
    assert isinstance(verdict, Failed) and verdict.reason == "timeout"
    give_up = time.monotonic() + 20
    while any(b"runpy.run_path" in command for command in _command_lines()):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def _command_lines() -> Iterator[bytes]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield Path("/proc", name, "cmdline").read_bytes()


@pytest.fixture
def untried() -> Iterator[None]:
    """Forget that the sandbox has been seen to work."""
    sandbox.require_sandbox.cache_clear()
    yield
    sandbox.require_sandbox.cache_clear()


@needs_bwrap
@pytest.mark.parametrize(
    ("option", "detail"),
    [(["--no-such-layer"], "no-such-layer"), (["--tmpfs", "/usr"], "No such file"), (["--tmpfs", STDLIB], "prints 42 did not")],
)
@pytest.mark.usefixtures("untried")
def test_a_sandbox_that_does_not_work_is_no_wrong_answer(option: list[str], detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = sandbox._layers
    monkeypatch.setattr(sandbox, "_layers", lambda *fds: [*layers(*fds), *option])
    [verdict] = passes([SUM], [TESTS])
    assert isinstance(verdict, Failed)
    assert (verdict.reason, detail in verdict.detail) == ("no sandbox", True), verdict


@pytest.mark.usefixtures("untried")
def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = tmp_path / "ran"
    assert passes([f"open({str(ran)!r}, 'w')"], [TESTS]) == [Failed("no sandbox", "bubblewrap (bwrap) is not installed")]
    assert not ran.exists()


def test_code_without_tests_has_no_verdict() -> None:
    assert passes([SUM, SUM], [[], None]) == [None, None]
