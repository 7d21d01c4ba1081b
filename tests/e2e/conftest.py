"""Whole runs, and the promise that none of their processes outlives a test."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.whole_run import WholeRun


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., WholeRun]]:
    made: list[WholeRun] = []

    def make(name: str, *sets: str, over: tuple[str, ...] = ()) -> WholeRun:
        made.append(WholeRun(tmp_path_factory.mktemp("runs"), name, *sets, over=over))
        return made[-1]

    yield make
    for run in made:
        run.clean_up()
