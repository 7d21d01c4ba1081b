"""The config tree: one pydantic model per table of the TOML files. An unknown key is an error.

`SHARED` names the tables that every process of a run must agree on; their digest is compared at HELLO. The rest (addresses, devices,
rounding, logging) may differ from process to process.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Positive, Seconds, Table
from configs.recipe_table import Recipe
from configs.rules import check_tree

SHARED = ("model", "sampling", "task", "replay", "recipe")
SHARED_EXCEPT = {"replay": ("endpoint",)}
RESUMABLE = ("replay.max_staleness", "replay.max_rollouts", "replay.endpoint", "learner.lr", "learner.updates", "eval", "logging", "actor",
             "security")


class Model(Table):
    path: str
    """A folder that transformers' from_pretrained loads: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the trainer's forward computes with, and so what is published."""
    attention: Literal["sdpa", "eager"] = "sdpa"


class ColdStart(Table):
    """Make a tiny model and its data before the run: supervised, seeded, cached in `out`. Nothing else in Leeway knows about it."""

    out: str
    task: Literal["addition"] = "addition"
    seed: int = 0
    steps: Positive = 900
    batch: Positive = 128
    lr: float = 3e-3
    hidden_size: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    heldout: Positive = 512
    supervised: Positive = 2000
    """How many problems the supervised phase sees; the rest, less the held-out ones, are the RL prompts."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.45
    """Stop as soon as unseen supervised problems are answered right with this probability."""


class Task(Table):
    train: str
    """JSONL or parquet with a prompt column (text or chat messages); other columns go to the verifier."""
    heldout: str | None = None
    prompt_column: str = "prompt"
    chat: bool | None = None
    """Apply the tokenizer's chat template. Default: yes for chat messages, no for text."""
    verifier: str = "exact"
    """exact | math | reasoning_gym | json_schema | code, or package.module:function with TRL's reward signature."""
    verifier_arguments: dict[str, Any] = {}
    deadline_s: Seconds = 10.0
    shuffle_rewards: bool = False
    """Negative control: permute the rewards of every lease, so that nothing can be learned."""


class Sampling(Table):
    n: Positive = 8
    """Responses per prompt: the group size."""
    temperature: float = 1.0
    max_new_tokens: Positive = 1024
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: dict[str, float] = {}
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    """Behaviour top-k kept with each token (needed by SIS)."""


class Replay(Table):
    endpoint: str = "tcp://127.0.0.1:5757"
    """tcp://ADDRESS:PORT. An address beyond loopback needs `security.keys`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Staleness budget in weight versions, measured at a group's oldest token. 0 is synchronous."""
    max_rollouts: Positive = 100_000
    """How many rollouts may be stored with their tokens (waiting, leased, and all others until retention removes theirs) or be on order.
    Beyond it actors are held back: no more is ordered than the next update needs, until a checkpoint lets retention make room."""
    min_scored: Positive | None = None
    """A group trains when at least this many of its samples were scored. Default: all n."""
    max_attempts: Positive = 3
    """How often a prompt is asked that comes too late or does not get enough verdicts. Actors that vanish do not count."""
    order_lease_s: Seconds = 60.0
    """An order whose actor shows no sign of life for this long goes to another."""
    commit_ms: Seconds = 5.0
    max_failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of failed verdicts (over the last 1,000) at which the run stops."""
    retain_payloads: bool = False
    """Keep every trained rollout's tokens and log-probs for the run's life, not only from the oldest retained checkpoint on."""


class Actor(Table):
    name: str | None = None
    """Of one actor process, for its leases, outbox and logs: the same in its next life. Default: HOST-N, N the first number from 0 that no
    other actor on this host has."""
    count: Positive = 1
    """How many actors `leeway run` starts."""
    on_new_weights: Literal["retract", "drain", "abort", "in_place"] = "retract"
    round_weights: Literal["none", "fp8", "int8"] = "none"
    """Round per output channel before loading: on a CPU, the stand-in for a quantised rollout engine."""
    url: str | None = None
    """Attach to an SGLang server that somebody else runs, instead of starting one."""
    api_key_file: str | None = None
    fetch_weights: bool = False
    """Get weight files from replay even where the run directory is visible. Elsewhere that is what happens anyway."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_total_tokens: Positive = 16_384
    orders_per_request: Positive = 16
    """A request to the engine has up to this many x sampling.n rows."""
    requests_in_flight: Positive = 2
    """Requests that the engine works on at once; orders of one more are held ready."""
    outbox: str | None = None
    """Folder of the outbox: finished groups until replay has acknowledged them. Default: <run>/outbox; where the run's folder is not on
    this machine, outbox/<run>. On a local disk."""
    outbox_mb: Positive = 256
    """Payload in the outbox at which the engine is held back."""
    verifier_slots: Positive = 1
    """Verifier processes; one judges a group at a time."""
    engine_args: list[str] = []
    """Further flags for sglang.launch_server, as they are."""
    max_quarantined: Positive = 20
    """Stop when this many rollouts in a row from this engine were poisoned."""


