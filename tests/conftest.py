"""What holds for the whole suite: one thread per process, and no skip that is not in `allowed_skips.txt`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("default", deadline=None)
settings.register_profile("torture", deadline=None, max_examples=5000)
settings.load_profile("default")

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


def allowed_skips() -> Iterator[tuple[str, str]]:
    for line in ALLOWED.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            test, _, reason = line.partition("|")
            yield test.strip(), reason.strip()


class SkipGuard:
    """Fails the session when a test was skipped that the list does not name."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))

    pytest_runtest_logreport = note
    pytest_collectreport = note

    def forbidden(self) -> list[tuple[str, str]]:
        allowed = list(allowed_skips())
        return [(test, reason) for test, reason in self.skipped
                if not any(test.startswith(known) and reason == why for known, why in allowed)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self.forbidden():
            terminalreporter.write_line(f"FAILED {test}: skipped ({reason}), and tests/allowed_skips.txt does not allow it", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")
