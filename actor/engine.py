"""What the actor asks of an engine. `sglang_http.SGLangEngine` is the real one; tests have an in-memory twin."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from wire.record import Span

PauseMode = Literal["retract", "abort", "in_place"]


@dataclass(frozen=True)
class GenerateRequest:
    """One request of many rows. `prompts[i]` are the token ids of row i; `sampling` is SGLang's sampling_params, `own` those of the single
    rows that have others."""

    prompts: list[list[int]]
    sampling: dict[str, Any]
    top_logprobs: int = 0
    own: dict[int, dict[str, Any]] = field(default_factory=dict)

    def sampling_of(self, row: int) -> dict[str, Any]:
        return self.own.get(row, self.sampling)


@dataclass(frozen=True)
class Generated:
    """One row's answer of T tokens: int32 [T] ids, float32 [T] log-probs. The end token and its log-prob are included. `logprobs` may hold
    NaN when the engine said so: that is for quarantine to see. `spans` are empty when no token was made. `top_ids` and `top_logprobs` are
    [T, k] when k were asked for. `seconds` is what the engine says this row took, queueing included."""

    output_ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    finish_reason: str
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class EngineInfo:
    """`context_length`: the most tokens, prompt and response together, that a row gets uncut (what the engine reserves, and a KV cache
    smaller than the model's context, are taken off). `unsafe` names the settings by which this server would run what it is sent, or obey
    strangers."""

    engine_version: str
    dtype: str
    attention: str
    quantisation: str
    tp_size: int
    vocab_size: int
    context_length: int
    device: str = ""
    deterministic: bool = False
    model_path: str = ""
    unsafe: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Raises wire.errors.EngineError for anything but a clean success (`suspect` when weights may be half applied), and ValueError, before
    anything is sent, for what would harm the engine."""

    async def info(self) -> EngineInfo: ...

    async def generate(self, request: GenerateRequest) -> list[Generated]: ...

    async def score(self, token_ids: list[int]) -> np.ndarray:
        """float32 [len - 1]: log-prob of token_ids[i + 1] given the tokens before it, at temperature 1."""

    async def pause(self, mode: PauseMode) -> None:
        """`retract`: running rows lose their KV cache and wait. `in_place`: they keep it. `abort`: they end where they are."""

    async def resume(self) -> None: ...

    async def load_weights(self, path: str, version: int, *, flush: bool = True) -> None:
        """Load from a folder, flush the cache, label the weights `version`."""

    async def weight_version(self) -> int: ...

    async def flush_cache(self) -> None:
        """Forget every cached prefix. An error when rows are running."""

    async def abort_all(self) -> None: ...

    async def health(self) -> bool: ...

    async def close(self) -> None: ...
