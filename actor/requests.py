"""One engine request, from orders to rows: which prompts can be sent, and how often a failed request is tried."""

import logging

from actor.collect import Outcome, RequestTimes, failed_group
from actor.engine import EngineInfo, Generated, GenerateRequest
from actor.service import EngineService
from actor.tokenise import Tokeniser, unfit
from wire.errors import EngineError, RunError
from wire.record import WorkOrder

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""Of one request, before its orders are given back."""
MAX_FAILED = 5
"""Requests in a row, after which the actor gives up."""


def prepare(orders: list[WorkOrder], tokeniser: Tokeniser, info: EngineInfo) -> tuple[list[WorkOrder], list[list[int]], Outcome]:
    """The orders that can be sent, their prompts' token ids, and the failures of those that cannot."""
    fit, prompts, failed = [], [], Outcome()
    for order in orders:
        ids = tokeniser.prompt_ids(order.prompt)
        reason = unfit(ids, order.sampling.max_new_tokens, info.vocab_size, info.context_length)
        if reason is None:
            fit.append(order)
            prompts.append(ids)
        else:
            log.warning("order %s, prompt %s (%d tokens): %s", order.order_id, order.prompt_id, len(ids), reason)
            failed.extend(failed_group(order, reason))
    return fit, prompts, failed


class Requests:
    def __init__(self, service: EngineService) -> None:
        self._service, self._failed = service, 0

    async def generate(self, request: GenerateRequest) -> tuple[list[Generated], RequestTimes] | None:
        """None when the engine fails this request again and again although it is well. Raises RunError when it fails every request."""
        for _ in range(ATTEMPTS):
            try:
                answer = await self._service.generate(request)
            except EngineError as error:
                log.warning("a request of %d rows failed: %s", len(request.prompts), error)
                last = error
            else:
                self._failed = 0
                return answer
        self._failed += 1
        if self._failed >= MAX_FAILED:
            raise RunError(f"the engine failed {self._failed} requests in a row, {ATTEMPTS} times each: {last}")
        return None
