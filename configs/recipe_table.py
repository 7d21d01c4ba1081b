"""The [recipe] table: one choice per axis, and after it the settings that only that choice reads.

Axes: reward shaping, advantages, objective, engine corrector, response filter, staleness corrector, group mass, reference KL and entropy,
aggregation. `configs/stacking.py` refuses what does not go together.
"""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import AboveZero, NotNegative, Positive, Table

Share = Annotated[float, Field(ge=0, le=1)]


class Recipe(Table):
    name: str = "custom"
    """One of `leeway recipes`: its settings apply, and the keys written beside it win. Any other name only labels settings of
    your own, unless it looks like one of them with a typing error."""

    # ---------------------------------------------------------------- rewards and groups
    dynamic_sampling: bool = False
    """DAPO: drop a complete group whose rewards are all equal (counted as dropped, no_contrast) and ask another prompt in its place."""
    overlong: Annotated[float, Field(gt=0, le=1)] | None = None
    """DAPO's soft punishment: over this last share of the length limit the reward falls linearly, by 1 at the limit. The paper's is .2."""
    overlong_limit: Positive | None = None
    """In tokens. Default: sampling.max_new_tokens."""
    mask_truncated: bool = False
    """Do not train on responses that were cut off at the length limit; their rewards still count in the group."""

    # ---------------------------------------------------------------- advantages
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_ema", "zcpo", "remax"] = "grpo"
    """remax subtracts the reward of a greedy response, which is sampled beside each group and never trained on."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """reinforce_pp_ema: of the running second moment, which moves with each update that makes a step."""
    zcpo_beta: NotNegative = 4.0
    """zcpo: weight of the centred full-vocabulary KL to learner.reference."""

    # ---------------------------------------------------------------- objective
    objective: Literal["score", "unit", "ppo", "gppo", "gspo", "luspo", "cispo", "ripo", "fdiv", "tapo", "minirl"] = "ppo"
    base: Literal["old", "prox"] = "old"
    """The denominator of the policy ratio."""
    clip_low: AboveZero = 0.2
    clip_high: AboveZero = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo and gppo: where the advantage is negative, no gradient above this ratio. Usual: 3."""
    cap: AboveZero = 5.0
    """cispo and minirl: the cap on the ratio (absolute)."""
    delta: AboveZero | None = None
    """ripo (default .05) and fdiv (no default): radius of the trust region."""
    divergence: Literal["kl", "reverse_kl", "tv", "chi2", "abs_log"] = "kl"
    """fdiv: the generator f."""
    topology: Literal["mc", "atomic", "binary"] = "binary"
    """fdiv: how one token estimates the divergence."""
    ratio_bound: Annotated[float, Field(gt=1)] = 10.0
    """ripo and fdiv: upper end of every interval, which is unbounded for rare tokens."""
    position_decay: NotNegative = 0.5
    """tapo: the clip of token t is clip x t^-decay."""
    position_floor: NotNegative = 0.0
    """tapo: and at least this."""

    # ---------------------------------------------------------------- engine mismatch, on old/mu
    engine: Literal["none", "tis", "icepop", "kpop"] = "none"
    """Engine-mismatch corrector, on old/mu."""
    engine_level: Literal["token", "sequence", "geometric"] = "token"
    engine_cap: AboveZero = 2.0
    engine_low: NotNegative = 0.5
    engine_high: AboveZero = 5.0
    kpop_threshold: AboveZero = 0.03
    kpop_carry: Literal["ratio", "one"] = "ratio"
    filter: Literal["none", "sequence", "geometric", "k3", "carm", "veto"] = "none"
    """Keeps or drops whole responses, on old/mu."""
    filter_low: AboveZero | None = None
    """sequence (no default) and geometric (.999): smallest ratio kept."""
    filter_high: AboveZero | None = None
    """sequence (no default) and geometric (1.001): largest ratio kept."""
    filter_threshold: AboveZero | None = None
    """carm (no default, at least 1), k3 (.01): largest value kept. veto (1e-4): smallest ratio of a token kept."""

    # ---------------------------------------------------------------- staleness
    staleness: Literal["none", "decoupled", "m2_mask", "m2_range", "opsm", "sis"] = "none"
    """decoupled weighs by prox/old; the others read prox/mu (sis: over the behaviour top-k, sampling.top_logprobs)."""
    staleness_cap: AboveZero = 5.0
    """decoupled"""
    staleness_mode: Literal["cap", "mask"] = "cap"
    """decoupled: what happens to a weight above the cap."""
    m2_budget: AboveZero = 0.04
    """m2_mask, m2_range: mean square of the log-ratio allowed."""
    m2_floor_low: AboveZero = 0.3
    m2_floor_high: AboveZero = 0.5
    """m2_range: the clip is never narrower than these."""
    opsm_threshold: NotNegative = 0.5
    """opsm: drop a response with a negative advantage and a mean of log mu/prox above this."""
    prox: Literal["version_in", "ewma"] = "version_in"
    """The proximal policy: the version the update begins from, or a running average of the versions. It never fills old."""
    ewma_window: Annotated[int, Field(ge=0)] | None = None
    """ewma: versions, 1 or more; the average decays by window / (window + 2). Default: replay.max_staleness."""
    ewma_reset: Share = 0.9
    """ewma: set the average to the live weights when less than this share of the tokens with an advantage still has a gradient."""
    group_mass_cap: Annotated[float, Field(ge=1)] | None = None
    """Cap per response present on the group's total ratio mass. Goes with objective = "score" only."""

    # ---------------------------------------------------------------- reference policy (learner.reference) and entropy
    kl: NotNegative = 0.0
    """Coefficient of the KL to learner.reference. 0 beside a reference only measures it."""
    kl_estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """full: over the whole vocabulary, inside the training forward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: minus kl x the sum over the response, before advantages; k1, k2 and k3 then compare old with ref, full the live policy."""
    kl_mask: Literal["original", "kept"] = "original"
    """loss: every trainable token, or only those the correctors keep."""
    kl_weight: Literal["none", "total"] = "none"
    """loss: total weighs each token by cur/mu, so that stale tokens estimate the KL of the current policy."""
    entropy: NotNegative | None = None
    """Coefficient of the entropy bonus. 0 only measures it; null does not even do that."""

    # ---------------------------------------------------------------- aggregation
    aggregation: Literal["token_mean", "sequence_mean", "constant", "length_weighted"] = "token_mean"
    constant: Positive | None = None
    """Divisor per response of aggregation = "constant". Default: sampling.max_new_tokens."""
    denominator: Literal["original", "kept"] = "original"
