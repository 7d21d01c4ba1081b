"""`python -m scripts.torture`: what its parts run exists, counts are added up, a failure is named and does not end the rest."""

import time
from pathlib import Path

import pytest

from scripts.page import place, placed
from scripts.torture import __main__ as command
from scripts.torture import run as running
from scripts.torture.parts import PARTS, Part
from scripts.torture.run import Outcome
from tests.support.torture import mine, shared

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
from tests.support.torture import scaled, tell

def test_one():
    tell(kills=scaled(1, 1500), lost=0)

def test_two():
    tell(kills=2)

def test_three():
    pytest.skip("not here")
"""


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two parts, one of which fails, and a page for their results."""
    for name, text in (("test_good.py", TESTS), ("test_bad.py", "def test_it():\n    assert 1 == 2, 'a prompt was skipped'\n")):
        (tmp_path / name).write_text(text)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- torture: results -->\n<!-- end -->\nafter\n")
    monkeypatch.setattr(running, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(command, "PAGE", page)
    parts = {name: Part(f"what {name} does", ((str(tmp_path / f"test_{name}.py"), "--rootdir", str(tmp_path), "-c", "/dev/null"),))
             for name in ("bad", "good")}
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return page


def test_the_parts_run_tests_that_exist() -> None:
    for part in PARTS.values():
        paths = [ROOT / argument.split("::")[0].removeprefix("--ignore=") for job in part.jobs for argument in job if "tests/" in argument]
        assert paths
        assert [path for path in paths if not path.exists()] == []


def test_a_part_that_fails_is_named_and_the_rest_go_on(only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 1
    said = capsys.readouterr().out
    assert "bad: FAILED" in said
    assert "1,502 kills, 0 lost; not run: test_three: not here" in said
    assert said.splitlines()[-1] == "torture: these parts failed: bad (output: build/torture)"
    rows = [line.split(" | ") for line in placed(only, "torture: results").splitlines()[2:4]]
    assert [row[0] for row in rows] == ["| bad", "| good"]
    assert rows[0][2].startswith("**failed**: test_it: AssertionError: a prompt was skipped")
    assert rows[1][2] == "1,502 kills, 0 lost; not run: test_three: not here"
    assert only.read_text().startswith("before\n") and only.read_text().endswith("<!-- end -->\nafter\n")


def test_a_row_stays_until_its_part_is_run_again_and_a_share_writes_none(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([Outcome(True, "1 | 2 kills", 3.2), Outcome(False, "x", 1.0), Outcome(True, "3 kills", 1.0)])
    monkeypatch.setattr(command, "run", lambda name, part, processes, share: next(said))
    assert command.main(["good"]) == 0
    before = placed(only, "torture: results").splitlines()
    assert before[2] == "| bad | what bad does | not run | - |"
    assert before[3] == f"| good | what good does | 1 / 2 kills | {time.strftime('%Y-%m-%d')}, 3 s |"
    assert command.main(["bad"]) == 1
    after = placed(only, "torture: results").splitlines()
    assert after[3] == before[3]
    assert command.main(["--share", "0.5", "good"]) == 0
    assert placed(only, "torture: results").splitlines() == after
    assert command.main(["nothing"]) == 2


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- bench: head -->\nold | a\\1\n<!-- end -->\n")
    place(tmp_path / "page.md", "bench: head", "new | b\\1")
    assert placed(tmp_path / "page.md", "bench: head") == "new | b\\1"
    with pytest.raises(ValueError, match="has no place for it: add '<!-- bench: slow -->'"):
        place(tmp_path / "page.md", "bench: slow", "x")


def test_shards_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, things = [], []
    for shard in range(3):
        monkeypatch.setattr("tests.support.torture.SHARD", shard)
        monkeypatch.setattr("tests.support.torture.SHARDS", 3)
        counts.append(shared(10))
        things += mine(range(10))
    assert counts == [4, 3, 3]
    assert sorted(things) == list(range(10))
