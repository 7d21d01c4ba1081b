"""The only file that speaks SGLang's HTTP (0.5.23, `--skip-tokenizer-init`): token ids in, token ids and log-probs out.

Log-probs are log-softmax of logits / temperature over the full vocabulary, before top-k and top-p. Any answer but a clean success raises
EngineError. What is known to kill the server (an empty prompt, a token id outside the vocabulary) or to fail a whole request for one row
(more tokens than the context) raises ValueError before anything is sent.
"""

import asyncio
import json
import os
from typing import Any

import aiohttp
import numpy as np

from actor.engine import EngineInfo, Generated, GenerateRequest, PauseMode
from actor.sglang_answer import PROMPT_RESERVE, parse_info, parse_rows, parse_score, parse_version
from wire.errors import EngineError

POLL_S = 0.1
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Said with every request, so that no default of the server or of the model's folder changes the distribution."""


class SGLangEngine:
    """One SGLang server. `vocab_size` is that of the model it serves, which the server does not tell."""

    def __init__(self, url: str, api_key: str | None, vocab_size: int, *, generate_timeout_s: float = 1800.0,
                 control_timeout_s: float = 120.0) -> None:
        self._url, self._vocab_size = url.rstrip("/"), vocab_size
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._generate_timeout_s, self._control_timeout_s = generate_timeout_s, control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the server takes requests with our key. A server that a former owner left paused is resumed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_answers("/model_info")
                await self.resume()
                await self._until_answers("/ready")
        except TimeoutError as error:
            raise EngineError(f"the engine at {self._url} was not ready within {timeout_s:g} s") from error

    async def info(self) -> EngineInfo:
        self._info = parse_info(await self._json("GET", "/server_info"), self._vocab_size)
        return self._info

    async def generate(self, request: GenerateRequest) -> list[Generated]:
        """One answer per prompt, in order. `sampling` must hold temperature and max_new_tokens."""
        for row, prompt in enumerate(request.prompts):
            await self._check(prompt, request.sampling_of(row)["max_new_tokens"])
        if not request.prompts:
            return []
        by_row = [NEUTRAL | request.sampling_of(row) for row in range(len(request.prompts))] if request.own else None
        body = {"input_ids": request.prompts, "sampling_params": by_row or NEUTRAL | request.sampling, "return_logprob": True,
                "top_logprobs_num": request.top_logprobs}
        answer = await self._json("POST", "/generate", body, self._generate_timeout_s)
        return parse_rows(answer, request.prompts, request.top_logprobs)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        await self._check(token_ids, 0)
        body = {"input_ids": token_ids, "sampling_params": NEUTRAL | {"temperature": 1.0, "max_new_tokens": 0}, "return_logprob": True,
                "logprob_start_len": 0}
        return parse_score(await self._json("POST", "/generate", body), token_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._json("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._json("POST", "/continue_generation", {})

    async def load_weights(self, path: str, version: int, *, flush: bool = True) -> None:
        """Once this is sent, anything but a clean success leaves the weights in doubt. SGLang ignores a name it does not know and dies of a
        wrong shape: the files are to be checked before. A relative path or one that does not exist is refused here (SGLang tries a hub)."""
        if not os.path.isabs(path) or not os.path.isdir(path):  # noqa: ASYNC240  (one look at a local file system)
            raise EngineError(f"weights must be an existing folder given by its absolute path, not {path!r}")
        body = {"model_path": path, "weight_version": str(version), "flush_cache": flush, "load_format": "safetensors"}
        try:
            answer = await self._json("POST", "/update_weights_from_disk", body)
        except EngineError as error:
            raise EngineError(str(error), suspect=True) from error
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"/update_weights_from_disk answered {answer!r}", suspect=True)

    async def weight_version(self) -> int:
        answer = await self._json("GET", "/model_info")
        return parse_version(answer.get("weight_version") if isinstance(answer, dict) else None)

    async def flush_cache(self) -> None:
        await self._call("POST", "/flush_cache", {}, self._control_timeout_s)

    async def abort_all(self) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True}, self._control_timeout_s)

    async def health(self) -> bool:
        """Does the engine make tokens? Takes about a second (SGLang's own pace); false while paused."""
        return await self._answers("/health_generate")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _check(self, prompt: list[int], new_tokens: int) -> None:
        info = self._info or await self.info()
        if not prompt:
            raise ValueError("an empty prompt cannot be sent to the engine")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise ValueError(f"token id {min(prompt) if min(prompt) < 0 else max(prompt)} is outside the vocabulary of {info.vocab_size}")
        if len(prompt) + max(new_tokens, PROMPT_RESERVE) > info.context_length:
            raise ValueError(f"a prompt of {len(prompt)} tokens and {new_tokens} new ones do not fit the engine's {info.context_length}")

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        data = await self._call(method, path, body, timeout_s or self._control_timeout_s)
        try:
            return json.loads(data)
        except ValueError as error:
            raise EngineError(f"{path} answered {data[:200]!r}, which is not JSON") from error

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
        status, data = await self._send(method, path, body, timeout_s)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {data[:500].decode(errors='replace')}")
        return data

    async def _until_answers(self, path: str) -> None:
        while not await self._answers(path):  # noqa: ASYNC110  (a server cannot tell us)
            await asyncio.sleep(POLL_S)

    async def _answers(self, path: str) -> bool:
        """Is the answer 200? No connection and 503 say not (yet); a refusal of our key is final."""
        try:
            status, data = await self._send("GET", path, None, self._control_timeout_s)
        except EngineError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectionError):
                return False
            raise
        if status in (401, 403):
            raise EngineError(f"the engine at {self._url} refuses our API key ({status})")
        return status == 200

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
        """A connection per request: a kept one may be closed by the server in the very moment of reuse."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), headers=self._headers)
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, self._url + path, json=body, timeout=timeout, allow_redirects=False) as answer:
                return answer.status, await answer.read()
        except TimeoutError as error:
            raise EngineError(f"{path} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{path}: the engine at {self._url} broke off: {error!r}") from error
