"""Who reads each setting of [recipe] that only one choice on an axis reads: set beside another choice it would be silently without effect.

Not listed, because settings of one layer are often laid over another that leaves them behind: `clip_low`, `clip_high` and `constant`.
"""

from typing import TYPE_CHECKING, Any

from configs.recipe_table import Recipe
from configs.recipes import RECIPES

if TYPE_CHECKING:
    from configs.schema import Config

READERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ema_decay": ("estimator", ("reinforce_pp_ema",)),
    "zcpo_beta": ("estimator", ("zcpo",)),
    "cap": ("objective", ("cispo", "minirl")),
    "delta": ("objective", ("ripo", "fdiv")),
    "ratio_bound": ("objective", ("ripo", "fdiv")),
    "divergence": ("objective", ("fdiv",)),
    "topology": ("objective", ("fdiv",)),
    "position_decay": ("objective", ("tapo",)),
    "position_floor": ("objective", ("tapo",)),
    "engine_level": ("engine", ("tis",)),
    "engine_cap": ("engine", ("tis",)),
    "engine_low": ("engine", ("icepop",)),
    "engine_high": ("engine", ("icepop",)),
    "kpop_threshold": ("engine", ("kpop",)),
    "kpop_carry": ("engine", ("kpop",)),
    "filter_low": ("filter", ("sequence", "geometric")),
    "filter_high": ("filter", ("sequence", "geometric")),
    "filter_threshold": ("filter", ("carm", "k3", "veto")),
    "staleness_cap": ("staleness", ("decoupled",)),
    "staleness_mode": ("staleness", ("decoupled",)),
    "m2_budget": ("staleness", ("m2_mask", "m2_range")),
    "m2_floor_low": ("staleness", ("m2_range",)),
    "m2_floor_high": ("staleness", ("m2_range",)),
    "opsm_threshold": ("staleness", ("opsm",)),
    "ewma_window": ("prox", ("ewma",)),
    "ewma_reset": ("prox", ("ewma",)),
    "kl_mask": ("kl_in", ("loss",)),
}
"""Key: the axis and those of its choices that read it."""
WITH_A_VALUE = {"overlong_limit": "overlong", "kl_in": "kl", "kl_mask": "kl", "kl_weight": "kl"}
"""Key: the setting without which nobody reads it."""


def check_readers(config: "Config") -> None:
    """ValueError for the first setting that differs from its default and that nothing reads. What a named recipe sets itself is let pass.

    For what a user writes, not for resolved configs: there a setting may be left over from the run that a variant is made of.
    """
    recipe = config.recipe
    own = RECIPES[recipe.name].settings if recipe.name in RECIPES else {}
    for key in (*READERS, *WITH_A_VALUE):
        value = getattr(recipe, key)
        if value == Recipe.model_fields[key].default or key in own and value == own[key]:
            continue
        if key in READERS:
            axis, readers = READERS[key]
            if (choice := getattr(recipe, axis)) not in readers:
                wanted = " or ".join(map(repr, readers))
                raise ValueError(f"recipe.{key} = {value!r} is read with recipe.{axis} = {wanted} only, and here it is {choice!r}: leave "
                                 f"it out, or change recipe.{axis}")
        if key in WITH_A_VALUE and not getattr(recipe, WITH_A_VALUE[key]):
            needs = WITH_A_VALUE[key]
            raise ValueError(f"recipe.{key} = {value!r} is read with recipe.{needs} only, which is not set: leave it out, or set "
                             f"recipe.{needs}")
