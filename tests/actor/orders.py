"""Work orders for tests."""

from typing import Any

from wire.record import Sampling, WorkOrder

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)
GREEDY = Sampling(temperature=0.0, max_new_tokens=4)


def train(number: int, n: int = 2, attempt: int = 1, **fields: Any) -> WorkOrder:
    prompt, sampling = fields.get("prompt", "12"), fields.get("sampling", SAMPLING)
    return WorkOrder(f"t{number}", attempt, "train", f"p{number}", prompt, {"answer": "3"}, n, sampling,
                     baseline=fields.get("baseline"))


def evaluation(number: int, version: int, n: int = 1, greedy: bool = False) -> WorkOrder:
    return WorkOrder(f"e{number}", 1, "greedy_baseline" if greedy else "eval", f"h{number}", "12", {"answer": "3"}, n,
                     GREEDY if greedy else SAMPLING, version)
