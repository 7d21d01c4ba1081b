"""What a recipe says about correction, and which stackings are refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ENGINES = ("none", "tis", "icepop", "kpop")
FILTERS = ("none", "sequence", "geometric", "k3", "carm", "veto")
STALENESS = ("none", "decoupled", "m2_mask", "m2_range", "opsm", "sis")
RATIO_OBJECTIVES = ("ppo", "gppo", "gspo", "luspo", "cispo", "ripo", "fdiv", "tapo")
"""Objectives that weigh a token by cur/base themselves."""
TOTAL_RATIO_OBJECTIVES = ("score", "minirl")
"""Objectives that leave the whole ratio to one weight on cur/mu or prox/mu: engine correctors act as 0/1 masks."""


@dataclass(frozen=True, slots=True)
class CorrectionChoice:
    """One recipe's correctors, plainly.

    engine: corrector of old/mu, with level and cap (tis), low and high (icepop), threshold and carry (kpop).
    filter, filter_hyper: response filter on old/mu and its keyword arguments.
    staleness, staleness_hyper: corrector of prox/old (decoupled) or prox/mu (m2_mask, m2_range, opsm, sis) and its
    arguments.
    group_mass_cap_per_response: cap_group_mass, times the responses present in a group; None is off.
    objective, base: what clips, and against which column. prox_source: version_in or ewma. aggregation: of the losses.
    """

    engine: str = "none"
    level: str = "token"
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0
    threshold: float | None = None
    carry: str = "ratio"
    filter: str = "none"
    filter_hyper: Mapping[str, float] = field(default_factory=dict)
    staleness: str = "none"
    staleness_hyper: Mapping[str, float | str] = field(default_factory=dict)
    group_mass_cap_per_response: float | None = None
    objective: str = "ppo"
    base: str = "old"
    prox_source: str = "version_in"
    steps_per_update: int = 1
    aggregation: str = "token_mean"


def check_stacking(choice: CorrectionChoice) -> None:
    """Raise ValueError, in one line that says what to do, for a choice that corrects twice or that cannot act."""
    _known("engine corrector", choice.engine, ENGINES)
    _known("filter", choice.filter, FILTERS)
    _known("staleness corrector", choice.staleness, STALENESS)
    _known("objective", choice.objective, (*RATIO_OBJECTIVES, *TOTAL_RATIO_OBJECTIVES, "unit"))
    _known("base", choice.base, ("old", "prox"))
    _known("prox source", choice.prox_source, ("version_in", "ewma"))
    if choice.engine == "kpop" and choice.threshold is None:
        raise ValueError("kpop needs a threshold: none is published, so calibrate it on your own mismatch")
    _check_group_mass(choice)
    _check_engine(choice)
    _check_staleness(choice)
    _check_objective(choice)


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(names)}")


def _check_group_mass(choice: CorrectionChoice) -> None:
    if choice.group_mass_cap_per_response is None:
        return
    if not choice.group_mass_cap_per_response >= 1:
        raise ValueError("group_mass_cap_per_response must be >= 1: below it, on-policy groups would shrink")
    if choice.objective != "score":
        raise ValueError(
            f"cap_group_mass weighs by the total ratio and {choice.objective} by its own: use objective score"
        )


def _check_engine(choice: CorrectionChoice) -> None:
    if choice.engine != "tis":
        return
    if choice.objective in TOTAL_RATIO_OBJECTIVES:
        raise ValueError(
            f"tis only weighs, and with objective {choice.objective} engine correctors only mask: use icepop or kpop"
        )
    if choice.staleness == "sis":
        raise ValueError("sis accepts by the total ratio, so tis would correct the engine twice: use icepop or kpop")


def _check_staleness(choice: CorrectionChoice) -> None:
    if choice.staleness == "decoupled":
        if choice.objective in TOTAL_RATIO_OBJECTIVES:
            raise ValueError(f"decoupled weighs for an objective on cur/prox, not for {choice.objective}")
        if choice.objective in RATIO_OBJECTIVES and choice.base != "prox":
            raise ValueError("decoupled weighs by prox/old, and cur/old holds that ratio already: set base to prox")
    if choice.staleness == "sis" and choice.objective not in RATIO_OBJECTIVES:
        raise ValueError(f"sis leaves rejected tokens to an objective on cur/old, which {choice.objective} is not")
    if choice.staleness == "m2_range" and choice.objective != "ppo":
        raise ValueError(f"m2_range sets the clip of ppo, which {choice.objective} does not have: use m2_mask")


def _check_objective(choice: CorrectionChoice) -> None:
    if choice.objective == "unit" and choice.steps_per_update != 1:
        raise ValueError("objective unit holds for one optimizer step per update: set steps_per_update = 1 or use ppo")
    if choice.objective == "luspo" and choice.aggregation != "sequence_mean":
        raise ValueError("luspo multiplies by the response's length itself: set aggregation to sequence_mean")
    if choice.objective in ("ripo", "minirl") and choice.base != "old":
        raise ValueError(f"{choice.objective} reads the frozen old probability: set base to old")
    if choice.prox_source == "ewma" and not (choice.objective in RATIO_OBJECTIVES and choice.base == "prox"):
        raise ValueError("the ewma anchor fills prox, for an objective that clips against it: set base to prox")
    on_prox = choice.objective in RATIO_OBJECTIVES and choice.base == "prox" and choice.prox_source == "version_in"
    if on_prox and choice.steps_per_update == 1:
        raise ValueError(
            f"{choice.objective} on cur/prox never clips at one optimizer step per update, where cur is prox: "
            "set base to old, or take more steps"
        )
