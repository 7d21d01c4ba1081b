"""New weights into a running engine, in one of four ways.

    retract    pause, load, flush, go on: running rows recompute their KV cache, tokens before and after carry different versions
    drain      wait until nothing is in flight, then as above: every row has one version
    abort      running rows end where they are, with what they have
    in_place   the KV cache stays, made under the old weights: tokens after the swap match neither version. For experiments

The version is read back before anything goes on. Whatever goes wrong raises EngineError with suspect=True and leaves the engine paused, so
that no token is made under weights in doubt; a later swap that succeeds ends the pause.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

from actor.engine import Engine, PauseMode
from wire.errors import EngineError

SwapMode = Literal["retract", "drain", "abort", "in_place"]
PAUSE: dict[SwapMode, PauseMode] = {"retract": "retract", "drain": "retract", "abort": "abort", "in_place": "in_place"}


async def swap(engine: Engine, mode: SwapMode, path: str, version: int, idle: Callable[[], Awaitable[None]]) -> None:
    """Load the version in folder `path`. `idle` is awaited in mode `drain` alone: it returns once nothing is in flight, and the caller
    sends nothing more until this returns."""
    if mode == "drain":
        await idle()
    try:
        await engine.pause(PAUSE[mode])
        await engine.load_weights(path, version, flush=mode != "in_place")
        if (serving := await engine.weight_version()) != version:
            raise EngineError(f"the engine says it serves {serving}")
        await engine.resume()
    except EngineError as error:
        raise EngineError(f"swap to version {version}: {error}", suspect=True) from error
