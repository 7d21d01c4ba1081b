"""What a resolved config's recipe computes, in a few lines for people: after `--dry-run`, and for `leeway recipes NAME`."""

import json
from typing import TYPE_CHECKING

from configs.needs import ewma_window, record_needs, uncorrected
from configs.readers import READERS, WITH_A_VALUE
from configs.stacking import WITHOUT_RATIO

if TYPE_CHECKING:
    from configs.schema import Config

ON_A_MEAN = ("gspo", "luspo")
"""Objectives that clip the mean ratio of a response, which moves far less than that of a token."""
CLIPPED = ("ppo", "gppo", *ON_A_MEAN, "tapo", "minirl")


def recipe_lines(config: "Config") -> list[str]:
    """One line per axis on which something is computed."""
    recipe = config.recipe
    rows = [("rewards", _rewards(config)), ("advantages", _settled(config, "estimator")), ("engine, on old/mu", _settled(config, "engine")),
            ("filter, on old/mu", _settled(config, "filter")), ("staleness", _staleness(config)), ("objective", _objective(config)),
            ("proximal policy", _average(config)), ("KL to the reference", _kl(config)),
            ("entropy", "" if recipe.entropy is None else f"bonus {recipe.entropy}"),
            ("aggregation", _joined(recipe.aggregation, [f"constant = {recipe.constant}"] if recipe.aggregation == "constant" else [])
             + ("" if recipe.denominator == "original" else ", over kept tokens only")),
            ("reads beside mu", ", ".join(record_needs(config)))]
    return [f"{name}: {text}" for name, text in rows if text]


def warnings(config: "Config") -> list[str]:
    """What is allowed and will hardly be meant."""
    recipe, found = config.recipe, [line for line in [uncorrected(config)] if line is not None]
    if recipe.objective in ON_A_MEAN and max(recipe.clip_low, recipe.clip_high) >= 0.1:
        found.append(f"recipe.objective = {recipe.objective!r} clips the mean ratio of a response, which hardly ever leaves "
                     f"1 - {recipe.clip_low} to 1 + {recipe.clip_high}: see the bounds in `leeway recipes {recipe.objective}`")
    return found


def _settled(config: "Config", axis: str) -> str:
    """The choice on an axis with the settings that it reads; nothing for "none"."""
    choice = getattr(config.recipe, axis)
    return "" if choice == "none" else _joined(choice, _settings(config, axis, choice))


def _settings(config: "Config", axis: str, choice: str) -> list[str]:
    values = {key: getattr(config.recipe, key) for key, (on, readers) in READERS.items()
              if on == axis and choice in readers and key not in WITH_A_VALUE}
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]


def _joined(choice: str, settings: list[str]) -> str:
    return ", ".join([choice, *settings])


def _rewards(config: "Config") -> str:
    recipe = config.recipe
    limit = recipe.overlong_limit or config.sampling.max_new_tokens
    said = ["groups without contrast are replaced"] if recipe.dynamic_sampling else []
    said += [f"soft punishment over the last {recipe.overlong} of {limit} tokens"] if recipe.overlong else []
    return "; ".join(said + (["truncated responses are not trained on"] if recipe.mask_truncated else []))


def _staleness(config: "Config") -> str:
    recipe = config.recipe
    if recipe.group_mass_cap is not None:
        weighed = f"prox/mu of whole responses, capped at {recipe.group_mass_cap} per response of a group"
        return weighed if recipe.staleness == "none" else f"{weighed}; {_settled(config, 'staleness')}, on prox/mu"
    if recipe.staleness == "sis":
        return f"sis, on prox/mu over the engine's top {config.sampling.top_logprobs}"
    if recipe.staleness != "none":
        return f"{_settled(config, 'staleness')}, on {'prox/old' if recipe.staleness == 'decoupled' else 'prox/mu'}"
    return "" if recipe.objective in WITHOUT_RATIO or recipe.base == "prox" else "in cur/old, as far as the objective lets it act"


def _objective(config: "Config") -> str:
    recipe = config.recipe
    on = {"score": "without a ratio", "unit": "at ratio 1", "minirl": "on cur/mu"}.get(recipe.objective, f"on cur/{recipe.base}")
    settings = _settings(config, "objective", recipe.objective)
    if recipe.objective in CLIPPED:
        bounds = f"clip_low = {recipe.clip_low}, clip_high = {recipe.clip_high}"
        settings.append("clip set by m2_range" if recipe.staleness == "m2_range" else bounds)
    settings += [] if recipe.dual_clip is None else [f"dual_clip = {recipe.dual_clip}"]
    return _joined(f"{recipe.objective} {on}", settings)


def _average(config: "Config") -> str:
    recipe = config.recipe
    return f"average over {ewma_window(config)} versions, ewma_reset = {recipe.ewma_reset}" if recipe.prox == "ewma" else ""


def _kl(config: "Config") -> str:
    recipe = config.recipe
    return "" if recipe.kl == 0 else f"{recipe.kl_estimator} x {recipe.kl}, in the {recipe.kl_in}"
