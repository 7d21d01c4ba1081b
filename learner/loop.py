"""The learner's loop: wait (and score what arrives), complete the anchors, update, publish, commit, checkpoint.

Every rank runs it in step; rank 0 speaks to replay. Crash order: weight files, then the commit, then (in replay) the notice to actors.
"""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.schema import Config
from correction.alarms import Watch, look
from learner import checkpoint, export
from learner.anchor import Anchors
from learner.batch import LeaseRows, read_lease
from learner.deepspeed_engine import TrainEngine
from learner.measure import seen_by_alarms, watched
from learner.publish import Publisher
from learner.record import RecordMaker
from learner.rerun import differences, next_past, rerun
from learner.session import Session
from learner.start import Loaded, load_again, load_newest
from learner.stopwatch import Stopwatch
from learner.update import Outcome, run_update
from wire.errors import RefusedError, RunError
from wire.manifest import version_path
from wire.messages import (
    Checkpointed,
    Commit,
    Committed,
    Done,
    Finished,
    Fork,
    Initial,
    Lease,
    Leased,
    Reply,
    Request,
    Stats,
    StatsReply,
    Welcome,
)
from wire.record import VersionNotice

log = logging.getLogger(__name__)
LONGEST_WAIT_S = 0.5
"""Between two looks at what has arrived, and at whether to stop."""


