"""Named recipes: what a name stands for, and what wins over what."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import load, load_resolved, validate
from configs.needs import record_needs, scores_prox, uncorrected
from configs.readers import READERS, WITH_A_VALUE, check_readers
from configs.recipe_table import Recipe
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


@pytest.mark.parametrize(("name", "published"), [
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "estimator": "grpo", "aggregation": "sequence_mean"}),
    ("grpo_kl", {"kl": 0.04, "kl_estimator": "k3", "kl_in": "loss"}),
    ("dr_grpo", {"estimator": "dr_grpo", "aggregation": "constant"}),
    ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "dynamic_sampling": True, "overlong": 0.2}),
    ("tis", {"engine": "tis", "engine_cap": 2.0, "engine_level": "token"}),
    ("icepop", {"engine": "icepop", "engine_low": 0.5, "engine_high": 5.0, "denominator": "original"}),
    ("online_icepop", {"objective": "unit", "engine": "icepop", "engine_low": 0.5, "engine_high": 5.0}),
    ("geo_rs", {"filter": "geometric", "filter_low": 0.999, "filter_high": 1.001}),
    ("k3_rs", {"filter": "k3", "filter_threshold": 0.01}), ("tis_veto", {"filter": "veto", "filter_threshold": 1e-4}),
    ("m2po", {"staleness": "m2_mask", "m2_budget": 0.04}), ("opsm", {"staleness": "opsm", "opsm_threshold": 0.5}),
    ("zcpo", {"estimator": "zcpo", "zcpo_beta": 4.0, "kl": 0.0}), ("dual_clip", {"dual_clip": 3.0}),
    ("gspo", {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"}),
    ("luspo", {"objective": "luspo", "clip_low": 2e-3, "clip_high": 2.5e-3, "aggregation": "sequence_mean"}),
    ("cispo", {"objective": "cispo", "cap": 5.0, "aggregation": "token_mean"}),  # absolute: not 1 + 5
    ("gppo", {"objective": "gppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}), ("ripo", {"objective": "ripo", "delta": 0.05}),
    ("minirl", {"objective": "minirl", "clip_low": 0.2, "clip_high": 0.27, "cap": 5.0, "aggregation": "length_weighted"}),
])
def test_the_numbers_of_a_recipe_are_the_published_ones(name: str, published: dict[str, Any]) -> None:
    """Written out once more: a slip in the table of recipes is another method under a paper's name."""
    recipe = validate(tree(recipe={"name": name})).recipe
    assert {key: getattr(recipe, key) for key in published} == published


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


def test_null_unsets_what_a_recipe_or_a_file_sets() -> None:
    config = load([FILES / "tiny-cpu.toml"], ["recipe.name=dapo", "recipe.overlong=null", "task.heldout=null"])
    assert (config.recipe.overlong, config.recipe.dynamic_sampling, config.task.heldout) == (None, True, None)
    with pytest.raises(ValueError, match="needs a reference policy"):
        load([FILES / "tiny-cpu.toml"], ["recipe.name=zcpo", "learner.reference=null"])


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
    assert "staleness is uncorrected" in str(uncorrected(validate(tree(recipe=name, replay={"max_staleness": 1}))))


def test_no_other_named_recipe_leaves_staleness_uncorrected_at_budget_4() -> None:
    silent = [name for name in RECIPES if uncorrected(validate(tree(recipe={"name": name}, replay={"max_staleness": 4}))) is None]
    assert set(RECIPES) - set(silent) == {"rloo", "online_icepop"}


@pytest.mark.parametrize(("recipe", "steps"), [
    ({}, 2), ({"staleness": "opsm"}, 2), ({"staleness": "m2_mask"}, 2), ({"staleness": "m2_range"}, 2), ({"staleness": "sis"}, 2),
    ({"objective": "cispo"}, 2),
    ({"engine": "tis"}, 2), ({"prox": "ewma"}, 1), ({"prox": "ewma"}, 2)], ids=str)
