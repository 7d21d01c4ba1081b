"""The config refuses exactly the stackings that the pure functions refuse, over all combinations of the axes they share."""

from inspect import Parameter, signature
from itertools import product
from typing import Any, get_args

import pytest

from configs.load import validate
from configs.recipe_table import Recipe
from configs.stacking import GEOMETRIC
from configs.stacking import check_stacking as check_config
from correction import choice as pure
from correction.filters import geometric_filter, sequence_filter
from learner.prepare import FILTER_KEYS, correction_choice
from tests.configs.test_rules import tree

AXES: dict[str, tuple[Any, ...]] = {
    "engine": ("none", "tis", "icepop"), "staleness": pure.STALENESS,
    "objective": (*pure.RATIO_OBJECTIVES, *pure.TOTAL_RATIO_OBJECTIVES, "unit"),
    "base": ("old", "prox"), "prox": ("version_in", "ewma"), "group_mass_cap": (None, 1.2), "aggregation": ("token_mean", "sequence_mean"),
}
SOUND = validate(tree(replay={"max_staleness": 0}, sampling={"top_logprobs": 4}, learner={"groups_per_update": 32}))


def says(check: Any, value: Any) -> str | None:
    try:
        check(value)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("steps", [1, 2])
def test_they_refuse_the_same(steps: int) -> None:
    learner = SOUND.learner.model_copy(update={"steps_per_update": steps})
    refused = 0
    for values in product(*AXES.values()):
        recipe = SOUND.recipe.model_copy(update={**dict(zip(AXES, values, strict=True)), "delta": 0.1})
        config = SOUND.model_copy(update={"recipe": recipe, "learner": learner})
        ours, theirs = says(check_config, config), says(pure.check_stacking, correction_choice(config))
        assert (ours is None) == (theirs is None), (values, ours, theirs)
        refused += ours is not None
    assert 0 < refused < 3 * 6 * 11 * 2 * 2 * 2 * 2


def test_every_choice_of_the_pure_functions_can_be_written_down() -> None:
    fields = Recipe.model_fields
    for key, names in (("engine", pure.ENGINES), ("filter", pure.FILTERS), ("staleness", pure.STALENESS), ("objective", AXES["objective"])):
        assert set(get_args(fields[key].annotation)) == set(names)
    assert set(FILTER_KEYS) == set(pure.FILTERS)


def test_the_bounds_that_the_config_compares_are_the_filters_own() -> None:
    keywords = signature(geometric_filter).parameters
    assert (keywords["low"].default, keywords["high"].default) == GEOMETRIC
    keywords = signature(sequence_filter).parameters
    assert {keywords["low"].default, keywords["high"].default} == {Parameter.empty}  # there both have to be given
