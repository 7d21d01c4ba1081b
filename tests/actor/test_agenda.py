import pytest

from actor.agenda import Agenda, Load, Return, Start
from tests.actor.orders import GREEDY, evaluation, train
from wire.messages import Work
from wire.record import VersionNotice, WorkOrder


def notice(version: int, digest: str = "d") -> VersionNotice:
    return VersionNotice(version, f"weights/v{version:06d}", digest, digest)


def work(*orders: WorkOrder, load: int | None = None) -> Work:
    return Work(list(orders), None if load is None else notice(load), False)


def ids(step: object) -> list[str]:
    assert isinstance(step, Start | Return), step
    return [order.order_id for order in step.orders]


def agenda(mode: str = "retract", per_request: int = 2, slots: int = 2) -> Agenda:
    return Agenda(mode, 2, per_request, slots)  # type: ignore[arg-type]


def test_asks_for_what_fits_the_engine_and_one_request_more() -> None:
    plan = agenda()
    assert plan.want() == 6
    plan.take(work(train(1), train(2), train(3), load=0))
    assert plan.want() == 3
    assert plan.holding() == ["t1.1", "t2.1", "t3.1"]
    assert plan.next(None) == Load(notice(0))
    first = plan.next(0)
    assert ids(first) == ["t1", "t2"]
    assert plan.want() == 3  # what is in the engine counts
    assert ids(plan.next(0)) == ["t3"]
    assert plan.next(0) is None
    assert isinstance(first, Start)
    plan.left_engine(first.orders)
    assert plan.want() == 5  # what is being judged does not
    assert len(plan.holding()) == 3  # but is held until it is acknowledged
    plan.settled(first.orders)
    assert plan.holding() == ["t3.1"]


def test_no_more_requests_than_slots_and_a_repeated_grant_counts_once() -> None:
    plan = agenda(per_request=1, slots=1)
    plan.take(work(train(1), train(2), load=0))
    plan.take(work(train(1), load=0))
    assert ids(plan.next(0)) == ["t1"]
    assert plan.next(0) is None
    assert plan.holding() == ["t1.1", "t2.1"]


def test_orders_of_different_sampling_never_share_a_request() -> None:
    plan = agenda(per_request=4)
    plan.take(work(evaluation(1, 0), evaluation(2, 0, greedy=True), evaluation(3, 0), load=0))
    assert ids(plan.next(0)) == ["e1", "e3"]
    assert ids(plan.next(0)) == ["e2"]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_new_weights_go_in_while_requests_run(mode: str) -> None:
    plan = agenda(mode)
    plan.take(work(train(1), load=0))
    assert ids(plan.next(0)) == ["t1"]
    plan.take(work(train(2), load=1))
    assert plan.next(0) == Load(notice(1))
    assert ids(plan.next(1)) == ["t2"]


def test_drain_lets_what_is_in_flight_end_first() -> None:
    plan = agenda("drain")
    plan.take(work(train(1), load=0))
    running = plan.next(0)
    assert isinstance(running, Start)
    plan.take(work(train(2), load=1))
    plan.take(work(load=2))
    assert plan.next(0) is None
    plan.left_engine(running.orders)
    assert plan.next(0) == Load(notice(2))  # the newest
    assert ids(plan.next(2)) == ["t2"]


def test_an_eval_waits_for_what_is_in_flight_then_loads_exactly_its_version_then_catches_up() -> None:
    plan = agenda()
    plan.take(work(train(1), load=7))
    running = plan.next(7)
    assert isinstance(running, Start)
    assert plan.take(work(evaluation(1, 5), load=5)) is None  # backwards, because an eval order asks for it
    plan.take(work(train(2), load=8))
    assert plan.next(7) is None
    plan.left_engine(running.orders)
    assert plan.next(7) == Load(notice(5))
    evaluating = plan.next(5)
    assert ids(evaluating) == ["e1"]
    assert plan.next(5) is None  # neither version 8 nor t2 while the eval is in the engine
    assert isinstance(evaluating, Start)
    plan.left_engine(evaluating.orders)
    assert plan.next(5) == Load(notice(8))
    assert ids(plan.next(8)) == ["t2"]


