"""A learner that stands still, four actors at full speed; and a disk that is full: nothing is dropped, nothing acknowledged is lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from replay.reader import RunReader
from tests.support.chaos import Chaos
from tests.support.crash_main import FILE_SIZE
from tests.support.replay import LightLearner, make_config, stats
from tests.support.torture import scaled, tell
from wire.process import free_port

ACTORS = ("a0", "a1", "a2", "a3")
SECONDS = scaled(20, 600)
STOPPED_S = scaled(2, 30)


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(SECONDS + 100)
def test_a_stopped_learner_holds_four_fast_actors_back(tmp_path: Path) -> None:
    config = make_config(tmp_path, prompts=5000, sampling={"n": 4}, learner={"groups_per_update": 100, "updates": 1000},
                         replay={"endpoint": f"tcp://127.0.0.1:{free_port()}", "max_staleness": 4, "max_rollouts": 2000},
                         logging={"watchdog_s": 5.0})
    chaos = Chaos(config, tmp_path, roles=("replay", *ACTORS))
    try:
        chaos.open()
        learner = LightLearner(config.replay.endpoint, config)  # makes version 0, and stops
        began = time.monotonic()
        while stats(config.replay.endpoint)["rollouts"]["buffered"] < 2000:
            time.sleep(0.1)
            assert time.monotonic() - began < 60
        pid = chaos.children["replay"].pid
        assert pid is not None
        full, largest = memory(pid), 0
        for _ in range(SECONDS):
            time.sleep(1)
            largest = max(largest, memory(pid))
        found = stats(config.replay.endpoint)
        assert (found["rollouts"]["buffered"], found["rollouts"]["dropped"], found["imbalance"]) == (2000, {}, 0)
        assert found["awaited"].startswith("the learner to lease update 1 (500 of 100 groups are complete, actors are held back at")
        assert [(actor["groups"], actor["seen_s_ago"] < 3) for actor in found["actors"]] == [(0, True)] * 4  # they wait, and are alive
        assert largest < 1.1 * full
        assert not chaos.odd
        tell(s_without_a_learner=SECONDS, rollouts_buffered=found["rollouts"]["buffered"],
             dropped=sum(found["rollouts"]["dropped"].values()), actors_waiting=sum(actor["groups"] == 0 for actor in found["actors"]),
             percent_of_its_memory_when_full=round(100 * largest / full))
        learner.close()
    finally:
        chaos.end()


def test_a_full_disk_loses_nothing_and_is_recovered_from(tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=1, prompts=50, eval={"samples": 1}, learner={"updates": 1_000_000},
                         replay={"endpoint": f"tcp://127.0.0.1:{free_port()}"})
    chaos = Chaos(config, tmp_path, {"replay": [(FILE_SIZE, 600_000), (FILE_SIZE, 900_000)]})
    try:
        chaos.open()
        began = time.monotonic()
        while len(chaos.odd) < 2:
            time.sleep(0.02)
            chaos.look()
            assert time.monotonic() - began < 60
        failed = len(chaos.odd)
        assert chaos.odd == [("replay", 1)] * 2  # it ended at the first write that failed
        chaos.odd.clear()
        chaos.settle(3)
        chaos.end()
        accounts = chaos.accounts()
        assert accounts["acknowledged"] > 20
        tell(writes_that_failed=failed, acknowledged=accounts["acknowledged"], lost=accounts["lost"])
        with RunReader(chaos.run_dir) as run:
            assert run.one("SELECT count(*) FROM ledger WHERE kind = 'opened'") == 2
    finally:
        chaos.end()


@pytest.mark.timeout(300)
def test_a_replay_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=1, prompts=50, eval={"samples": 1}, learner={"updates": 1_000_000},
                         replay={"endpoint": f"tcp://127.0.0.1:{free_port()}"})
    chaos = Chaos(config, tmp_path)
    try:
        chaos.open()
        chaos.settle(2)
        pid = chaos.children["replay"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        chaos.look()
        os.kill(pid, signal.SIGCONT)
        chaos.settle(3)
        chaos.end()
        accounts = chaos.accounts()
        assert accounts["kills"] == 0
        tell(s_of_a_stopped_replay=STOPPED_S, acknowledged=accounts["acknowledged"], lost=accounts["lost"])
    finally:
        chaos.end()
