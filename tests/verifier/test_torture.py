"""Reward functions that hang, crash, lie and litter: only the guilty fail, and no process is left (checked by the fixture)."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.verifier.helpers import item, processes_with
from verifier import VerifierPool
from verifier.call import MAX_DETAIL, as_verdict
from wire.record import Failed, Scored

pytestmark = pytest.mark.usefixtures("wait_for_none")
ROOT = Path(__file__).parents[2]


async def judged(*completions: str, spec: str = "hostile:act", deadline_s: float = 30.0, slots: int = 1) -> list[object]:
    """A reward as a float, a failure as its reason."""
    pool = VerifierPool(spec, deadline_s=deadline_s, slots=slots)
    await pool.start()
    try:
        verdicts = await pool.verify([item(completion) for completion in completions])
    finally:
        await pool.close()
    return [verdict.reward if isinstance(verdict, Scored) else verdict.reason for verdict in verdicts]


@pytest.mark.asyncio
async def test_a_hang_is_a_timeout_and_the_innocent_are_scored() -> None:
    assert await judged("1", "loop", "2", "hold", deadline_s=2.0, slots=2) == [1.0, "timeout", 2.0, "timeout"]


@pytest.mark.parametrize(
    ("guilty", "reason"),
    [
        ("exit 0", "crash: exit 0"),
        ("exit 3", "crash: exit 3"),
        ("sys.exit", "exception: SystemExit"),
        ("kill", "crash: signal 9"),
        ("segfault", "crash: signal 11"),
        ("allocate", "exception: MemoryError"),
        ("forks, exits", "crash: exit 4"),
        ("close", "crash: closed its socket"),
        ("big file", "exception: OSError"),
        ("raise", "exception: ValueError"),
        ("input", "exception: EOFError"),
        ("nan", "bad_reward: nan"),
        ("inf", "bad_reward: -inf"),
        ("none", "no_verdict"),
        ("text", "bad_reward: str"),
        ("huge", "bad_reward: int"),
    ],
)
@pytest.mark.asyncio
async def test_only_the_guilty_fails(guilty: str, reason: str) -> None:
    assert await judged("1", guilty, "2") == [1.0, reason, 2.0]


@pytest.mark.asyncio
async def test_what_is_not_a_failure() -> None:
    assert await judged("1", "print", "forks", "fork twice", "true", "-2") == [1.0, 5.0, 5.0, 5.0, 1.0, -2.0]


@pytest.mark.asyncio
async def test_a_wrong_return_value_fails_every_item() -> None:
    assert await judged("1", "2", spec="hostile:too_many") == ["wrong_length", "wrong_length"]
    assert await judged("1", "2", spec="hostile:a_number") == ["not_a_list", "not_a_list"]


@pytest.mark.asyncio
async def test_a_failure_says_what_and_where_on_one_line() -> None:
    pool = VerifierPool("hostile:act", deadline_s=30)
    await pool.start()
    [failed] = await pool.verify([item("raise")])
    await pool.close()
    assert isinstance(failed, Failed)
    assert failed.detail.startswith("not a number (line ")
    assert failed.detail.endswith("hostile.py, in raise_value_error)")
    assert failed.verifier.startswith("hostile:act@")


@pytest.mark.asyncio
async def test_the_pool_goes_on_after_every_kind_of_death() -> None:
    pool = VerifierPool("hostile:act", deadline_s=1.0)
    await pool.start()
    for guilty in ("loop", "kill", "forks, exits", "raise"):
        [failed] = await pool.verify([item(guilty)])
        assert isinstance(failed, Failed)
        [scored] = await pool.verify([item("3")])
        assert isinstance(scored, Scored)
    await pool.close()


@pytest.mark.asyncio
async def test_a_fork_of_the_worker_never_answers() -> None:
    pool = VerifierPool("hostile:act", deadline_s=30)
    await pool.start()
    answers = [await pool.verify([item("fork twice"), item(str(number))]) for number in range(5)]
    await pool.close()
    assert [[verdict.reward for verdict in answer] for answer in answers] == [[5.0, float(n)] for n in range(5)]


@pytest.mark.asyncio
async def test_a_cancelled_call_leaves_no_reply_behind() -> None:
    pool = VerifierPool("hostile:act", deadline_s=60)
    await pool.start()
    call = asyncio.create_task(pool.verify([item("loop")]))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [verdict.reward for verdict in await pool.verify([item("3"), item("4")])] == [3.0, 4.0]
    await pool.close()


@pytest.mark.asyncio
async def test_closing_ends_calls_in_flight_and_those_that_wait() -> None:
    pool = VerifierPool("hostile:act", deadline_s=60)
    await pool.start()
    calls = [asyncio.create_task(pool.verify([item("loop")])) for _ in range(3)]
    await asyncio.sleep(0.2)
    await pool.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the verifier pool is closed"] * 3


def test_killing_the_parent_ends_its_workers_and_their_children(tmp_path: Path) -> None:
    """One worker holds its interpreter in C code, the other is idle with eight children asleep."""
    script = textwrap.dedent("""
        import asyncio
        from verifier import VerifierPool, VerifyItem

        async def main():
            pool = VerifierPool("hostile:act", deadline_s=600, slots=2)
            await pool.start()
            await asyncio.gather(*(pool.verify([VerifyItem("", c, [], {})]) for c in ("hold", "forks in group")))

        asyncio.run(main())
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
    while len(processes_with(f"TMPDIR={tmp_path}")) < 1 + 2 + 8:
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()


def test_what_a_verdict_says_is_bounded() -> None:
    """A group's verdicts go in one message."""
    long = "x" * 10_000_000
    for given in (Scored(math.nan, long), Scored(1.0, long), Failed("no", long), Failed(long)):
        verdict = as_verdict(given)
        assert len(verdict.detail) <= MAX_DETAIL and len(getattr(verdict, "reason", "")) <= MAX_DETAIL
