"""Which choices of [recipe] do not go together: they would correct twice, or could not act. One line each.

`correction.choice.check_stacking` says the same of the pure functions; a test holds the two equal over all combinations.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import Config

TOTAL_RATIO = ("score", "minirl")
"""Objectives without a ratio of their own, or with the whole ratio: engine correctors only mask."""
WITHOUT_RATIO = (*TOTAL_RATIO, "unit")
GEOMETRIC = (0.999, 1.001)
"""What the geometric filter takes for a bound that is left out."""


def check_stacking(config: "Config") -> None:
    """ValueError for the first rule that does not hold."""
    for rule in (_group_mass, _engine, _staleness, _objective, _filter, _reference):
        rule(config)


def _group_mass(config: "Config") -> None:
    recipe = config.recipe
    if recipe.group_mass_cap is not None and recipe.objective != "score":
        raise ValueError("recipe.group_mass_cap weighs the total ratio, so with a ratio in the objective it would correct twice: "
                         "use recipe.objective = 'score'")


def _engine(config: "Config") -> None:
    recipe, steps = config.recipe, config.learner.steps_per_update
    if recipe.engine_low >= recipe.engine_high:
        raise ValueError(f"recipe.engine_low = {recipe.engine_low} must be below recipe.engine_high = {recipe.engine_high}")
    if recipe.engine == "icepop":
        _holds_one("engine", recipe.engine_low, recipe.engine_high)
    if recipe.engine == "tis" and recipe.objective == "score":
        raise ValueError("recipe.objective = 'score' has no policy ratio for a TIS weight to go with, and TIS masks nothing: use a ratio "
                         "objective (ppo, cispo, ...), or recipe.engine = 'icepop'")
    if recipe.engine == "tis" and recipe.objective == "minirl":
        raise ValueError("recipe.objective = 'minirl' weighs by cur/mu itself, so a TIS weight would correct the engine twice: use "
                         "recipe.engine = 'icepop' or 'none'")
    if recipe.engine == "tis" and recipe.staleness == "sis":
        raise ValueError("recipe.staleness = 'sis' accepts by the total ratio, so a TIS weight would correct the engine twice: use "
                         "recipe.engine = 'icepop' or 'none'")
    if recipe.objective == "score" and recipe.engine != "none" and recipe.group_mass_cap is None and config.replay.max_staleness > 0:
        raise ValueError("recipe.objective = 'score' with an engine corrector leaves staleness uncorrected above replay.max_staleness = 0: "
                         "use a ratio objective (ppo, cispo, ...) or recipe.group_mass_cap")
    if recipe.objective == "unit" and steps != 1:
        raise ValueError("recipe.objective = 'unit' holds for one optimizer step per update: set learner.steps_per_update = 1, or use "
                         "recipe.objective = 'ppo'")


def _staleness(config: "Config") -> None:
    recipe = config.recipe
    if recipe.staleness == "decoupled":
        if recipe.objective in TOTAL_RATIO:
            raise ValueError(f"recipe.staleness = 'decoupled' weighs for an objective on cur/prox, not for {recipe.objective}: use "
                             "recipe.objective = 'ppo' with recipe.base = 'prox'")
        if recipe.objective != "unit" and recipe.base != "prox":
            raise ValueError("recipe.staleness = 'decoupled' weighs by prox/old, and cur/old holds that ratio already, so it would correct "
                             "twice: set recipe.base = 'prox', with learner.steps_per_update = 2 or more or with recipe.prox = 'ewma'")
    if recipe.staleness == "sis":
        if recipe.objective in WITHOUT_RATIO:
            raise ValueError("recipe.staleness = 'sis' leaves rejected tokens to an objective on cur/old, which "
                             f"{recipe.objective} is not: use recipe.objective = 'ppo'")
        if config.sampling.top_logprobs < 1:
            raise ValueError("recipe.staleness = 'sis' needs the engine's top log-probs with each token: set sampling.top_logprobs = 10")
    if recipe.staleness == "m2_range" and recipe.objective != "ppo":
        raise ValueError(f"recipe.staleness = 'm2_range' sets the clip of ppo, which {recipe.objective} does not have: use "
                         "recipe.objective = 'ppo', or recipe.staleness = 'm2_mask'")


def _objective(config: "Config") -> None:
    recipe = config.recipe
    if recipe.objective == "luspo" and recipe.aggregation != "sequence_mean":
        raise ValueError(f"recipe.objective = 'luspo' multiplies by the response's length itself, which aggregation = "
                         f"{recipe.aggregation!r} would do again or undo: set recipe.aggregation = 'sequence_mean'")
    if recipe.objective in ("ripo", "minirl") and recipe.base != "old":
        raise ValueError(f"recipe.objective = {recipe.objective!r} reads the frozen old probability: set recipe.base = 'old'")
    if recipe.objective == "fdiv" and recipe.delta is None:
        raise ValueError("recipe.objective = 'fdiv' needs a radius: set recipe.delta; none is published")
    if recipe.dual_clip is not None and recipe.objective not in ("ppo", "gppo"):
        raise ValueError(f"recipe.dual_clip belongs to ppo and gppo: leave it out with recipe.objective = {recipe.objective!r}")
    on_prox = recipe.objective not in WITHOUT_RATIO and recipe.base == "prox" and recipe.prox == "version_in"
    if on_prox and config.learner.steps_per_update == 1:
        other = "" if recipe.staleness == "decoupled" else ", or recipe.base = 'old'"
        raise ValueError("recipe.base = 'prox' with learner.steps_per_update = 1: cur/prox is identically 1, so clipping would never act; "
                         f"set learner.steps_per_update = 2 or more, or recipe.prox = 'ewma'{other}")
    if recipe.prox == "ewma" and recipe.objective in WITHOUT_RATIO:
        raise ValueError(f"recipe.prox = 'ewma' is a proximal policy for an objective that clips against it, which {recipe.objective} does "
                         "not: leave recipe.prox out")
    if recipe.ewma_window == 0:
        raise ValueError("recipe.ewma_window = 0 makes the average the live weights, which recipe.prox = 'version_in' is already: set 1 or "
                         "more, or leave it out")
    if recipe.prox == "ewma" and recipe.base != "prox":
        raise ValueError("recipe.prox = 'ewma' fills prox, and recipe.base = 'old' clips against another policy: set recipe.base = 'prox'")


def _filter(config: "Config") -> None:
    recipe = config.recipe
    if recipe.filter == "sequence" and (recipe.filter_low is None or recipe.filter_high is None):
        raise ValueError("recipe.filter = 'sequence' needs recipe.filter_low and recipe.filter_high, e.g. .5 and 2")
    if recipe.filter == "carm" and (recipe.filter_threshold is None or recipe.filter_threshold < 1):
        raise ValueError("recipe.filter = 'carm' needs recipe.filter_threshold, 1 or more: none is published")
    low = GEOMETRIC[0] if recipe.filter_low is None and recipe.filter == "geometric" else recipe.filter_low
    high = GEOMETRIC[1] if recipe.filter_high is None and recipe.filter == "geometric" else recipe.filter_high
    if low is not None and high is not None and low > high:
        raise ValueError(f"recipe.filter_low = {low} is above recipe.filter_high = {high}")
    if recipe.filter in ("sequence", "geometric") and low is not None and high is not None:
        _holds_one("filter", low, high)
    if recipe.filter == "veto" and recipe.filter_threshold is not None and recipe.filter_threshold >= 1:
        raise ValueError(f"recipe.filter_threshold = {recipe.filter_threshold}: veto drops a response with an old/mu below it, "
                         "so from 1 on it would drop nearly all: set it far below 1 (1e-4)")


def _holds_one(what: str, low: float, high: float) -> None:
    if not low <= 1 <= high:
        raise ValueError(f"recipe.{what}_low = {low} to recipe.{what}_high = {high} leaves out 1, where engine and trainer agree: bounds "
                         "are on old/mu, and 1 must lie between them")


def _reference(config: "Config") -> None:
    recipe = config.recipe
    if config.learner.reference is None and (recipe.kl > 0 or recipe.estimator == "zcpo"):
        what = "recipe.kl > 0" if recipe.kl > 0 else "recipe.estimator = 'zcpo'"
        raise ValueError(f"{what} needs a reference policy: set learner.reference = 'initial' or to a model folder")
    if recipe.estimator == "zcpo":
        if recipe.kl > 0:
            raise ValueError("recipe.estimator = 'zcpo' carries the KL in its coefficients, so recipe.kl would count it twice: set it to 0")
        if config.learner.steps_per_update != 1:
            raise ValueError("recipe.estimator = 'zcpo' reads the KL of the policy that is trained, which one scoring pass gives for one "
                             "optimizer step only: set learner.steps_per_update = 1")
    if recipe.kl_in == "reward" and recipe.kl > 0 and recipe.kl_weight != "none":
        raise ValueError("recipe.kl_weight belongs to the KL in the loss: leave it out with recipe.kl_in = 'reward'")
    if recipe.kl_estimator == "k1" and recipe.kl_in == "loss" and recipe.kl > 0:
        raise ValueError("recipe.kl_estimator = 'k1' in the loss has a gradient of mean zero: use k2 or k3, or recipe.kl_in = 'reward'")
