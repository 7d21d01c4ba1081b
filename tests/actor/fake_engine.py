"""The in-memory twin of an SGLang server: a seeded toy distribution, versions that may arrive in mid-response, faults on demand.

The logits of the next token depend on the seed, the version and the last token alone, so that every log-prob can be computed again:
`FakeEngine.logprobs(version, tokens)`. After an `in_place` swap running rows sample from a mixture that is neither version's.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from actor.engine import EngineInfo, Generated, GenerateRequest, PauseMode
from wire.record import Span


class FakeEngine:
    """Makes one token for every running row per step, and yields to the loop `token_s` seconds between steps.

    Faults: `fail["load_weights"] = EngineError(...)` raises once at the next call of that method; `alter = function` rewrites each row on
    its way out (NaN log-probs, wrong spans, ...); `label` overrides what `weight_version` reports; `hang` stops token making until it is
    cleared.
    """

    def __init__(self, vocab_size: int = 16, seed: int = 0, version: int = 0, token_s: float = 0.0, context_length: int = 1022) -> None:
        self.seed, self.version, self.token_s = seed, version, token_s
        self._info = EngineInfo("fake 1", "float32", "none", "none", 1, vocab_size, context_length, device="cpu")
        self._rng = np.random.default_rng(seed)
        self._stale_from: int | None = None
        self._running = self._aborts = 0
        self._go = asyncio.Event()
        self._go.set()
        self.fail: dict[str, Exception] = {}
        self.alter: Callable[[Generated], Generated] | None = None
        self.label: int | None = None
        self.hang = False
        self.calls: list[tuple[str, Any]] = []
        self.tokens_made = 0

    # What a test may ask.

    @property
    def in_flight(self) -> int:
        return self._running

    @property
    def paused(self) -> bool:
        return not self._go.is_set()

    def distribution(self, version: int, last: int, temperature: float = 1.0) -> np.ndarray:
        """float64 [vocab] log-probs of the token after `last`."""
        logits = np.random.default_rng([self.seed, version, last]).normal(size=self._info.vocab_size) / max(temperature, 1e-6)
        return logits - np.logaddexp.reduce(logits)

    def logprobs(self, version: int, tokens: list[int], start: int = 1, temperature: float = 1.0) -> np.ndarray:
        """float32: log-probs of tokens[start:], each given the one before it."""
        return np.array([self.distribution(version, before, temperature)[token]
                         for before, token in zip(tokens[start - 1:], tokens[start:], strict=False)], np.float32)

    # The Engine protocol.

    async def info(self) -> EngineInfo:
        self._call("info")
        return self._info

    async def generate(self, request: GenerateRequest) -> list[Generated]:
        self._call("generate", request)
        for index, prompt in enumerate(request.prompts):
            self._check(prompt, request.sampling_of(index)["max_new_tokens"])
        self._running += 1
        try:
            return list(await asyncio.gather(*[self._row(prompt, request, index) for index, prompt in enumerate(request.prompts)]))
        finally:
            self._running -= 1

    async def score(self, token_ids: list[int]) -> np.ndarray:
        self._call("score", token_ids)
        self._check(token_ids, 0)
        return self.logprobs(self.version, token_ids)

    async def pause(self, mode: PauseMode) -> None:
        self._call("pause", mode)
        self._go.clear()
        self._stale_from = self.version if mode == "in_place" else None
        if mode == "abort":
            await self.abort_all()

    async def resume(self) -> None:
        self._call("resume")
        self._go.set()

    async def load_weights(self, path: str, version: int, *, flush: bool = True) -> None:
        self._call("load_weights", (path, version, flush))
        self.version = version

    async def weight_version(self) -> int:
        self._call("weight_version")
        return self.version if self.label is None else self.label

    async def flush_cache(self) -> None:
        self._call("flush_cache")

    async def abort_all(self) -> None:
        self._call("abort_all")
        self._aborts += 1
        while self._running:
            await asyncio.sleep(0)

    async def health(self) -> bool:
        self._call("health")
        return not self.hang and not self.paused

    async def close(self) -> None:
        self._call("close")

    # Inside.

    def _call(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        if name in self.fail:
            raise self.fail.pop(name)

    def _check(self, prompt: list[int], new_tokens: int) -> None:
        if not prompt or min(prompt) < 0 or max(prompt) >= self._info.vocab_size or len(prompt) + new_tokens > self._info.context_length:
            raise ValueError("a prompt that an engine could not take")

    async def _row(self, prompt: list[int], request: GenerateRequest, index: int) -> Generated:
        sampling, aborts = request.sampling_of(index), self._aborts
        stops, temperature = set(sampling.get("stop_token_ids", ())), sampling.get("temperature", 1.0)
        ids: list[int] = []
        rows: list[np.ndarray] = []
        versions: list[int] = []
        finish, first_version = "length", None
        while len(ids) < sampling["max_new_tokens"]:
            await asyncio.sleep(self.token_s)
            while (self.hang or self.paused) and self._aborts == aborts:
                await asyncio.sleep(0)
            if self._aborts != aborts:
                finish = "abort"
                break
            first_version = self.version if first_version is None else first_version
            last = ids[-1] if ids else prompt[-1]
            row = self.distribution(self.version, last, temperature)
            if self._stale_from is not None and first_version != self.version:
                row = np.logaddexp(row, self.distribution(self._stale_from, last, temperature)) - np.log(2)
            token = int(row.argmax()) if temperature == 0 else int(self._rng.choice(len(row), p=np.exp(row) / np.exp(row).sum()))
            ids.append(token)
            rows.append(row)
            versions.append(self.version)
            self.tokens_made += 1
            if token in stops:
                finish = "stop"
                break
        made = self._generated(ids, rows, versions, finish, request.top_logprobs)
        return self.alter(made) if self.alter else made

    def _generated(self, ids: list[int], rows: list[np.ndarray], versions: list[int], finish: str, top: int) -> Generated:
        logprobs = np.array([row[token] for row, token in zip(rows, ids, strict=True)], np.float32)
        starts = [i for i in range(len(ids)) if i == 0 or versions[i] != versions[i - 1]]
        spans = tuple(Span(versions[a], a, b) for a, b in zip(starts, [*starts[1:], len(ids)], strict=False))
        if not top or not ids:
            return Generated(np.array(ids, np.int32), logprobs, spans, finish)
        top_ids = np.array([np.argsort(-row)[:top] for row in rows], np.int32)
        return Generated(np.array(ids, np.int32), logprobs, spans, finish, top_ids,
                         np.array([row[best] for row, best in zip(rows, top_ids, strict=True)], np.float32))

