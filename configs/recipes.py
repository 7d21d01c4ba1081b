"""Named recipes: sets of settings with where they come from. `recipe.name = "gmc_grpo"` stands for its settings; explicit keys win.

status: established (a paper or its code says so) or reconstructed (the idea is published, a detail or a number here is ours: `note`).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Settings = Mapping[str, Any]
"""Values by dotted key; keys without a dot belong to [recipe]."""


@dataclass(frozen=True)
class Named:
    settings: Settings
    citation: str
    status: Literal["established", "reconstructed"] = "established"
    note: str = ""


GRPO: Settings = {"estimator": "grpo", "objective": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence_mean"}
DAPO: Settings = {"estimator": "grpo", "objective": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}
DR_GRPO: Settings = {"estimator": "dr_grpo", "objective": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant"}
REFERENCE: Settings = {"learner.reference": "initial"}
SCORE: Settings = {"estimator": "dr_grpo", "objective": "score", "aggregation": "constant"}

RECIPES: dict[str, Named] = {
    # ---------------------------------------------------------------- advantages and aggregation
    "grpo": Named(GRPO, "Shao et al. 2024, arXiv 2402.03300", note="without the reference KL, as in later practice: see grpo_kl"),
    "grpo_kl": Named({**GRPO, **REFERENCE, "kl": 0.04, "kl_estimator": "k3"}, "Shao et al. 2024, arXiv 2402.03300"),
    "dr_grpo": Named(DR_GRPO, "Liu et al. 2025, arXiv 2503.20783"),
    "dapo": Named({**DAPO, "dynamic_sampling": True, "overlong": 0.2}, "Yu et al. 2025, arXiv 2503.14476"),
    "rloo": Named({**SCORE, **REFERENCE, "estimator": "rloo", "kl": 0.05, "kl_estimator": "k1", "kl_in": "reward"},
                  "Ahmadian et al. 2024, arXiv 2402.14740", "reconstructed", "the coefficient .05; for replay.max_staleness = 0"),
    "remax": Named({**DR_GRPO, "estimator": "remax"}, "Li et al. 2023, arXiv 2310.10505", "reconstructed",
                   "a clipped ratio where the paper has plain REINFORCE, for stale samples; no KL in the reward; the paper has n = 1"),
    "reinforce_pp": Named({**DAPO, "estimator": "reinforce_pp", "clip_high": 0.2}, "Hu et al. 2025, arXiv 2501.03262"),
    "reinforce_pp_ema": Named({**DAPO, "estimator": "reinforce_pp_ema", "clip_high": 0.2}, "Hu et al. 2025, arXiv 2501.03262",
                              "reconstructed", "the running scale, from a description"),
    "zcpo": Named({**DAPO, **REFERENCE, "estimator": "zcpo", "zcpo_beta": 4.0}, "ZCPO, arXiv 2610.12161"),
    # ---------------------------------------------------------------- engine mismatch
    "tis": Named({**DAPO, "engine": "tis", "engine_cap": 2.0}, "Yao et al. 2025 (truncated importance sampling)"),
    "icepop": Named({**GRPO, "engine": "icepop", "engine_low": 0.5, "engine_high": 5.0}, "Ling/Ring 2.6 report, arXiv 2606.15079"),
    "online_icepop": Named({"estimator": "grpo", "objective": "unit", "aggregation": "token_mean", "engine": "icepop"},
                           "Online IcePop; NeMo-RL force_on_policy_ratio", note="one step per update; for replay.max_staleness = 0"),
    "kpop": Named({**GRPO, "engine": "kpop", "kpop_threshold": 0.03}, "Ling/Ring 2.6 report, arXiv 2606.15079", "reconstructed",
                  "the threshold: none is printed, calibrate it"),
    "seq_mis": Named({**DAPO, "engine": "tis", "engine_level": "sequence", "engine_cap": 2.0, "filter": "sequence", "filter_low": 0.5,
                      "filter_high": 2.0}, "Liu, Li et al. 2025 (masked sequence importance sampling)", "reconstructed", "the lower bound"),
    "geo_rs": Named({**DAPO, "filter": "geometric", "filter_low": 0.999, "filter_high": 1.001}, "Liu, Li et al. 2025 (Geo-RS)"),
    "k3_rs": Named({**DAPO, "filter": "k3", "filter_threshold": 0.01}, "Liu, Li et al. 2025 (K3-RS)"),
    "carm": Named({**DAPO, "filter": "carm", "filter_threshold": 1.01}, "CARM, arXiv 2610.02039", "reconstructed",
                  "the threshold: none is published"),
    "tis_veto": Named({**DAPO, "engine": "tis", "filter": "veto", "filter_threshold": 1e-4}, "Liu, Li et al. 2025"),
    # ---------------------------------------------------------------- staleness
    "decoupled_ppo": Named({**DAPO, "clip_high": 0.2, "base": "prox", "engine": "tis", "staleness": "decoupled",
                            "learner.steps_per_update": 2}, "Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298",
                           "reconstructed", "caps on old/mu and prox/old apart (AReaL caps their product)"),
    "ewma_ppo": Named({**DAPO, "clip_high": 0.2, "base": "prox", "prox": "ewma", "engine": "tis", "staleness": "decoupled"},
                      "PPO-EWMA as revised in arXiv 2605.12070", "reconstructed", "with the exact old beside the average"),
    "sis": Named({**DAPO, "staleness": "sis", "sampling.top_logprobs": 10}, "SIS, arXiv 2607.04728"),
    "m2po": Named({**DAPO, "clip_low": 1.0, "clip_high": 1e6, "staleness": "m2_mask", "m2_budget": 0.04}, "M2PO, arXiv 2510.01161",
                  note="its Algorithm 1: tokens dropped where a clip could bite, the objective unclipped"),
    "m2po_range": Named({**DAPO, "staleness": "m2_range", "m2_budget": 0.04}, "the released code of M2PO, arXiv 2510.01161",
                        "reconstructed", "one width per batch, with the code's floors, which its trainer leaves out"),
    "opsm": Named({**GRPO, "staleness": "opsm", "opsm_threshold": 0.5}, "DeepSeek-V3.2; threshold: TRL"),
    "gmc_grpo": Named({**SCORE, "group_mass_cap": 1.2}, "GMC-GRPO, arXiv 2610.01896", "reconstructed", "the cap: none is published"),
    # ---------------------------------------------------------------- objectives
    "dual_clip": Named({**DAPO, "clip_high": 0.2, "dual_clip": 3.0}, "Ye et al. 2019, arXiv 1912.09729"),
    "gspo": Named({**GRPO, "objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "Zheng et al. 2025, arXiv 2507.18071"),
    "luspo": Named({**GRPO, "objective": "luspo", "clip_low": 2e-3, "clip_high": 2.5e-3}, "LUSPO, arXiv 2602.05261"),
    "cispo": Named({**DAPO, "objective": "cispo", "cap": 5.0}, "MiniMax-M1, arXiv 2506.13585; cap: ScaleRL, arXiv 2510.13786"),
    "gppo": Named({**DAPO, "objective": "gppo", "dual_clip": 10.0}, "Klear-Reasoner, arXiv 2508.07629; dual clip: its scripts"),
    "ripo": Named({**DAPO, "objective": "ripo", "delta": 0.05}, "RIPO, arXiv 2607.10169", note="ratio_bound is ours"),
    "dppo_tv": Named({**DAPO, "objective": "fdiv", "divergence": "tv", "topology": "binary", "delta": 0.1},
                     "GPPO (f-divergence x topology); DPPO", "reconstructed", "delta: none is published"),
    "tapo": Named({**DAPO, "objective": "tapo"}, "TAPO (trajectory-aware policy optimisation)", "reconstructed", "the bounds' schedule"),
    "minirl": Named({"estimator": "dr_grpo", "objective": "minirl", "clip_low": 0.2, "clip_high": 0.27, "cap": 5.0,
                     "aggregation": "length_weighted"}, "arXiv 2512.01374", "reconstructed",
                    "clip and cap recalled; dense models only, without routing replay"),
    # ---------------------------------------------------------------- compositions
    "dapo_tis": Named({**DAPO, "estimator": "dr_grpo", "engine": "tis"}, "DAPO's clip and mean with TIS, as verl and slime combine them"),
    "dapo_icepop": Named({**DAPO, "estimator": "dr_grpo", "engine": "icepop"}, "DAPO's clip and mean with IcePop"),
    "icepop_gmc": Named({**SCORE, "engine": "icepop", "group_mass_cap": 1.0}, "IcePop as a mask beside the group-mass cap", "reconstructed",
                        "the composition is ours"),
}


def full_keys(settings: Settings) -> dict[str, Any]:
    """Dotted keys throughout."""
    return {key if "." in key else f"recipe.{key}": value for key, value in settings.items()}


def named(layer: Mapping[str, Any]) -> str | None:
    """The known recipe that a tree of tables names, or None."""
    recipe = layer.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return name if isinstance(name, str) and name in RECIPES else None


def expand(layer: dict[str, Any]) -> dict[str, Any]:
    """The tree with the settings of the recipe that it names, under its own keys."""
    name = named(layer)
    if name is None:
        return layer
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in layer.items()}
    for key, value in full_keys(RECIPES[name].settings).items():
        table, _, setting = key.partition(".")
        inner = tree.setdefault(table, {})
        if isinstance(inner, dict):
            inner.setdefault(setting, value)
    return tree


def check_label(tree: Mapping[str, Any]) -> None:
    """ValueError for a name that is no recipe but looks like a mistyped one. Any other name is a label of one's own. Not for the configs of
    runs that are there already: their settings are all written out."""
    recipe = tree.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    if isinstance(name, str) and name not in RECIPES and (near := [one for one in RECIPES if one_slip(name.lower(), one)]):
        raise ValueError(f"recipe.name = {name!r}: no such recipe; did you mean {near[0]}? (a label of your own must look less like one)")


def one_slip(word: str, name: str) -> bool:
    """Whether one slip makes `word` of `name`: a character wrong, missing or too many, or two neighbours exchanged. A digit too many is
    none: it numbers a label (`grpo2`)."""
    if len(word) == len(name):
        wrong = [at for at in range(len(name)) if word[at] != name[at]]
        exchanged = len(wrong) == 2 and wrong[1] == wrong[0] + 1 and word[wrong[0]] + word[wrong[1]] == name[wrong[1]] + name[wrong[0]]
        return len(wrong) <= 1 or exchanged
    if len(word) < len(name):
        return any(name[:at] + name[at + 1 :] == word for at in range(len(name)))
    return any(word[:at] + word[at + 1 :] == name and not word[at].isdigit() for at in range(len(word)))


def complete(tree: dict[str, Any]) -> dict[str, Any]:
    """`expand`, and the one default that reads another table. ValueError for a lone name that is no recipe: it would mean the defaults."""
    tree = expand(tree)
    recipe, sampling = tree.get("recipe"), tree.get("sampling", {})
    if not isinstance(recipe, dict) or not isinstance(sampling, dict):
        return tree
    name = recipe.get("name", "custom")
    if isinstance(name, str) and name not in RECIPES and name != "custom" and len(recipe) == 1:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)[0]
        raise ValueError(f"recipe.name = {name!r}: no such recipe, and nothing else sets one; the nearest is {near}; see leeway recipes")
    if recipe.get("aggregation") == "constant" and recipe.get("constant") is None:
        return {**tree, "recipe": {**recipe, "constant": sampling.get("max_new_tokens", 1024)}}
    return tree