def test_a_clip_on_prox_alone_leaves_staleness_uncorrected(recipe: dict[str, Any], steps: int) -> None:
    """cur/prox is what this update did; prox/old is what the updates since the sampling did."""
    def line(budget: int, **more: Any) -> str | None:
        return uncorrected(validate(tree(recipe={"base": "prox", **recipe, **more}, learner={"steps_per_update": steps},
                                         sampling={"top_logprobs": 10}, replay={"max_staleness": budget})))
    for budget in (1, 4):
        assert f"nothing weighs by prox/old: with replay.max_staleness = {budget}" in str(line(budget))
        assert line(budget, staleness="decoupled") is None
    assert line(0, ewma_window=1 if "prox" in recipe else None) is None


def test_a_running_average_over_no_version_is_said_to_be_idle() -> None:
    def line(**tables: Any) -> str | None:
        return uncorrected(validate(tree(**{"recipe": {"name": "ewma_ppo"}, "replay": {"max_staleness": 0}, **tables})))
    assert "cur/prox is identically 1 and the clip never acts" in str(line())
    assert line(replay={"max_staleness": 1}) is None
    assert line(recipe={"name": "ewma_ppo", "ewma_window": 2}) is None
    assert line(learner={"steps_per_update": 2}) is None  # the second step's ratio is not 1


# ---------------------------------------------------------------- settings that nothing reads
UNREAD = [
    ("recipe.delta=0.1", "recipe.delta = 0.1 is read with recipe.objective = 'ripo' or 'fdiv' only, and here it is 'ppo'"),
    ("recipe.engine_cap=3.0", "recipe.engine_cap = 3.0 is read with recipe.engine = 'tis' only, and here it is 'none'"),
    ("recipe.overlong_limit=4", "recipe.overlong_limit = 4 is read with recipe.overlong only, which is not set"),
    ("recipe.kl_weight=total", "recipe.kl_weight = 'total' is read with recipe.kl only"),
    ("recipe.kl_mask=kept", "recipe.kl_mask = 'kept' is read with recipe.kl only"),
    ("recipe.ewma_window=2", "recipe.ewma_window = 2 is read with recipe.prox = 'ewma' only"),
    ("recipe.filter_threshold=0.5", "is read with recipe.filter = 'carm' or 'k3' or 'veto' only"),
]


@pytest.mark.parametrize(("setting", "says"), UNREAD)
def test_a_setting_that_nothing_reads_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", "\\(")) as error:
        load([FILES / "tiny-cpu.toml"], [setting])
    assert "\n" not in str(error.value)


def test_every_setting_with_a_reader_is_refused_beside_another_choice_and_taken_beside_its_own() -> None:
    other = {"estimator": "grpo", "objective": "ppo", "engine": "none", "filter": "none", "staleness": "none", "prox": "version_in",
             "kl_in": "reward"}
    for key, (axis, choices) in READERS.items():
        value = changed(key)
        plain = validate(tree())
        beside = plain.model_copy(update={"recipe": plain.recipe.model_copy(update={axis: other[axis], "kl": 1.0, key: value})})
        with pytest.raises(ValueError, match=f"recipe.{key} = "):
            check_readers(beside)
        for choice in choices:
            check_readers(beside.model_copy(update={"recipe": beside.recipe.model_copy(update={axis: choice})}))
    assert set(READERS) | set(WITH_A_VALUE) < set(Recipe.model_fields)


def changed(key: str) -> Any:
    """Another value than the default; the model is not asked whether it may stand."""
    default = Recipe.model_fields[key].default
    return default + 0.01 if isinstance(default, float) else 3 if default is None else f"not {default}"


def test_what_a_recipe_sets_itself_may_be_left_without_a_reader_and_a_record_loads_whatever_it_holds(tmp_path: Path) -> None:
    assert load([FILES / "tiny-cpu.toml"], ["recipe.name=ripo", "recipe.objective=ppo"]).recipe.delta == 0.05
    recorded = validate(tree(recipe={"engine": "none", "engine_cap": 3.0}))
    (tmp_path / "config.json").write_text(recorded.model_dump_json())
    assert load_resolved(tmp_path / "config.json") == recorded
    for name in RECIPES:
        assert load([FILES / "tiny-cpu.toml"], [f"recipe.name={name}", "sampling.max_new_tokens=8"]).recipe.name == name
