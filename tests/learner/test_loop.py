"""The whole learner against a real replay daemon: what it leaves in the store, and how it stops, goes on, skips and gives up."""


from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.schema import Config
from correction.alarms import Watch
from learner.checkpoint import complete_versions
from learner.loop import Learner
from learner.rescore import Wanted, rescore
from learner.scoring import Row
from replay.audit import audit
from replay.reader import RunReader
from tests.support.learning import LearningDaemon, RandomActor, acting, make_run_config, random_answer
from wire.errors import RunError, TryAgainError
from wire.messages import UpdateRecord
from wire.record import RolloutHead, ScoringPlan, Span, WorkOrder, unpack_payload

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_run_config(tmp_path)


def two_spans(actor: RandomActor, order: WorkOrder, sample: int) -> tuple[RolloutHead, bytes]:
    """From version 1 on, the first token of every other response is of the version before; of one in four it had a stale KV cache."""
    head, payload = random_answer(actor, order, sample)
    if actor.confirmed < 1 or sample:
        return head, payload
    stale = int(order.order_id.encode()[-1]) % 2 == 0
    spans = (Span(actor.confirmed - 1, 0, 1), Span(actor.confirmed, 1, head.response_len, not stale))
    return msgspec.structs.replace(head, spans=spans), payload


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Config, Path]:
    """A run of 6 updates with responses across versions."""
    config = make_run_config(folder, learner={"updates": 6, "checkpoint_every": 2, "keep_checkpoints": 9}, replay={"max_staleness": 2})
    with LearningDaemon(config) as daemon:
        with acting(daemon.endpoint, config, two_spans):
            assert daemon.learner().run()
        run_dir = daemon.run_dir
    return config, run_dir


def records(run_dir: Path) -> list[UpdateRecord]:
    with RunReader(run_dir) as run:
        return [msgspec.json.decode(text, type=UpdateRecord) for text, in run.sql("SELECT record FROM updates ORDER BY update_id")]


def column(run_dir: Path, update: int, name: str) -> np.ndarray:
    with RunReader(run_dir) as run:
        (dtype, data), = run.sql("SELECT dtype, data FROM update_columns WHERE update_id = ? AND name = ?", update, name)
    return np.frombuffer(data, {"f4": "<f4", "u1": "u1"}[dtype])


def test_versions_follow_each_other_and_the_model_is_exported(finished: tuple[Config, Path]) -> None:
    _, run_dir = finished
    found = records(run_dir)
    assert [(r.update, r.version_in, r.version_out, r.skipped) for r in found] == [(u, u - 1, u, False) for u in range(1, 7)]
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(run_dir / "weights/v000006", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), last.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run_dir / "model").encode("12+34=") == [3, 4, 12, 5, 6, 13]
    assert complete_versions(run_dir, 9) == [6, 4, 2, 0]


def test_the_audit_finds_nothing(finished: tuple[Config, Path]) -> None:
    assert audit(finished[1]).findings == []


def test_seconds_add_up_to_the_total(finished: tuple[Config, Path]) -> None:
    for record in records(finished[1]):
        parts = dict(record.seconds)
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
        assert parts.keys() == {"anchor", "update", "publish", "wait", "other"}
        assert min(parts.values()) >= 0


def test_resident_and_snapshot_anchors_both_occur_and_come_again_bit_for_bit(finished: tuple[Config, Path]) -> None:
    """Against models loaded from the stored versions, in passes that hold only the rows asked for."""
    _, run_dir = finished
    with RunReader(run_dir) as run:
        spans = run.sql('SELECT s.rollout_id, s.version, s.start, s."end", s.source, s.trainer, s.rows, s.width, s.row, s.old, r.head, '
                        "r.payload FROM spans s JOIN rollouts r USING (rollout_id) WHERE s.source IS NOT NULL ORDER BY s.rollout_id")
    exact = [span for span in spans if span[4] != "missing"]
    wanted = []
    for span in exact:
        head = msgspec.json.decode(span[10], type=RolloutHead)
        payload = unpack_payload(head, span[11])
        ids = np.concatenate([payload.prompt_ids, payload.response_ids])
        wanted.append(Wanted(span[1], Row(ids, head.prompt_len, head.sampling.temperature), ScoringPlan(*span[6:9])))
    found = rescore(run_dir, wanted)
    assert {span[4] for span in spans} == {"resident", "snapshot", "missing"}
    assert {span[5] for span in exact} == {found.trainer}
    for span, values in zip(exact, found.logprobs, strict=True):
        assert values is not None
        assert values[span[2] : span[3]].tobytes() == span[9]


def test_spans_with_a_stale_cache_are_missing_and_masked(finished: tuple[Config, Path]) -> None:
    _, run_dir = finished
    with RunReader(run_dir) as run:
        assert {source for source, in run.sql("SELECT source FROM spans WHERE NOT kv_clean AND source IS NOT NULL")} == {"missing"}
        assert run.one("SELECT count(*) FROM spans WHERE kv_clean AND source = 'missing'") == 0
    missing = sum(int(np.isnan(column(run_dir, update, "old")).sum()) for update in range(1, 7))
    assert missing == sum(record.metrics["tokens_missing"] for record in records(run_dir)) > 0


