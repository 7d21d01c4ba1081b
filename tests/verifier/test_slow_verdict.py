"""The bench's verifier: seeded, long-tailed, and as exact as `exact`."""

import statistics

import pytest

from scripts.bench import slow_verdict


def test_delays_are_seeded_and_long_tailed() -> None:
    delays = [slow_verdict.delay_s(f"{number}+1=", seed=0) for number in range(5000)]
    assert (min(delays), max(delays)) == (0.2, 3.0)
    assert statistics.median(delays) == pytest.approx(0.5, abs=0.03)
    assert statistics.mean(delays) == pytest.approx(0.73, abs=0.03)
    assert slow_verdict.delay_s("1+1=", seed=0) == slow_verdict.delay_s("1+1=", seed=0) != slow_verdict.delay_s("1+1=", seed=1)


def test_one_delay_for_each_prompt_then_exact_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(slow_verdict.time, "sleep", slept.append)
    scores = slow_verdict.delayed_exact(["1+1="] * 3, ["2", "3", " 2"], answer=["2"] * 3, completion_ids=[[2], [3], [2]])
    assert scores == [1.0, 0.0, 1.0]
    assert slept == [slow_verdict.delay_s("1+1=", 0)]
