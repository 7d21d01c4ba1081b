"""The daemon dies just before or just after a commit, at each commit of a small run in turn; the run goes on all the same."""

import threading
from pathlib import Path

import pytest

from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, stats
from wire.messages import Leased
from wire.process import free_port


class Crash(Exception):
    pass


class Supervisor:
    """Starts the daemon again after a crash, on the same port. `crash_at`: which commit, and on which side of it."""

    def __init__(self, folder: Path, point: str, crash_at: int) -> None:
        self.config = make_config(folder, heldout=1, replay={"endpoint": f"tcp://127.0.0.1:{free_port()}"}, learner={"updates": 2},
                                  eval={"samples": 1, "greedy": False})
        self.point, self.left, self.crashes, self.over = point, crash_at, 0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def crash_point(self, name: str) -> None:
        self.left -= name == self.point
        if self.left == 0 and name == self.point:
            raise Crash

    def run(self) -> None:
        while not self.over:
            with DaemonThread(self.config, crash_point=self.crash_point) as daemon:
                while daemon.thread.is_alive() and not self.over:
                    daemon.thread.join(0.05)
            self.crashes += isinstance(daemon.error, Crash)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_crash_at_any_commit_loses_and_repeats_nothing(tmp_path: Path, point: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    seen = set()
    for crash_at in range(1, 20):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        supervisor = Supervisor(folder, point, crash_at)
        try:
            endpoint, config = supervisor.config.replay.endpoint, supervisor.config
            learner, actor = LightLearner(endpoint, config), LightActor(endpoint, config)
            for _ in range(2):
                leased = None
                while not isinstance(leased, Leased):
                    actor.work()
                    learner.score()
                    leased = learner.lease()
                learner.commit(leased)
            while not actor.done:
                actor.work()
            found = stats(endpoint)
            for client in (learner, actor):
                client.close()
        finally:
            supervisor.over = True
            supervisor.thread.join(20)
        assert found["imbalance"] == 0
        assert (found["rollouts"]["trained"], found["updates"], found["version"], len(found["heldout"])) == (8, 2, 2, 2)
        assert found["rollouts"]["dropped"] == {}
        seen.add(supervisor.crashes)
        if not supervisor.crashes:
            assert crash_at > 8
            return
    assert seen == {1}
