"""Which runs there are, with which settings, and what makes a measured one old."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from configs.load import load
from configs.needs import uncorrected
from configs.recipes import RECIPES
from wire.digest import digest_file, digest_json

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = "configs/tiny-cpu.toml"
ENGINES = ("none", "fp8")
"""Values of `actor.round_weights`: the fp32 engine as it is, and the stand-in for a quantised one."""
BUDGETS = (4, 0)
UPDATES = 40
WARMUP, LR = 10, 3e-4
DEMO: dict[str, Any] = {"learner.lr": LR, "learner.lr_warmup_updates": WARMUP, "eval.prompts": 128, "eval.samples": 8}
"""The demo's own rate and warm-up (at half of it, even on-policy data does harm at first), and a held-out mean over 1,024 samples."""
FITTED: dict[str, dict[str, Any]] = {
    # The demo's answers fill its 4 tokens, so that every right three-digit sum would be punished as overlong.
    "dapo": {"sampling.max_new_tokens": 5, "learner.length_bucket": 11},
    # A wrong token that has become unlikely keeps a gradient of full size: on stale samples and at the demo's rate that runs away.
    "gppo": {"learner.lr": 5e-5},
}
FITTED_TO_FP8: dict[str, dict[str, Any]] = {
    # Bounds for means over long responses: of 4 tokens they drop 87 % and 46 % here.
    "geo_rs": {"recipe.filter_low": 0.98, "recipe.filter_high": 1.02},
    "carm": {"recipe.filter_threshold": 1.03},
}
LEARNS = ("correction", "learner")
"""Folders. Of them whatif is left out, which only looks at records."""


class Case(NamedTuple):
    recipe: str
    engine: str
    budget: int

    def __str__(self) -> str:
        return f"{self.recipe}, engine {self.engine}, budget {self.budget}"


def cases() -> Iterator[Case]:
    """All of them, the most telling first: the fp32 engine at budget 4."""
    for engine in ENGINES:
        for budget in BUDGETS:
            for recipe in RECIPES:
                yield Case(recipe, engine, budget)


def settings(case: Case, updates: int) -> dict[str, Any]:
    return {"recipe.name": case.recipe, "actor.round_weights": case.engine, "replay.max_staleness": case.budget, "learner.updates": updates,
            **DEMO, **FITTED.get(case.recipe, {}), **(FITTED_TO_FP8.get(case.recipe, {}) if case.engine == "fp8" else {})}


def pointless(case: Case) -> str | None:
    """Why this case is not run; None when it is."""
    found = uncorrected(load([ROOT / CONFIG], sets(settings(case, UPDATES)))) if case.budget else None
    return None if found is None else "for budget 0: nothing in it corrects for staleness"


def source_digest(case: Case, updates: int) -> str:
    """Of what decides how a run learns: its settings, and the code of the learner and of the corrections. 16 hexadecimal characters."""
    files = [path for folder in LEARNS for path in sorted((ROOT / folder).rglob("*.py")) if not path.name.startswith("whatif")]
    config = load([ROOT / CONFIG], sets(settings(case, updates))).model_dump(mode="json", exclude_defaults=True)
    return digest_json([config, {path.relative_to(ROOT).as_posix(): digest_file(path) for path in files}])[:16]


def sets(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
