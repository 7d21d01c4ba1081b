"""The example of docs/methods.md, as a reader would run it: its numbers by hand, and nothing beside torch is needed."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_runs_as_printed_and_its_numbers_are_right() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/methods.md").read_text(), re.DOTALL)
    code += "\nimport sys\nprint(loss.item(), *cur.grad.flatten().tolist())\n"
    code += "print([name for name in ('deepspeed', 'transformers', 'pydantic', 'zmq', 'msgspec') if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    *_, numbers, others = done.stdout.splitlines()
    small = math.exp(-0.1)  # old/mu of the first token, and of the last
    # A = +-.5; of five tokens one is clipped at 1.28, two have ratio 1 and weight 1, one is dropped
    loss = (-0.5 * 1.28 * small - 0.5 + 0.5 + 0.5 * small) / 5
    assert [float(number) for number in numbers.split()] == pytest.approx([loss, 0, -0.1, 0, 0, 0.1, 0.1 * small], abs=1e-6)
    assert done.stdout.startswith("-0.0253 tensor(")
    assert others == "[]"
