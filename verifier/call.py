"""One call of a reward function: rows to TRL's keyword columns, whatever it returns to verdicts. Pure, but for the function itself."""

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable
from typing import Any

import msgspec

from verifier.protocol import VerifyItem
from verifier.resolve import Reward
from wire.record import Failed, Scored, Verdict

MAX_DETAIL = 2000
"""Characters of a failure's detail that are kept."""


def call_reward(reward: Reward, items: list[VerifyItem], arguments: dict[str, Any], runner: asyncio.Runner) -> list[Verdict] | Failed:
    """A verdict per item, or one Failed for the whole call (exception, not a list, wrong length)."""
    started = time.perf_counter()
    try:
        result = reward(**as_columns(items), **arguments)
        if inspect.isawaitable(result):
            result = runner.run(_await(result))
        outcome = as_verdicts(result, len(items))
    except BaseException as error:  # noqa: BLE001 - becomes the verdict; SystemExit too must end the call, not the worker
        outcome = Failed(f"exception: {type(error).__name__}", _describe(error))
    seconds = time.perf_counter() - started
    if isinstance(outcome, Failed):
        return msgspec.structs.replace(outcome, seconds=seconds)
    return [msgspec.structs.replace(verdict, seconds=seconds / len(items)) for verdict in outcome]


def as_columns(items: list[VerifyItem]) -> dict[str, list[Any]]:
    """TRL's keywords: `prompts`, `completions`, `completion_ids`, and each dataset column as a list (None where a row lacks it).

    A chat prompt's completion is `[{"role": "assistant", "content": text}]`, a text prompt's is the text, as TRL passes them.
    """
    names = dict.fromkeys(name for item in items for name in item.columns)
    reserved = {"prompts", "completions", "completion_ids"} & names.keys()
    if reserved:
        raise ValueError(f"rename the dataset column {sorted(reserved)[0]!r}: the reward signature uses that name")
    return {
        "prompts": [item.prompt for item in items],
        "completions": [_completion(item) for item in items],
        "completion_ids": [item.completion_ids for item in items],
        **{name: [item.columns.get(name) for item in items] for name in names},
    }


def as_verdicts(result: Any, count: int) -> list[Verdict] | Failed:
    """A verdict per value of `result`: a list or tuple, a numpy array or a torch tensor, of length `count`."""
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        return Failed("not_a_list", f"the function returned a {type(result).__name__}")
    if len(values) != count:
        return Failed("wrong_length", f"{len(values)} rewards for {count} completions")
    return [as_verdict(value) for value in values]


def as_verdict(value: Any) -> Verdict:
    """A finite number is a reward (bool and int become float); anything else is a failure with its reason. Never 0 instead."""
    if isinstance(value, Scored) and not math.isfinite(value.reward):
        return Failed(f"bad_reward: {value.reward}", value.detail[:MAX_DETAIL])
    if isinstance(value, Failed):
        return Failed(value.reason[:MAX_DETAIL], value.detail[:MAX_DETAIL])
    if isinstance(value, Scored):
        return msgspec.structs.replace(value, detail=value.detail[:MAX_DETAIL])
    if value is None:
        return Failed("no_verdict", "the function returned None for this completion")
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, int | float):
        return Failed(f"bad_reward: {type(value).__name__}", repr(value)[:MAX_DETAIL])
    try:
        reward = float(value)
    except OverflowError as error:
        return Failed("bad_reward: int", str(error))
    return Scored(reward) if math.isfinite(reward) else Failed(f"bad_reward: {reward}")


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion in either of TRL's forms; for the built-ins."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _completion(item: VerifyItem) -> str | list[dict[str, str]]:
    return item.completion if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.completion}]


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    """The message and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (line {frames[-1].lineno} of {frames[-1].filename}, in {frames[-1].name})" if frames else ""
    return " ".join(f"{error}"[:MAX_DETAIL].split()) + place
