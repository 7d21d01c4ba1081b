"""What this actor has promised to answer, and what it does next. Pure decisions: no engine, socket, file or clock.

The rules:
* a notice is applied before the orders that came with it or after it are sent to the engine; `drain` lets what is in flight end first;
* an eval order waits until what is in flight has ended and exactly its version is loaded, forwards or back; while one is queued or in
  the engine, nothing else is loaded and no training order is sent;
* a version below the newest one seen is loaded for an eval order only: any other such notice is an old one replayed;
* a version that was refused is left alone until it is allowed again: training goes on with what is held; eval orders are given back,
  and no orders are asked for until then (they would come straight back).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from wire.messages import Work
from wire.record import VersionNotice, WorkOrder, group_id

OnNewWeights = Literal["retract", "drain", "abort", "in_place"]
REMEMBERED = 64
"""Notices kept, to load a version again for an eval order that was granted while a newer one was being loaded."""


@dataclass(frozen=True)
class Load:
    notice: VersionNotice


@dataclass(frozen=True)
class Start:
    """Send these orders, all of one sampling, to the engine in one request."""

    orders: list[WorkOrder]


@dataclass(frozen=True)
class Return:
    """These orders cannot be answered here."""

    orders: list[WorkOrder]


def rows_of(orders: Iterable[WorkOrder]) -> int:
    return sum(order.rows for order in orders)


class Agenda:
    """`n`: rows of a training order. A request holds as many rows as `orders_per_request` of those make; eval orders have fewer each, so
    more of them share one."""

    def __init__(self, mode: OnNewWeights, n: int, orders_per_request: int, requests_in_flight: int) -> None:
        self._mode, self._n, self._rows, self._slots = mode, n, n * orders_per_request, requests_in_flight
        self._queue: deque[WorkOrder] = deque()
        self._running: list[list[WorkOrder]] = []
        self._unsettled: dict[str, WorkOrder] = {}
        self._notices: dict[int, VersionNotice] = {}
        self._newest: VersionNotice | None = None
        self._blocked: set[int] = set()
        self._returned: set[int] = set()
        self.held_back = False
        """Set from outside while there is no room for further answers: nothing is asked for, and no request begun."""

    def adopt(self, orders: list[WorkOrder]) -> None:
        """Orders that an earlier life answered: they wait in its outbox to be acknowledged."""
        self._unsettled.update({group_id(order): order for order in orders})

    def holding(self) -> list[str]:
        """Ids of the groups that were granted and have no acknowledged outcome yet."""
        return list(self._unsettled)

    def want(self) -> int:
        """How many orders to ask for: what the engine takes at once and one request more, so that it never waits for a grant."""
        if self._returned or self.held_back:
            return 0
        taken = rows_of(self._queue) + sum(map(rows_of, self._running))
        return max(0, (self._slots + 1) * self._rows - taken) // self._n

    def take(self, work: Work) -> str | None:
        """Take in what a Pull brought. Returns the reason when its notice is refused; its orders are taken all the same."""
        exact = {order.version for order in work.orders if order.version is not None}
        for order in work.orders:
            if group_id(order) not in self._unsettled:
                self._unsettled[group_id(order)] = order
                self._queue.append(order)
        return self._note(work.notice, work.notice.version in exact) if work.notice else None

    def next(self, held: int | None) -> Load | Start | Return | None:
        """What to do now, the engine holding version `held`. None: nothing until something ends or arrives."""
        if (order := self._first_eval()) is not None or self._eval_running():
            return self._next_eval(order, held)
        newest = self._newest
        if newest is not None and newest.version != held and newest.version not in self._blocked:
            return None if self._running and self._mode == "drain" else Load(newest)
        if held is None or not self._queue or len(self._running) >= self._slots or self.held_back:
            return None
        return self._start(self._queue[0])

    def refuse(self, version: int) -> None:
        """The version's files, or the engine after loading them, are not what the notice says."""
        self._blocked.add(version)

    def allow(self, version: int) -> None:
        self._blocked.discard(version)
        self._returned.discard(version)

    def left_engine(self, orders: list[WorkOrder]) -> None:
        """Their request has ended; they are still to be judged and put."""
        self._running.remove(orders)

    def settled(self, orders: list[WorkOrder]) -> None:
        """Put and acknowledged, or given back."""
        for order in orders:
            self._unsettled.pop(group_id(order), None)

    def _note(self, notice: VersionNotice, for_eval: bool) -> str | None:
        known = self._notices.setdefault(notice.version, notice)
        if known != notice:
            return f"version {notice.version}: a second notice with other digests"
        if self._newest is None or notice.version >= self._newest.version:
            self._newest = notice
        elif not for_eval:
            return f"version {notice.version}: an old notice, version {self._newest.version} came before it"
        while len(self._notices) > REMEMBERED:
            del self._notices[min(self._notices)]
        return None

    def _next_eval(self, order: WorkOrder | None, held: int | None) -> Load | Start | Return | None:
        if order is None:
            return None
        if order.version == held and (self._eval_running() or not self._running):
            return self._start(order) if len(self._running) < self._slots and not self.held_back else None
        if self._running:
            return None
        version = order.version or 0
        if version in self._notices and version not in self._blocked:
            return Load(self._notices[version])
        return self._return_evals(version)

    def _first_eval(self) -> WorkOrder | None:
        return next((order for order in self._queue if order.version is not None), None)

    def _eval_running(self) -> bool:
        return any(orders[0].version is not None for orders in self._running)

    def _start(self, first: WorkOrder) -> Start:
        together: list[WorkOrder] = []
        for order in self._queue:
            fits = not together or rows_of(together) + order.rows <= self._rows
            if fits and (order.sampling, order.version) == (first.sampling, first.version):
                together.append(order)
        self._drop_from_queue(together)
        self._running.append(together)
        return Start(together)

    def _return_evals(self, version: int) -> Return:
        if version in self._blocked:
            self._returned.add(version)
        orders = [order for order in self._queue if order.version == version]
        self._drop_from_queue(orders)
        return Return(orders)

    def _drop_from_queue(self, orders: list[WorkOrder]) -> None:
        gone = set(map(group_id, orders))
        self._queue = deque(order for order in self._queue if group_id(order) not in gone)
