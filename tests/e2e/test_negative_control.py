"""A synchronous run with shuffled rewards: nothing is learned where there is nothing to learn, and at budget 0 every token is fresh."""

from collections.abc import Callable

import pytest

from tests.support.whole_run import WholeRun, books_balance

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(900)]

UPDATES = 40


@pytest.fixture(scope="module")
def run(make_run: Callable[..., WholeRun]) -> WholeRun:
    # At the demo's learning rate the noise alone destroys the policy: every reward becomes 0 and the run ends, nothing left to learn from.
    run = make_run("shuffled", f"learner.updates={UPDATES}", "task.shuffle_rewards=true", "replay.max_staleness=0", "learner.lr=1e-4")
    run.start()
    code, out = run.finish()
    assert code == 0, out
    return run


def test_held_out_accuracy_does_not_rise(run: WholeRun) -> None:
    heldout = run.summary()["heldout"]
    assert heldout["last"]["sampled"] < heldout["first"]["sampled"] + 0.03


def test_steps_were_made_all_the_same(run: WholeRun) -> None:
    lines = run.metrics()
    assert sum(not line["skipped"] for line in lines) == UPDATES
    assert all(line["grad_norm"] > 0 for line in lines if not line["skipped"])


def test_every_token_was_trained_at_staleness_0(run: WholeRun) -> None:
    summary = run.summary()
    assert (summary["max_staleness_trained"], summary["mean_staleness_trained"]) == (0, 0)
    assert set(summary["old_sources"]) == {"resident"}
    assert books_balance(summary["rollouts"])
    assert {tuple(line["staleness"]["histogram"]) for line in run.metrics()} == {("0",)}
