"""Two hosts and the link between them: encrypted, and cut for a while. Who was cut off rejoins, and nothing acknowledged is lost."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.client import BlockingClient
from tests.support.keys import KeyRing
from tests.support.namespaces import NOT_HERE, TwoHosts
from tests.support.replay import DaemonThread, LightActor, LightLearner, make_config
from tests.support.torture import scaled, tell
from wire.messages import Leased, Stats


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        made = TwoHosts().__enter__()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(NOT_HERE)
    yield made
    made.__exit__()


class Work(threading.Thread):
    """An actor on the other host: answers orders until told to stop, and remembers what was acknowledged."""

    def __init__(self, actor: LightActor) -> None:
        super().__init__(daemon=True)
        self.actor, self.acknowledged, self.over = actor, 0, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.actor.pull(want=1, wait_s=0.2)
                if self.actor.holding:
                    found = self.actor.answer()
                    self.acknowledged += found.stored + found.duplicates
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error


def wait_for(condition: "threading.Event | object", what: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.timeout(400)
def test_a_link_that_is_down_for_a_while(tmp_path: Path, hosts: TwoHosts) -> None:
    cuts_s = sorted({5, scaled(5, 60)})
    ring = KeyRing(tmp_path / "keys", "host-b")
    config = make_config(tmp_path, prompts=4000, learner={"updates": 100_000}, replay={"endpoint": "tcp://10.231.0.1:5757"},
                         security={"keys": str(ring.folder)})
    with hosts.inside("a"):
        daemon = DaemonThread(config)
        client = BlockingClient(daemon.endpoint, ring.client("learner"))
    with daemon:
        learner = LightLearner(client, config)
        with hosts.inside("b"):
            far = BlockingClient(daemon.endpoint, ring.client("host-b"))
        worker = Work(LightActor(far, config, "a"))
        worker.start()

        def train_until(acknowledged: int) -> None:
            def step() -> bool:
                assert worker.error is None, worker.error
                if isinstance(leased := learner.lease(wait_s=0.1), Leased):
                    learner.commit(leased)
                return worker.acknowledged >= acknowledged

            wait_for(step, f"{worker.acknowledged} of {acknowledged} rollouts are acknowledged")

        train_until(20)
        for down_s in cuts_s:
            before = worker.acknowledged
            hosts.link("down")
            time.sleep(down_s)
            cut_off = worker.acknowledged
            assert cut_off <= before + 20
            hosts.link("up")
            train_until(cut_off + 20)
        worker.over.set()
        worker.join(60)
        assert worker.error is None
        values = client.call(Stats())[0].values  # type: ignore[union-attr]
        assert values["imbalance"] == 0
        assert values["rollouts"]["produced"] >= worker.acknowledged
        stored = daemon.core.store.one("SELECT count(*) FROM rollouts")
        assert stored == values["rollouts"]["produced"]
        tell(cuts=len(cuts_s), s_in_all=sum(cuts_s), acknowledged=worker.acknowledged, stored=stored, imbalance=values["imbalance"])
        far.close()
        client.close()
