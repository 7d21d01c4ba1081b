import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.verifier.helpers import processes_with


@pytest.fixture
def wait_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Runs workers in this folder, with a variable by which every process of the test is found, and checks for leftovers."""
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def wait() -> None:
        give_up = time.monotonic() + 20
        while left := processes_with(f"TMPDIR={tmp_path}"):
            assert time.monotonic() < give_up, f"processes left: {left}"
            time.sleep(0.02)

    yield wait
    wait()
