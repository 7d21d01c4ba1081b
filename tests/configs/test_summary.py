"""What `--dry-run` and `leeway recipes NAME` say that a recipe computes."""

from typing import Any

import pytest

from configs.load import validate
from configs.recipes import RECIPES
from configs.summary import recipe_lines, warnings


def said(recipe: dict[str, Any], **tables: dict[str, Any]) -> list[str]:
    return recipe_lines(validate({"model": {"path": "m"}, "task": {"train": "t"}, "recipe": recipe, **tables}))


@pytest.mark.parametrize(("name", "lines"), [
    ("dr_grpo", ["advantages: dr_grpo", "staleness: in cur/old, as far as the objective lets it act",
                 "objective: ppo on cur/old, clip_low = 0.2, clip_high = 0.2", "aggregation: constant, constant = 1024",
                 "reads beside mu: old"]),
    ("seq_mis", ["advantages: grpo", 'engine, on old/mu: tis, engine_level = "sequence", engine_cap = 2.0',
                 "filter, on old/mu: sequence, filter_low = 0.5, filter_high = 2.0",
                 "staleness: in cur/old, as far as the objective lets it act",
                 "objective: ppo on cur/old, clip_low = 0.2, clip_high = 0.28", "aggregation: token_mean", "reads beside mu: old"]),
    ("decoupled_ppo", ["advantages: grpo", 'engine, on old/mu: tis, engine_level = "token", engine_cap = 2.0',
                       'staleness: decoupled, staleness_cap = 5.0, staleness_mode = "cap", on prox/old',
                       "objective: ppo on cur/prox, clip_low = 0.2, clip_high = 0.2", "aggregation: token_mean",
                       "reads beside mu: old, prox (a scoring pass per update)"]),
    ("icepop_gmc", ["advantages: dr_grpo", "engine, on old/mu: icepop, engine_low = 0.5, engine_high = 5.0",
                    "staleness: prox/mu of whole responses, capped at 1.0 per response of a group", "objective: score without a ratio",
                    "aggregation: constant, constant = 1024", "reads beside mu: old, prox (a scoring pass per update)"]),
    ("ewma_ppo", ["advantages: grpo", 'engine, on old/mu: tis, engine_level = "token", engine_cap = 2.0',
                  'staleness: decoupled, staleness_cap = 5.0, staleness_mode = "cap", on prox/old',
                  "objective: ppo on cur/prox, clip_low = 0.2, clip_high = 0.2",
                  "proximal policy: average over 2 versions, ewma_reset = 0.9", "aggregation: token_mean",
                  "reads beside mu: old, prox (a running average of the weights)"]),
    ("sis", ["advantages: grpo", "staleness: sis, on prox/mu over the engine's top 10",
             "objective: ppo on cur/old, clip_low = 0.2, clip_high = 0.28", "aggregation: token_mean",
             "reads beside mu: old, the engine's top log-probs"]),
    ("m2po_range", ["advantages: grpo", "staleness: m2_range, m2_budget = 0.04, m2_floor_low = 0.3, m2_floor_high = 0.5, on prox/mu",
                    "objective: ppo on cur/old, clip set by m2_range", "aggregation: token_mean",
                    "reads beside mu: old, prox (a scoring pass per update)"]),
])
def test_a_named_recipe_axis_by_axis(name: str, lines: list[str]) -> None:
    assert said({"name": name}) == lines


def test_shaping_reference_entropy_and_denominator_are_said() -> None:
    lines = said({"name": "dapo", "kl": 0.1, "entropy": 0.01, "denominator": "kept", "mask_truncated": True, "dual_clip": 3.0},
                 learner={"reference": "initial"}, sampling={"max_new_tokens": 50})
    assert lines[0] == ("rewards: groups without contrast are replaced; soft punishment over the last 0.2 of 50 tokens; "
                        "truncated responses are not trained on")
    assert "objective: ppo on cur/old, clip_low = 0.2, clip_high = 0.28, dual_clip = 3.0" in lines
    assert {"KL to the reference: k3 x 0.1, in the loss", "entropy: bonus 0.01",
            "aggregation: token_mean, over kept tokens only"} < set(lines)


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_of_a_recipe_shows(name: str) -> None:
    settings, lines = RECIPES[name].settings, said({"name": name})
    unread = settings["objective"] in ("cispo", "ripo", "fdiv") or settings.get("staleness") == "m2_range"  # of the clip
    for key, value in settings.items():
        if "." not in key and isinstance(value, float) and not (unread and key.startswith("clip")):
            assert str(value) in " ".join(lines), key


def test_a_wide_clip_on_a_mean_ratio_and_uncorrected_staleness_are_warned_of() -> None:
    def warned(recipe: dict[str, Any]) -> list[str]:
        return warnings(validate({"model": {"path": "m"}, "task": {"train": "t"}, "recipe": recipe}))

    assert [warned({"name": name}) for name in ("dapo", "gspo", "luspo", "gmc_grpo")] == [[], [], [], []]
    assert len(warned({"objective": "gspo"})) == 1 and "hardly ever leaves 1 - 0.2 to 1 + 0.2" in warned({"objective": "gspo"})[0]
    assert "staleness is uncorrected" in warned({"objective": "score"})[0]