class Learner:
    """Asked to stop by a signal, it goes on to the next commit; rank 0's signal counts."""

    def __init__(self, config: Config, engine: TrainEngine, session: Session, publisher: Publisher, anchors: Anchors, stopwatch: Stopwatch,
                 welcome: Welcome) -> None:
        self.config, self.engine, self.session, self.ranks = config, engine, session, session.ranks
        self.publisher, self.anchors, self.seconds = publisher, anchors, stopwatch
        self.record = RecordMaker(config, engine)
        self.run_dir, self.committed = Path(welcome.run_dir), welcome.committed
        self.version, self.weights_digest = -1, ""
        self.update: int | None = None
        self.checkpointed: int | None = None
        self.skips_in_a_row = 0
        self.all_committed = False
        self.watch, self.alarmed = Watch(), set[str]()

    def run(self) -> bool:
        """True when all updates are committed and the model is exported; False when a signal ended it. A checkpoint is there either way."""
        self.start()
        while not self.all_committed and not self.interrupted():
            lease = self.wait_for_lease()
            if lease is None:
                continue
            with self.seconds("anchor"):
                self.anchors.complete(lease)
            if self.interrupted():
                break
            with self.seconds("update"):
                outcome = run_update(self.engine, self.ranks, self.config, lease, self.anchors.score_live)
            with self.seconds("publish"):
                notice = None if outcome.skipped else self.publish(self.version + 1, self.version)
            self.commit(lease, outcome, notice)
            if self.version % self.config.learner.checkpoint_every == 0:
                self.save()
        self.save()
        if self.all_committed:
            export.export(self.publisher, self.run_dir)
            self.session.farewell(Finished(self.session.epoch, self.seconds.take()))
        return self.all_committed

    # ------------------------------------------------------------ steps
    def start(self) -> None:
        """Version 0, or the newest checkpoint and the updates committed after it, run again."""
        if self.committed is None:
            self.call(Initial(self.session.epoch, self.publish(0, None)))
        else:
            loaded = load_newest(self.engine, self.session, self.run_dir, self.committed)
            self.watch, self.alarmed = watched(self.run_dir / "metrics.jsonl")
            self.hold(loaded.notice, self.engine.full_state())
            self.checkpointed = loaded.notice.version if loaded.checkpoint else None
            if not self.catch_up(self.committed):
                self.fork(loaded, self.committed)
        self.save()

    def catch_up(self, committed: VersionNotice) -> bool:
        """Run again what was committed after the checkpoint, each weights digest checked. False when that is not possible here. Asked to
        stop, it leaves off where it is: that version is committed, too."""
        while not self.interrupted():
            try:
                past = next_past(self.session, self.version, self.update)
            except RefusedError as error:
                log.warning("cannot catch up: %s", error)
                return False
            if past is None:
                break
            record, again = past.record, rerun(self.engine, self.config, past, self.anchors.score_live)
            if odd := differences(past, again):
                log.warning("update %d was run again and came out otherwise: %s", record.update, "; ".join(odd))
            if again.weights_digest != record.weights_digest_out:
                return False
            self.hold(VersionNotice(record.version_out, version_path(record.version_out), "", again.weights_digest), again.weights)
            self.note_update(record.update, skipped=record.skipped)
            log.info("update %d was run again: version %d, as committed", record.update, self.version)
        else:
            return True
        if self.weights_digest != committed.weights_digest:
            return False
        self.hold(committed, self.engine.full_state())  # after a fork, the same weights have a new number
        return True

    def fork(self, loaded: Loaded, committed: VersionNotice) -> None:
        """Go on from the checkpoint under a new number; updates committed after it are given up, and counted lost."""
        load_again(self.engine, self.run_dir, loaded)
        before = loaded.notice.version
        self.call(Fork(self.session.epoch, before, self.publish(committed.version + 1, before)))
        self.update, self.skips_in_a_row = None, 0

    def wait_for_lease(self) -> LeaseRows | None:
        """The next lease; None when there is none yet, or all is done. First score what has arrived, if it fills a pass."""
        with self.seconds("anchor"):
            busy = self.anchors.score_arrived()
        with self.seconds("wait"):
            reply, bulk = self.call(Lease(self.session.epoch, self.version, 0.0 if busy else LONGEST_WAIT_S))
        if isinstance(reply, Done):
            self.all_committed = True
        if not isinstance(reply, Leased):
            return None
        return read_lease(reply, bulk, self.version, self.config.replay.max_staleness)

    def publish(self, version: int, parent: int | None) -> VersionNotice:
        """Write the live weights as `version`, on rank 0; every rank gets the notice. A version exists once it is committed."""
        notice, state = self.publisher.publish(version, parent, self.session.epoch)
        notice = self.ranks.share(notice, VersionNotice)
        self.hold(notice, state)
        return notice

    def hold(self, notice: VersionNotice, state: dict[str, Tensor]) -> None:
        """The live weights are this version."""
        self.anchors.published(notice, state)
        self.version, self.weights_digest = notice.version, notice.weights_digest

    def commit(self, lease: LeaseRows, outcome: Outcome, notice: VersionNotice | None) -> None:
        """Update record, columns and new version, in one transaction of replay's. TryAgainError when its state moved on."""
        metrics = dict(outcome.metrics)
        if not outcome.skipped:
            self.raise_alarms(metrics)
        if notice is not None:
            metrics["publish_bytes"] = self.publisher.bytes
        record = self.record.make(lease, outcome, self.version, self.weights_digest, metrics, self.seconds.take())
        reply, _ = self.call(Commit(self.session.epoch, record, notice), b"".join(data for _, _, data in outcome.columns))
        assert isinstance(reply, Committed)
        self.all_committed = reply.done
        self.note_update(lease.update, skipped=outcome.skipped)
        log.info("update %d: version %d, %s", lease.update, self.version,
                 "nothing to learn" if outcome.skipped else f"reward {metrics['reward']:.3f}, loss {metrics['loss']:.4f}")
        if self.skips_in_a_row >= self.config.learner.max_consecutive_skips:
            raise RunError(f"{self.skips_in_a_row} updates in a row had nothing to learn from: every group's rewards were equal, or every "
                           "token was masked; look at the rewards of this run")

    def note_update(self, update: int, *, skipped: bool) -> None:
        self.update, self.skips_in_a_row = update, self.skips_in_a_row + 1 if skipped else 0

    def raise_alarms(self, metrics: dict[str, Any]) -> None:
        """Adds `alarms` to an update's metrics; logs each when it begins."""
        self.watch, alarms = look(self.watch, seen_by_alarms(metrics))
        if self.ranks.is_first:
            for name in alarms.keys() - self.alarmed:
                log.warning("alarm %s: %s", name, alarms[name])
        self.alarmed, metrics["alarms"] = set(alarms), alarms

    def save(self) -> None:
        """A checkpoint at the last commit, unless there is one."""
        if self.checkpointed == self.version:
            return
        stats, _ = self.call(Stats())
        assert isinstance(stats, StatsReply)
        one = checkpoint.save(self.engine, self.run_dir, self.version, update=self.update, weights_digest=self.weights_digest,
                              ledger_head=stats.values["ledger_head"], seed=self.config.run.seed)
        self.call(one and Checkpointed(self.session.epoch, self.version, one.path, one.manifest_digest))
        self.checkpointed = self.version

    # ------------------------------------------------------------
    def interrupted(self) -> bool:
        return self.ranks.decide(self.session.stop.asked)

    def call(self, request: Request | None, bulk: bytes = b"") -> tuple[Reply, bytes]:
        return self.session.call(request, bulk)
