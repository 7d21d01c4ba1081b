"""A whole learner against a real replay daemon in a thread, and a light actor that answers with random tokens a tiny model knows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from learner.assemble import assemble
from learner.coldstart import make_tokenizer
from learner.loop import Learner
from learner.stop import Stop
from learner.stopwatch import Stopwatch
from replay.client import BlockingClient
from tests.support.replay import ENGINE, DaemonThread, LightActor, make_config
from tests.support.tiny_model import make_tiny_model
from wire.record import RolloutHead, Scored, Span, WorkOrder, group_id, pack_payload, rollout_id

Answer = Callable[["RandomActor", WorkOrder, int], tuple[RolloutHead, bytes]]


def make_run_config(folder: Path, **tables: dict[str, Any]) -> Config:
    """4 updates of 2 groups of 2, budget 1, no evaluation; model and tokenizer in `folder/model`."""
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", hidden=32, layers=2)
        make_tokenizer().save_pretrained(folder / "model")
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model")}, "eval": {"samples": 0, "greedy": False},
        "learner": {"groups_per_update": 2, "updates": 4, "lr": 1e-2, "micro_batch_rows": 4, "score_rows": 4, "length_bucket": 8}}
    return make_config(folder, **{name: {**defaults.get(name, {}), **tables.get(name, {})} for name in {*defaults, *tables}})


def random_answer(actor: "RandomActor", order: WorkOrder, sample: int) -> tuple[RolloutHead, bytes]:
    """Random tokens under the version that the actor holds; every other sample is right."""
    rng = np.random.default_rng([int.from_bytes(order.order_id.encode()[-6:]), order.attempt, sample])
    prompt, length = rng.integers(3, 14, 4), int(rng.integers(2, 6))
    head = RolloutHead(rollout_id(order.order_id, order.attempt, sample), order.order_id, order.attempt, sample, len(prompt), length,
                       (Span(actor.confirmed, 0, length),), "stop", order.sampling_of(sample), ENGINE, Scored(float(sample % 2)))
    return head, pack_payload(prompt, rng.integers(3, 14, length), -rng.uniform(3, 4, length))


class RandomActor(LightActor):
    """Works in a thread until the run is over or it is told to stop."""

    def __init__(self, endpoint: str, config: Config, answer: Answer = random_answer) -> None:
        super().__init__(endpoint, config)
        self.make, self.stop = answer, threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self.done and not self.stop.is_set():
                orders = self.pull(wait_s=0.2).orders
                if orders:
                    self.put([self.make(self, order, sample) for order in orders for sample in range(order.rows)])
                    for order in orders:
                        self.holding.pop(group_id(order))
        except Exception as error:  # noqa: BLE001 - looked at by `acting`
            self.error = error


@contextmanager
def acting(endpoint: str, config: Config, answer: Answer = random_answer) -> Iterator[RandomActor]:
    actor = RandomActor(endpoint, config, answer)
    actor.thread.start()
    try:
        yield actor
    finally:
        actor.stop.set()
        actor.thread.join(10)
        actor.close()
    assert actor.error is None, actor.error


class LearningDaemon(DaemonThread):
    """A replay daemon with learners of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.learners: list[Learner] = []

    def learner(self) -> Learner:
        """A new one, as a new process would be; it replaces the one before. Nothing asks it to stop."""
        self.learners.append(assemble(self.config, lambda: BlockingClient(self.endpoint), Stop(), Stopwatch()))
        return self.learners[-1]

    def __exit__(self, *exc: object) -> None:
        for learner in self.learners:
            learner.session.close()
        super().__exit__(*exc)
