"""The `exact` reward, with the time a tool, a sandbox or a judge would take: for measuring what asynchrony pays.

    task.verifier = "scripts.bench.slow_verdict:delayed_exact"

The time depends on the prompt and the seed alone, so every system that is compared waits as long for the same group, also at a second
attempt. Several groups are judged at once only with several slots (`actor.verifier_slots`): the delay sleeps, it needs no core.
"""

import math
import random
import time
from typing import Any

from verifier.builtin.exact import exact

SHORTEST_S, LONGEST_S = 0.2, 3.0
MEDIAN_S, SIGMA = 0.5, 0.9


def delayed_exact(prompts: list[Any], completions: list[Any], answer: list[Any], seed: int = 0, **_: Any) -> list[float | None]:
    """Sleep once for each distinct prompt of the call, then score as `exact` does. `seed` comes from `task.verifier_arguments`."""
    for prompt in {str(prompt) for prompt in prompts}:
        time.sleep(delay_s(prompt, seed))
    return exact(completions, answer)


def delay_s(prompt: str, seed: int) -> float:
    """Seconds: log-normal with median 0.5 and sigma 0.9, clipped to 0.2 .. 3; mean 0.73."""
    drawn = random.Random(f"{seed} {prompt}").lognormvariate(math.log(MEDIAN_S), SIGMA)
    return min(max(drawn, SHORTEST_S), LONGEST_S)
