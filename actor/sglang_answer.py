"""SGLang's JSON into our types. Pure. What cannot be understood raises EngineError; numbers that are merely wrong pass, for quarantine to
see."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from actor.engine import EngineInfo, Generated
from wire.errors import EngineError
from wire.record import Span

SLACK = 4
"""A row of prompt and response gets at most max_req_input_len + 4 tokens: SGLang's scheduler cuts max_new_tokens, in silence, to the lesser
of context and KV cache, less 2, less the prompt; and max_req_input_len is that lesser, less 6."""
PROMPT_RESERVE = 5
"""A prompt must leave room for this many tokens, however few are asked for."""

RUNS_WHAT_IT_IS_SENT = ("trust_remote_code", "enable_custom_logit_processor", "custom_weight_loader", "forward_hooks", "enable_lora",
                        "use_ray")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parse_version(label: Any) -> int:
    """SGLang's label is text; ours is a number. A label that is no number is none that we gave: the weights are in doubt."""
    if isinstance(label, str) and label.isascii() and label.isdecimal():
        return int(label)
    raise EngineError(f"the engine labels its weights {label!r}, which is no version of ours", suspect=True)


def parse_info(answer: Mapping[str, Any], vocab_size: int) -> EngineInfo:
    """`/server_info`."""
    try:
        unsafe = [name for name in RUNS_WHAT_IT_IS_SENT if answer.get(name)]
        unsafe += [f"host {answer['host']}"] if answer["host"] not in LOOPBACK else []
        unsafe += ["no api_key"] if not answer.get("api_key") else []
        return EngineInfo(
            engine_version=f"sglang {answer['version']}", dtype=str(answer["dtype"]), attention=str(answer["attention_backend"]),
            quantisation=str(answer["quantization"] or "none"), tp_size=int(answer["tp_size"]), vocab_size=vocab_size,
            context_length=int(answer["max_req_input_len"]) + SLACK, device=str(answer["device"]),
            deterministic=bool(answer["enable_deterministic_inference"]), model_path=str(answer["model_path"]), unsafe=tuple(unsafe),
            extra={"sampling_backend": answer["sampling_backend"], "kv_cache_dtype": answer["kv_cache_dtype"],
                   "max_total_tokens": answer["max_total_num_tokens"]})
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"/server_info is not what SGLang 0.5.23 answers: {error!r}") from error


def parse_rows(answer: Any, prompts: list[list[int]], top: int) -> list[Generated]:
    """`/generate` for a list of prompts."""
    if not isinstance(answer, list) or len(answer) != len(prompts):
        got = f"{len(answer)} rows" if isinstance(answer, list) else type(answer).__name__
        raise EngineError(f"/generate answered with {got} for {len(prompts)} rows")
    try:
        return [parse_row(row, len(prompt), top) for row, prompt in zip(answer, prompts, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(f"/generate answered a row that is not as SGLang 0.5.23 makes them: {error!r}") from error


def parse_row(row: Mapping[str, Any], prompt_tokens: int, top: int) -> Generated:
    """One row. A log-prob that the engine gives for another token than the one in the response is not this token's: it becomes NaN (SGLang
    replaces a token sampled from NaN logits by the end token)."""
    meta, finish = row["meta_info"], row["meta_info"]["finish_reason"]
    told = bool(row["output_ids"]) and "output_token_logprobs" in meta
    if finish["type"] == "abort" and not told:  # a row that waited has little more than this
        return Generated(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort", seconds=float(meta["e2e_latency"]))
    read = meta.get("prompt_tokens", prompt_tokens) if finish["type"] == "abort" else meta["prompt_tokens"]
    if read != prompt_tokens:
        raise ValueError(f"a prompt of {prompt_tokens} tokens was read as {read}")
    ids = int_array(row["output_ids"])
    logprobs, logprob_ids = parse_pairs(meta["output_token_logprobs"])
    if len(ids) == len(logprobs):
        logprobs[ids != logprob_ids] = np.nan
    if finish["type"] == "stop" and isinstance(finish["matched"], str):  # "NaN happened": no stop strings are ever sent
        logprobs[-1:] = np.nan
    spans = tuple(Span(parse_version(span["version"]), int(span["start"]), int(span["end"])) for span in meta["weight_versions"])
    top_ids, top_logprobs = parse_top(meta["output_top_logprobs"], top) if top and len(ids) else (None, None)
    return Generated(ids, logprobs, tuple(span for span in spans if span.end > span.start), str(finish["type"]), top_ids, top_logprobs,
                     float(meta["e2e_latency"]))


def parse_score(answer: Any, token_ids: list[int]) -> np.ndarray:
    """`/generate` of one row with logprob_start_len 0: float32 [len - 1]. SGLang 0.5.23 reports the last id of the vocabulary as 0; the
    log-prob beside it is right."""
    try:
        logprobs, ids = parse_pairs(answer["meta_info"]["input_token_logprobs"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(f"/generate scored in a way that SGLang 0.5.23 does not: {error!r}") from error
    if len(ids) != len(token_ids) or any(told not in (0, sent) for told, sent in zip(ids.tolist(), token_ids, strict=True)):
        raise EngineError("/generate scored other tokens than it was sent")
    return logprobs[1:]


def parse_pairs(pairs: list[list[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """[[logprob | null, token id, ...], ...] -> float32 [T], int32 [T]. JSON has no NaN: null is one. The conversion is exact, since
    SGLang's numbers were float32 before they became text."""
    return np.array([np.nan if pair[0] is None else pair[0] for pair in pairs], np.float32), int_array([pair[1] for pair in pairs])


def parse_top(rows: list[list[list[Any]]], top: int) -> tuple[np.ndarray, np.ndarray]:
    """Per token the `top` most likely: int32 [T, top], float32 [T, top]."""
    logprobs, ids = parse_pairs([pair for row in rows for pair in row])
    return ids.reshape(len(rows), top), logprobs.reshape(len(rows), top)


def int_array(ids: list[int]) -> np.ndarray:
    if not all(type(token) is int for token in ids):
        raise ValueError("a token id is no whole number")
    return np.array(ids, np.int32)
