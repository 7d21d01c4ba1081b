"""Every shipped config loads, alone or laid over the one that it names."""

from pathlib import Path

import pytest

import configs
from configs.load import load
from correction.pipeline import check_stacking
from learner.loss import hyper_parameters
from learner.prepare import correction_choice

FOLDER = Path(configs.__file__).parent
OVER = {"quantised-engine.toml": "tiny-cpu.toml", "two-node.toml": "one-gpu.toml"}


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.toml")))
def test_it_loads_and_its_recipe_can_be_trained(file: str) -> None:
    config = load([FOLDER / name for name in (OVER.get(file), file) if name], [])
    check_stacking(correction_choice(config))
    assert isinstance(hyper_parameters(config.recipe), dict)


def test_all_are_there() -> None:
    assert {path.name for path in FOLDER.glob("*.toml")} >= {
        "tiny-cpu.toml", "quantised-engine.toml", "smollm2-cpu.toml", "one-gpu.toml", "two-node.toml"}