def test_a_signal_stops_at_the_last_commit_and_the_next_learner_goes_on_from_there(config: Config) -> None:
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        learner = daemon.learner()
        learner.interrupted = lambda: learner.version >= 2  # type: ignore[method-assign]
        assert not learner.run()
        assert complete_versions(daemon.run_dir, 9)[0] == learner.version == 2
        again = daemon.learner()
        assert again.run()
        assert [(r.update, r.version_out) for r in records(daemon.run_dir)] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_learner_that_goes_on_watches_the_trends_from_the_first_update(config: Config) -> None:
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config):
        learner = daemon.learner()
        learner.interrupted = lambda: learner.version >= 2  # type: ignore[method-assign]
        assert not learner.run()
        again = daemon.learner()
        assert again.run()
        found = records(daemon.run_dir)
        assert len(found) == 4 and all(isinstance(record.metrics["alarms"], dict) for record in found)
        assert again.watch.mismatch.first == pytest.approx([record.metrics["mismatch"]["mean_abs"] for record in found])
        assert again.alarmed == set(found[-1].metrics["alarms"])


def test_an_alarm_is_in_every_record_while_it_lasts_and_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    learner: Any = SimpleNamespace(watch=Watch(), alarmed=set(), ranks=SimpleNamespace(is_first=True))
    said = []
    for ess in (0.9, 0.2, 0.2, 0.9, 0.2):
        metrics: dict[str, Any] = {"lags": {}, "ess_corrected": ess, "total_ratio": {"ess": 0.9}, "weight_mean": 1.0, "masked": 0.0,
                                   "mismatch": {"mean_abs": 0.1}, "engines": {"a": 0.1}, "clamped": 0}
        Learner.raise_alarms(learner, metrics)
        said.append(list(metrics["alarms"]))
    assert said == [[], ["ess"], ["ess"], [], ["ess"]]
    assert [line.partition(":")[0] for line in caplog.messages] == ["alarm ess", "alarm ess"]
    assert learner.watch.mismatch.first == (0.1,) * 5


def test_another_model_than_the_committed_one_is_refused(config: Config, tmp_path: Path) -> None:
    with LearningDaemon(config) as daemon:
        daemon.learner().start()
        for folder in (daemon.run_dir / "checkpoints").iterdir():
            (folder / "manifest.json").unlink()
        daemon.learner().start()  # the initial model is what is committed: that will do
        for folder in (daemon.run_dir / "checkpoints").iterdir():
            (folder / "manifest.json").unlink()
        learner = daemon.learner()
        with torch.no_grad():
            next(iter(learner.engine.parameters.values())).add_(1)
        with pytest.raises(RunError, match="was model.path changed"):
            learner.start()


def no_contrast(actor: RandomActor, order: WorkOrder, sample: int) -> tuple[RolloutHead, bytes]:
    head, payload = random_answer(actor, order, 0)
    return msgspec.structs.replace(head, sample=sample, rollout_id=f"{order.order_id}.{order.attempt}.{sample}"), payload


def test_leases_without_signal_are_skipped_and_too_many_end_the_run(tmp_path: Path) -> None:
    config = make_run_config(tmp_path, learner={"max_consecutive_skips": 3})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config, no_contrast):
        learner = daemon.learner()
        with pytest.raises(RunError, match="3 updates in a row had nothing to learn from"):
            learner.run()
        assert [(r.skipped, r.version_out, r.columns) for r in records(daemon.run_dir)] == [(True, 0, [])] * 3
        with RunReader(daemon.run_dir) as run:
            assert run.sql("SELECT DISTINCT state, reason FROM groups WHERE update_id IS NOT NULL") == [("dropped", "no_signal")]


def test_missing_anchors_end_the_run_where_the_config_says_so(tmp_path: Path) -> None:
    config = make_run_config(tmp_path, anchor={"on_missing": "refuse"}, replay={"max_staleness": 2}, learner={"updates": 6})
    with LearningDaemon(config) as daemon, acting(daemon.endpoint, config, two_spans):
        with pytest.raises(RunError, match="have no old log-probs"):
            daemon.learner().run()


def test_a_replaced_learner_is_refused_and_says_try_again(config: Config) -> None:
    with LearningDaemon(config) as daemon:
        first = daemon.learner()
        first.start()
        daemon.learner()
        with pytest.raises(TryAgainError):
            first.run()


def test_weights_that_moved_cannot_give_resident_anchors(config: Config) -> None:
    with LearningDaemon(config) as daemon:
        learner = daemon.learner()
        learner.start()
        learner.engine.steps += 1
        with pytest.raises(RunError, match="the live weights are no published version"):
            learner.anchors.resident()


def test_published_and_live_weights_must_have_one_digest(config: Config) -> None:
    with LearningDaemon(config) as daemon:
        learner = daemon.learner()
        learner.start()
        notice, state = learner.publisher.publish(1, 0, 1)
        assert notice is not None
        with pytest.raises(RunError, match="are not the live ones"):
            learner.anchors.published(notice, {name: tensor + 1 for name, tensor in state.items()})


