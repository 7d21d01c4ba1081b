"""The recipes that `leeway whatif` tries: the run's own, the run's with another corrector, and every named one."""

import copy
from collections.abc import Mapping
from typing import Any

from configs.load import validate
from configs.recipes import RECIPES, full_keys
from configs.schema import Config
from learner.whatif import Variant

PLAIN: Mapping[str, Any] = {"engine": "none", "filter": "none", "staleness": "none", "group_mass_cap": None}
CORRECTORS: dict[str, Mapping[str, Any]] = {
    "no corrector": {},
    "tis": {"engine": "tis"}, "tis, sequence": {"engine": "tis", "engine_level": "sequence"},
    "tis, geometric": {"engine": "tis", "engine_level": "geometric"},
    "icepop": {"engine": "icepop"}, "kpop": {"engine": "kpop"},
    "sequence filter": {"filter": "sequence", "filter_low": 0.5, "filter_high": 2.0},
    "geometric filter": {"filter": "geometric", "filter_low": None, "filter_high": None},
    "k3 filter": {"filter": "k3", "filter_threshold": 0.01}, "carm filter": {"filter": "carm", "filter_threshold": 1.01},
    "veto": {"filter": "veto", "filter_threshold": 1e-4},
    "decoupled": {"staleness": "decoupled", "base": "prox", "learner.steps_per_update": 2},
    "m2_mask": {"staleness": "m2_mask"}, "m2_range": {"staleness": "m2_range"}, "opsm": {"staleness": "opsm"},
    "sis": {"staleness": "sis"},
    "group mass": {"objective": "score", "base": "old", "group_mass_cap": 1.0},
}
"""Beside PLAIN, on top of the run's recipe. Keys without a dot belong to [recipe]."""


def variants(config: Config) -> list[Variant]:
    """Names are unique; what the config's rules refuse comes with their line instead of a config."""
    tree = config.model_dump(mode="json")
    found = [Variant("as run", config)]
    for name, change in CORRECTORS.items():
        found.append(variant(f"as run, {name}", tree, {**PLAIN, **change}))
    bare = {**tree, "recipe": {}}
    return found + [variant(name, bare, {**recipe.settings, "name": name}) for name, recipe in RECIPES.items()]


def variant(name: str, tree: dict[str, Any], change: Mapping[str, Any]) -> Variant:
    tree = copy.deepcopy(tree)
    for key, value in full_keys(change).items():
        table, _, setting = key.partition(".")
        tree[table][setting] = value
    try:
        return Variant(name, validate(tree))
    except ValueError as error:
        return Variant(name, str(error))