def test_an_eval_of_the_version_held_still_waits_for_training_in_flight() -> None:
    plan = agenda()
    plan.take(work(train(1), load=3))
    running = plan.next(3)
    plan.take(work(evaluation(1, 3, n=2), evaluation(2, 3, n=2), evaluation(3, 3)))
    assert plan.next(3) is None
    assert isinstance(running, Start)
    plan.left_engine(running.orders)
    assert ids(plan.next(3)) == ["e1", "e2"]
    assert ids(plan.next(3)) == ["e3"]  # evals run side by side


def test_a_request_has_as_many_rows_whatever_an_orders_samples_are() -> None:
    plan = agenda()  # 4 rows in a request
    plan.take(work(*(evaluation(number, 0) for number in range(6)), evaluation(6, 0, n=9), load=0))
    assert plan.want() == 0  # 15 rows of 12
    assert ids(plan.next(0)) == ["e0", "e1", "e2", "e3"]
    assert ids(plan.next(0)) == ["e4", "e5"]
    big = agenda()
    big.take(work(evaluation(6, 0, n=9), evaluation(7, 0), load=0))
    assert ids(big.next(0)) == ["e6"]  # one order is never cut


def test_an_eval_granted_while_a_newer_version_was_loaded_finds_its_notice() -> None:
    plan = agenda()
    plan.take(work(load=5))
    plan.take(work(load=6))
    plan.take(work(evaluation(1, 5)))  # the reply to a Pull that confirmed 5: no notice
    assert plan.next(6) == Load(notice(5))


def test_an_eval_of_a_version_never_heard_of_is_given_back() -> None:
    plan = agenda()
    plan.take(work(load=5))
    plan.take(work(evaluation(1, 4)))
    assert ids(plan.next(5)) == ["e1"]
    assert plan.want() == 6


def test_an_old_notice_replayed_is_refused_and_nothing_changes() -> None:
    plan = agenda()
    plan.take(work(load=5))
    assert plan.take(work(train(1), load=4)) == "version 4: an old notice, version 5 came before it"
    assert ids(plan.next(5)) == ["t1"]


def test_a_second_notice_of_a_version_with_other_digests_is_refused() -> None:
    plan = agenda()
    plan.take(work(load=5))
    assert plan.take(Work([], notice(5, "other"), False)) == "version 5: a second notice with other digests"
    assert plan.next(None) == Load(notice(5))


def test_after_a_refused_version_training_goes_on_with_the_one_held() -> None:
    plan = agenda()
    plan.take(work(load=0))
    plan.take(work(train(1), load=1))
    plan.refuse(1)
    assert ids(plan.next(0)) == ["t1"]
    assert plan.next(0) is None
    plan.allow(1)
    assert plan.next(0) == Load(notice(1))


def test_without_any_version_nothing_is_started() -> None:
    plan = agenda()
    plan.take(work(train(1), load=0))
    plan.refuse(0)
    assert plan.next(None) is None


def test_evals_of_a_refused_version_go_back_and_no_more_orders_are_asked_for_until_it_is_allowed() -> None:
    plan = agenda()
    plan.take(work(load=0))
    plan.take(work(evaluation(1, 1), evaluation(2, 1), load=1))
    plan.refuse(1)
    returned = plan.next(0)
    assert isinstance(returned, Return)
    assert ids(returned) == ["e1", "e2"]
    assert plan.want() == 0
    plan.settled(returned.orders)
    plan.allow(1)
    assert plan.want() == 6


def test_few_notices_are_remembered() -> None:
    plan = agenda()
    for version in range(100):
        plan.take(work(load=version))
    plan.take(work(evaluation(1, 35)))
    assert ids(plan.next(99)) == ["e1"]  # forgotten: given back
    plan.take(work(evaluation(2, 36)))
    assert plan.next(99) == Load(notice(36))


def test_greedy_baselines_take_room_in_a_request() -> None:
    plan = Agenda("retract", 3, 2, 1)  # three rows an order, six a request
    assert plan.want() == 4
    plan.take(work(*(train(number, baseline=GREEDY) for number in (1, 2, 3)), load=0))
    assert plan.want() == 1
    assert ids(plan.next(0)) == ["t1", "t2"]