class Learner(Table):
    updates: Positive = 240
    """Stop after this many updates that made a step."""
    groups_per_update: Positive = 32
    steps_per_update: Positive = 1
    micro_batch_rows: Positive = 64
    score_rows: Positive = 64
    """Rows of every scoring pass: a fixed shape, so that a re-score repeats it bit for bit."""
    length_bucket: Positive = 64
    """Sequence widths are rounded up to a multiple of this."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    lr_final_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The learning rate decays linearly to this share of `lr` at the last update."""
    lr_warmup_updates: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over this many updates. Adam's first steps have full size whatever the gradient, noise too."""
    reference: str | None = None
    """Frozen reference policy: a model folder, or "initial" for model.path. One more copy of the weights on every rank."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    zero_stage: Literal[0, 1, 2, 3] = 0
    ranks: Positive = 1
    """How many ranks `leeway run` starts under torchrun. By hand, torchrun decides."""
    device: Literal["cpu", "cuda"] = "cpu"
    max_consecutive_skips: Positive = 20
    checkpoint_every: Positive = 60
    keep_checkpoints: Positive = 2
    keep_versions: Positive | None = None
    """Versions kept beyond what checkpoints and the budget need. Default: none."""


class Anchor(Table):
    on_missing: Literal["mask", "refuse"] = "mask"


class Eval(Table):
    every: Positive | None = None
    """Evaluate every so many updates, besides before the first and after the last."""
    samples: Annotated[int, Field(ge=0)] = 4
    greedy: bool = True
    prompts: Positive | None = None
    """Use only the first so many held-out prompts."""


class Security(Table):
    """Who may talk to replay. Without keys, only processes of the same machine, over loopback."""

    keys: str | None = None
    """Folder made by `leeway keys`. Needed for any address beyond loopback; with it every connection is encrypted, and who is not on its
    list gets nothing across."""
    actor_key: Annotated[str, Field(pattern="^[a-z0-9_-]{1,32}$")] = "actor"
    """Which key of the folder an actor proves itself with. Replay knows it by this name, whatever it says itself."""


class Logging(Table):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    watchdog_s: Seconds = 30.0
    """When no rollout, update, version or result has come for this long, replay says what it waits for."""


class Run(Table):
    dir: str = "runs"
    seed: int = 0


class Config(Table):
    """The whole tree. `check_tree` holds the rules that span tables."""

    model: Model
    task: Task
    cold_start: ColdStart | None = None
    sampling: Sampling = Sampling()
    replay: Replay = Replay()
    actor: Actor = Actor()
    learner: Learner = Learner()
    anchor: Anchor = Anchor()
    recipe: Recipe = Recipe()
    eval: Eval = Eval()
    security: Security = Security()
    logging: Logging = Logging()
    run: Run = Run()

    @model_validator(mode="after")
    def _rules(self) -> "Config":
        check_tree(self)
        return self

    @property
    def min_scored(self) -> int:
        return self.replay.min_scored or self.sampling.n

    def shared(self) -> dict[str, Any]:
        """What all processes of the run must agree on, as plain JSON."""
        tree = self.model_dump(mode="json")
        return {table: {key: value for key, value in tree[table].items() if key not in SHARED_EXCEPT.get(table, ())}
                for table in SHARED}
