"""A program in the completion against the `tests` column, each test in a sandbox of its own."""

import json
import re
from typing import Any

from verifier.builtin.sandbox import LAYERS, NoSandbox, require_sandbox, run_python
from verifier.call import text_of
from wire.record import Failed, Scored

__version__ = "1"
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def passes(completions: list[Any], tests: list[Any], test_s: float = 2.0, **_: Any) -> list[None | Scored | Failed]:
    """1.0 when the program prints the expected output for every test, else 0.0; a program that is too slow or ends badly is wrong.

    The program is the last ``` fence of the completion, else all of it. `tests` is a list of {"input": str, "output": str} (or JSON text of
    one): standard input and the expected standard output, compared without trailing white space. The expected output never enters the
    sandbox. Each test may take `test_s` seconds: leave room for all of them within the verifier's deadline.
    """
    return [_verdict(text_of(completion), rows, test_s) for completion, rows in zip(completions, tests, strict=True)]


def _verdict(text: str, tests: Any, test_s: float) -> None | Scored | Failed:
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if not tests:
        return None
    fences = FENCE.findall(text)
    program = fences[-1] if fences else text
    try:
        require_sandbox()
        for number, test in enumerate(tests):
            output = run_python(program, test["input"], test_s)
            if output is None or _lines(output) != _lines(test["output"]):
                return Scored(0.0, f"test {number} of {len(tests)} failed; {LAYERS}")
    except NoSandbox as error:
        return Failed("no sandbox", str(error))
    return Scored(1.0, LAYERS)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
