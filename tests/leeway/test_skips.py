"""A skip that nobody allowed fails the session, also one at import; an allowed one does not."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_runs():
    pass

def test_engine():
    pytest.skip("no engine")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parent.parent / "conftest.py").read_text())
    pytester.makepyfile(test_it=TESTS)
    return pytester


def allow(suite: pytest.Pytester, text: str) -> None:
    (suite.path / "allowed_skips.txt").write_text(text)


def test_a_skip_not_in_the_list_fails(suite: pytest.Pytester) -> None:
    allow(suite, "# nothing\n")
    result = suite.runpytest_subprocess()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_engine: skipped (no engine)*"])


def test_a_skip_in_the_list_passes(suite: pytest.Pytester) -> None:
    allow(suite, "test_it.py::test_engine | no engine\n")
    assert suite.runpytest_subprocess().ret == 0


def test_the_reason_counts(suite: pytest.Pytester) -> None:
    allow(suite, "test_it.py::test_engine | no GPU\n")
    assert suite.runpytest_subprocess().ret == 1


def test_a_missing_import_of_a_whole_file_fails(suite: pytest.Pytester) -> None:
    allow(suite, "test_it.py::test_engine | no engine\n")
    suite.makepyfile(test_other="import pytest\npytest.importorskip('no_such_engine')\ndef test_more(): pass\n")
    assert suite.runpytest_subprocess().ret == 1
