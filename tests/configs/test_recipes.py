"""Named recipes: what a name stands for, and what wins over what."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import load, load_resolved, validate
from configs.needs import record_needs, scores_prox, uncorrected
from configs.recipes import RECIPES, full_keys
from configs.schema import Config
from tests.configs.test_rules import tree

FILES = Path(__file__).parent.parent.parent / "configs"


def get(config: Config, key: str) -> Any:
    table, _, setting = key.partition(".")
    return getattr(getattr(config, table), setting)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_loads_and_says_what_it_is(name: str) -> None:
    config = validate(tree(recipe={"name": name}))
    for key, value in full_keys(RECIPES[name].settings).items():
        assert get(config, key) == value
    assert RECIPES[name].citation
    assert RECIPES[name].status == "established" or RECIPES[name].note, "say what is reconstructed"


def test_a_name_stands_for_its_settings_and_explicit_keys_win() -> None:
    config = validate(tree(recipe={"name": "gmc_grpo", "group_mass_cap": 1.5}, sampling={"max_new_tokens": 12}))
    recipe = config.recipe
    assert (recipe.objective, recipe.estimator, recipe.aggregation, recipe.constant) == ("score", "dr_grpo", "constant", 12)
    assert recipe.group_mass_cap == 1.5
    assert validate(tree(recipe={"name": "sis"}, sampling={"top_logprobs": 4})).sampling.top_logprobs == 4
    assert validate(tree(recipe={"name": "grpo_kl"}, learner={"reference": "models/sft"})).learner.reference == "models/sft"


def test_a_later_layer_that_names_a_recipe_begins_the_recipe_anew() -> None:
    config = load([FILES / "tiny-cpu.toml"], ["recipe.group_mass_cap=2.0", "recipe.name=gmc_grpo"])
    assert (config.recipe.objective, config.recipe.group_mass_cap, config.recipe.constant) == ("score", 2.0, 4)
    config = load([FILES / "tiny-cpu.toml"], ["recipe.name=gspo"])
    assert (config.recipe.objective, config.recipe.aggregation, config.recipe.constant) == ("gspo", "sequence_mean", None)
    config = load([FILES / "tiny-cpu.toml"], ["recipe.clip_high=0.3"])
    assert (config.recipe.name, config.recipe.estimator, config.recipe.clip_high) == ("dr_grpo", "dr_grpo", 0.3)


def test_what_a_recipe_wants_of_other_tables_gives_way_to_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\npath = "m"\n[task]\ntrain = "t"\n[learner]\nreference = "models/sft"\n')
    assert load([tmp_path / "a.toml"], ["recipe.name=grpo_kl"]).learner.reference == "models/sft"
    with pytest.raises(ValueError, match="set sampling.top_logprobs = 10"):
        load([tmp_path / "a.toml"], ["recipe.name=sis", "sampling.top_logprobs=0"])


def test_a_resolved_config_says_the_same_again(tmp_path: Path) -> None:
    config = validate(tree(recipe={"name": "decoupled_ppo", "engine": "icepop"}))
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert load_resolved(tmp_path / "config.json") == config


def test_a_lone_name_that_is_no_recipe_is_refused_and_one_beside_settings_is_a_label() -> None:
    with pytest.raises(ValueError, match="'gmc_grop': no such recipe.*the nearest is gmc_grpo") as error:
        validate(tree(recipe={"name": "gmc_grop"}))
    assert "\n" not in str(error.value)
    assert validate(tree(recipe={"name": "mine", "objective": "cispo"})).recipe.name == "mine"


@pytest.mark.parametrize(("name", "near"), [
    ("gmc_grop", "gmc_grpo"), ("daop", "dapo"), ("gpro", "grpo"), ("icepopp", "icepop"), ("dr-grpo", "dr_grpo"), ("drgrpo", "dr_grpo"),
    ("decoupled_po", "decoupled_ppo"), ("m2p", "m2po"), ("GRPO", "grpo"),
])
def test_a_name_that_looks_like_a_mistyped_recipe_is_refused_beside_settings_too(tmp_path: Path, name: str, near: str) -> None:
    settings = [f"recipe.name={name}", "recipe.objective=cispo"]
    with pytest.raises(ValueError, match=f"'{name}': no such recipe; did you mean {near}\\?"):
        load([FILES / "tiny-cpu.toml"], settings)


@pytest.mark.parametrize("name", ["second_try", "my_grpo", "grpo_v2", "grpo2", "tis_2", "gmc_grpo_low_cap", "icepop_test", "rloo_like"])
def test_a_label_that_holds_a_recipes_name_is_no_typing_error(name: str) -> None:
    config = load([FILES / "tiny-cpu.toml"], [f"recipe.name={name}", "recipe.objective=cispo"])
    assert (config.recipe.name, config.recipe.objective) == (name, "cispo")


def test_constant_is_the_longest_response_unless_it_is_given() -> None:
    assert validate(tree(recipe={"aggregation": "constant"}, sampling={"max_new_tokens": 77})).recipe.constant == 77
    assert validate(tree(recipe={"aggregation": "constant", "constant": 5}, sampling={"max_new_tokens": 77})).recipe.constant == 5
    assert validate(tree(recipe={"aggregation": "constant"})).recipe.constant == validate(tree()).sampling.max_new_tokens


@pytest.mark.parametrize(("name", "says"), [
    ("dr_grpo", ["old"]), ("gmc_grpo", ["prox (a scoring pass per update)"]), ("sis", ["old", "the engine's top log-probs"]),
    ("zcpo", ["old", "ref over the whole vocabulary"]), ("grpo_kl", ["old", "ref"]),
    ("remax", ["a greedy response per group", "old"]),
    ("ewma_ppo", ["old", "prox (a running average of the weights)"]),
])
def test_what_a_recipe_needs(name: str, says: list[str]) -> None:
    config = validate(tree(recipe={"name": name}))
    assert record_needs(config) == says
    assert scores_prox(config) == any(need.startswith("prox") for need in says)


def test_uncorrected_staleness_is_said_above_budget_0_only() -> None:
    name = {"name": "online_icepop"}
    assert "staleness is uncorrected" in str(uncorrected(validate(tree(recipe=name, replay={"max_staleness": 4}))))
    assert uncorrected(validate(tree(recipe=name, replay={"max_staleness": 0}))) is None
    for other in ("gmc_grpo", "sis", "dapo"):
        assert uncorrected(validate(tree(recipe={"name": other}))) is None
