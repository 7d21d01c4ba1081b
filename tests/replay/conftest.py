"""A run without sockets, on a clock that tests drive."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from replay.core import Core
from tests.support.replay import FakeClock, LightActor, LightLearner, make_config, make_core


@dataclass
class Stage:
    """`core` and its clock; `reopen` is a crash: what was not committed is gone, memory is rebuilt."""

    folder: Path
    config: Config
    core: Core
    clock: FakeClock

    def reopen(self, **tables: dict[str, Any]) -> None:
        self.core.store.close()
        if tables:
            tree = self.config.model_dump(mode="json")
            self.config = type(self.config).model_validate({**tree, **{name: {**tree[name], **values} for name, values in tables.items()}})
        self.core = make_core(self.config, clock=self.clock)

    def actor(self, name: str = "a0") -> LightActor:
        return LightActor(self.core, self.config, name)

    def learner(self) -> LightLearner:
        return LightLearner(self.core, self.config)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.core.store.rows(sql, *values)

    def kinds(self) -> list[str]:
        return [kind for kind, in self.rows("SELECT kind FROM ledger ORDER BY seq")]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**settings: Any) -> Stage:
        config, clock = make_config(tmp_path, **settings), FakeClock()
        stages.append(Stage(tmp_path, config, make_core(config, clock=clock), clock))
        return stages[-1]

    yield make
    for stage in stages:
        stage.core.store.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage()
