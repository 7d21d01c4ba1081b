"""One run: stopped by Ctrl-C, killed with -9, its engine killed; each time it goes on, and ends with balanced books and a clean audit."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.support.whole_run import WholeRun, books_balance

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(1200)]


def test_stop_kill_and_resume(make_run: Callable[..., WholeRun]) -> None:
    run = make_run("stopped", "learner.updates=40", "learner.checkpoint_every=10", "eval.prompts=16")

    run.start()
    run.wait_for_update(5)
    run.signal(signal.SIGINT)
    code, out = run.finish(180)
    assert code == 130, out
    assert run.processes() == []
    first = run.summary()
    assert first["status"] == "interrupted"
    assert books_balance(first["rollouts"])
    assert first["rollouts"]["lost"] == 0

    run.start()
    code, out = run.finish(60)
    assert code == 2
    assert "--resume" in out

    run.start("--resume")
    run.wait_for_update(first["updates"] + 8)
    assert run.processes("sglang::sched")
    run.signal(signal.SIGKILL)
    run.finish()
    time.sleep(10)
    assert run.processes() == [], "kill -9 of `leeway run` left processes"

    run.start("--resume")
    committed = len(run.metrics())
    run.wait_for_update(committed + 3)
    run.processes("sglang::sched")[0].kill()
    code, out = run.finish()
    assert code == 0, out
    assert run.processes() == []
    summary = run.summary()
    assert (summary["status"], summary["updates"], summary["trained_twice"]) == ("done", 40, 0)
    assert books_balance(summary["rollouts"])
    assert summary["rollouts"]["lost"] == 0
    assert [line["version_out"] for line in run.metrics() if not line["skipped"]] == list(range(1, 41))
    assert "was run again" in (run.dir / "logs" / "learner.jsonl").read_text()
    assert summary["max_staleness_trained"] <= 2
    audit = run.tool("audit")
    assert audit.returncode == 0, audit.stdout
    again = run.tool("audit", "--update", "36")
    assert again.returncode == 0, again.stdout
    assert "updates 31 to 36 from the checkpoint of version 30" in again.stdout
    assert "agree bit for bit" in again.stdout
