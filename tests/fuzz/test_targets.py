"""Every target holds for its seeds and for what was found once. Without the engine."""

import importlib
import random

import pytest

from tests.fuzz.__main__ import TARGETS, found


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_what_was_found_once(target: str) -> None:
    module = importlib.import_module(f"tests.fuzz.{target}")
    inputs = [*module.seeds(), *found(target)]
    assert len(inputs) >= 2
    for data in inputs:
        module.check(data)


@pytest.mark.parametrize("target", TARGETS)
def test_a_hundred_mutations(target: str) -> None:
    """They are made of the seeds, and reach a check each."""
    module, source = importlib.import_module(f"tests.fuzz.{target}"), random.Random(20261130)
    seeds = module.seeds()
    for _ in range(100):
        module.check(module.mutate(source.choice(seeds), source, lambda part: part[::-1]))
