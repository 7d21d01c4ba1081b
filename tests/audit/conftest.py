import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.run_builder import small_run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nobody touched. Read only."""
    return small_run(tmp_path_factory.mktemp("audit") / "small")


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "small"))


@pytest.fixture
def damage(run: Path) -> Iterator[Callable[..., list[tuple]]]:
    """Runs one statement on the copy and commits; a SELECT gives its rows."""
    db = sqlite3.connect(run / "replay.sqlite")

    def execute(sql: str, *values: object) -> list[tuple]:
        rows = db.execute(sql, values).fetchall()
        db.commit()
        return rows

    yield execute
    db.close()
