"""What a resolved config's recipe needs beyond the sampled tokens: from the records, and as extra passes of the learner."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import Config


def greedy_baseline(config: "Config") -> bool:
    """Whether each training order asks for one greedy response beside its samples."""
    return config.recipe.estimator == "remax"


def scores_prox(config: "Config") -> bool:
    """Whether prox is scored before the first step, rather than read off the training forward."""
    recipe = config.recipe
    return (config.learner.steps_per_update > 1 or recipe.base == "prox" or recipe.group_mass_cap is not None
            or recipe.staleness in ("decoupled", "m2_mask", "m2_range", "opsm"))


def whole_vocabulary(config: "Config") -> bool:
    """Whether the training forward also gives the entropy and the KL to the reference over the whole vocabulary."""
    recipe = config.recipe
    return recipe.entropy is not None or (recipe.kl > 0 and recipe.kl_estimator == "full")


def record_needs(config: "Config") -> list[str]:
    """In words, for `leeway recipes`. Rewards, response tokens and mu are always there."""
    recipe = config.recipe
    needs = ["a greedy response per group"] if greedy_baseline(config) else []
    if recipe.engine != "none" or recipe.filter != "none" or recipe.staleness == "decoupled" or recipe.kl_in == "reward" and recipe.kl > 0 \
            or recipe.objective not in ("score", "unit") and recipe.base == "old":
        needs.append("old")
    if scores_prox(config):
        needs.append("prox (a scoring pass per update)" if recipe.prox == "version_in" else "prox (a running average of the weights)")
    if recipe.staleness == "sis":
        needs.append("the engine's top log-probs")
    if config.learner.reference is not None and (recipe.kl > 0 or recipe.estimator == "zcpo"):
        full = recipe.estimator == "zcpo" or recipe.kl_estimator == "full"
        needs.append("ref over the whole vocabulary" if full else "ref")
    return needs or ["nothing more"]


def uncorrected(config: "Config") -> str | None:
    """One line when nothing in the recipe corrects for staleness although the budget allows it, or when a running average as the proximal
    policy cannot act; None when all is well."""
    recipe, budget = config.recipe, config.replay.max_staleness
    masks_only = recipe.staleness in ("none", "opsm", "m2_mask")
    if budget > 0 and recipe.objective in ("unit", "score"):
        if masks_only and recipe.group_mass_cap is None:
            return (f"recipe.objective = {recipe.objective!r} takes every token as if the current policy had sampled it: with "
                    f"replay.max_staleness = {budget}, staleness is uncorrected")
    elif budget > 0 and recipe.base == "prox" and recipe.staleness != "decoupled":
        return (f"recipe.base = 'prox' clips cur/prox, and nothing weighs by prox/old: with replay.max_staleness = {budget}, staleness is "
                "uncorrected; set recipe.staleness = 'decoupled'")
    if recipe.prox == "ewma" and ewma_window(config) == 0 and config.learner.steps_per_update == 1:
        return ("recipe.prox = 'ewma' has a window of replay.max_staleness = 0 versions: the average is the live weights, so cur/prox is "
                "identically 1 and the clip never acts; set recipe.ewma_window")
    return None


def ewma_window(config: "Config") -> int:
    """In versions."""
    return config.replay.max_staleness if config.recipe.ewma_window is None else config.recipe.ewma_window
