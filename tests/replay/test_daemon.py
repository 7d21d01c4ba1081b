"""A real daemon over real ZeroMQ, with light clients."""

from pathlib import Path

from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config, stats
from wire.messages import Done, Leased


def test_a_whole_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with DaemonThread(config) as daemon:
        learner, actors = LightLearner(daemon.endpoint, config), [LightActor(daemon.endpoint, config, name) for name in ("a0", "a1")]
        for _ in range(4):
            for actor in actors:
                actor.work()
                actor.work()
            learner.score()
            leased = learner.lease(wait_s=5.0)
            assert isinstance(leased, Leased)
            assert len(leased.group_ids) == 2
            assert len(leased.heads) == len(leased.anchors) == 4
            learner.commit(leased)
        assert isinstance(learner.lease(), Done)
        found = stats(daemon.endpoint)
        assert found["imbalance"] == 0
        assert found["rollouts"]["trained"] == 16
        learner.finish()
        for actor in actors:
            assert actor.pull().done
        daemon.thread.join(10)
        assert daemon.error is None
        for client in (learner, *actors):
            client.close()
