"""A small run directory, made by replay's own handlers and real version files, without engine, model or socket."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from configs.schema import Config
from replay import retention
from replay.core import Core
from replay.handlers import arrive, handle
from replay.start import open_core, read_prompts
from replay.summary import write_summary
from wire.digest import digest
from wire.manifest import FILE, Probe, write_version
from wire.messages import (
    PROTOCOL,
    AnchorHead,
    Applied,
    Checkpointed,
    Commit,
    Engine,
    Finished,
    Fork,
    Hello,
    Initial,
    Lease,
    Leased,
    Pull,
    Put,
    PutAnchors,
    Refusal,
    Request,
    Stored,
    UpdateRecord,
    Welcome,
    Work,
)
from wire.record import (
    ANCHOR_SOURCES,
    F32,
    Failed,
    Fingerprint,
    RolloutHead,
    Scored,
    ScoringPlan,
    Span,
    Verdict,
    VersionNotice,
    WorkOrder,
    fingerprint_id,
    pack_payload,
    rollout_id,
)

LENGTH, PROMPT = 6, 3
FINGERPRINT = Fingerprint("twin", "1", "float32", "sdpa", "none", 1, True, "full", "t" * 64, 16)
ENGINE = fingerprint_id(FINGERPRINT)
FACTOR = {"mean": 0.0, "mean_abs": 0.1, "max_abs": 0.5, "k3": 0.01, "ess": 0.9}
METRICS = {
    "loss": 0.5, "grad_norm": 1.0, "mismatch": FACTOR, "staleness_ratio": FACTOR, "update_ratio": FACTOR, "masked": 0.0, "capped": 0.0,
    "clipped": 0.25, "ess_corrected": 0.9}  # fmt: skip
TRAINER = json.dumps({"torch": "twin"})
PROBE = Probe([1, 2, 3], [-1.0, -2.0])


class RunBuilder:
    """Two groups of two samples per update. `update()`: all that one update needs, from orders to commit. Rewards
    alternate 1, 0; the oldest tokens are one version old."""

    def __init__(
        self, run_dir: Path, *, updates: int = 4, on_missing: str = "mask", recipe: dict[str, Any] | None = None, **replay: Any
    ) -> None:
        self.run_dir = run_dir
        for folder in ("weights", "checkpoints"):
            (run_dir / folder).mkdir(parents=True)
        for name, count in (("train", 40), ("heldout", 3)):
            (run_dir / f"{name}.jsonl").write_text(
                "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(count))
            )
        self.config = Config.model_validate(
            {
                "model": {"path": "none"},
                "task": {"train": str(run_dir / "train.jsonl"), "heldout": str(run_dir / "heldout.jsonl")},
                "sampling": {"n": 2, "max_new_tokens": 8},
                "replay": {"max_staleness": 2, "min_scored": 1, **replay},
                "anchor": {"on_missing": on_missing},
                "learner": {"updates": updates, "groups_per_update": 2, "keep_checkpoints": 1},
                "eval": {"samples": 2},
                "recipe": recipe or {},
            }
        )
        (run_dir / "config.json").write_text(json.dumps(self.config.model_dump(mode="json")))
        self.random = np.random.default_rng(0)
        self.core = self._open()
        self.seq = 0
        self.actor = self._hello("actor", "a0")
        self.ask(Engine(self.actor, ENGINE, FINGERPRINT))
        self.learner = self._hello("learner", "learner")
        self.ask(Initial(self.learner, self._publish(0, None)))
        self.apply_version(0)
        self.evaluate()

    # ------------------------------------------------------------ speaking with replay
    def _open(self, changed: dict[str, Any] | None = None) -> Core:
        return open_core(self.config, self.run_dir, read_prompts(self.config), changed=changed)

    def _hello(self, role: str, name: str) -> int:
        reply, _ = self.ask(Hello(role, name, PROTOCOL, self.config.shared()))
        assert isinstance(reply, Welcome)
        return reply.epoch

    def ask(self, request: Request, bulk: bytes = b"") -> tuple[Any, bytes]:
        """The reply and its bulk, after the commit. A refusal fails the test."""
        self.seq += 1
        answer = handle(self.core, arrive(self.core, b"peer", self.seq, request, bulk))
        reply, out = answer if isinstance(answer, tuple) else (answer, b"")
        assert not isinstance(reply, Refusal), reply
        self.core.keep_house_before_commit()
        self.core.store.commit()
        if self.core.sweep_due:
            self.core.sweep_due = False
            retention.sweep(self.core.store.db, self.run_dir)
        return reply, out

    # ------------------------------------------------------------ weights
    def _publish(self, version: int, parent: int | None) -> VersionNotice:
        staged = self.run_dir / "weights" / "staged"
        staged.mkdir()
        self.write_weights(staged, version)
        return write_version(self.run_dir, staged, version, parent, PROBE)

    def write_weights(self, folder: Path, version: int) -> None:
        save_file({"w": np.full((4, 3), version, np.float32), "b": np.arange(4, dtype=np.float32)}, folder / FILE)

    def old_logprobs(self, rollout: str, version: int, start: int, end: int) -> np.ndarray:
        """float32, of response tokens [start, end) under `version`; here any numbers."""
        return -self.random.random(end - start).astype(F32)

    def apply_version(self, version: int) -> None:
        self.ask(Applied(self.actor, version, self.core.versions[version].weights_digest, 1e-6, 1e-5))

    # ------------------------------------------------------------ actor
    def pull(self, want: int) -> list[WorkOrder]:
        reply, _ = self.ask(Pull(self.actor, self.core.committed, want, 0.0, []))
        assert isinstance(reply, Work)
        return reply.orders

    def put(
        self, orders: list[WorkOrder], verdict: Callable[[int], Verdict], *, spoil: str | None = None, version: int | None = None
    ) -> None:
        """Answer every sample. `spoil`: a rollout id whose mu becomes NaN on its way. `version`: of all tokens, instead of two spans."""
        heads, payloads = [], []
        for order in orders:
            for sample in range(order.rows):
                head = self._head(order, sample, verdict(sample), version)
                mu = -self.random.random(LENGTH).astype(np.float32)
                if head.rollout_id == spoil:
                    mu[2] = np.nan
                payloads.append(pack_payload(np.arange(PROMPT), self.random.integers(0, 9, LENGTH), mu))
                heads.append(head)
        reply, _ = self.ask(Put(self.actor, heads, [digest(payload) for payload in payloads], []), b"".join(payloads))
        assert isinstance(reply, Stored)

    def _head(self, order: WorkOrder, sample: int, verdict: Verdict, version: int | None) -> RolloutHead:
        newest = self.core.committed if version is None else version
        older = newest - 1 if newest - 1 in self.core.versions else newest
        one = order.version if order.version is not None else version
        spans = (
            (Span(one, 0, LENGTH),)
            if one is not None
            else (Span(older, 0, 2), Span(newest, 2, LENGTH))
            if older < newest
            else (Span(newest, 0, LENGTH),)
        )
        return RolloutHead(
            rollout_id(order.order_id, order.attempt, sample),
            order.order_id,
            order.attempt,
            sample,
            PROMPT,
            LENGTH,
            spans,
            "stop",
            order.sampling_of(sample),
            ENGINE,
            verdict,
            started=1.0,
            finished=2.0,
            engine_seconds=0.25,
        )

    def evaluate(self) -> None:
        while self.core.evals:
            self.put(self.pull(16), lambda sample: Scored(float(sample == 0)))

    def generate(self, groups: int = 2, verdict: Callable[[int], Verdict] | None = None, **how: Any) -> list[WorkOrder]:
        orders = self.pull(groups)
        self.put(orders, verdict or (lambda sample: Scored(float(sample == 0))), **how)
        return orders

    # ------------------------------------------------------------ learner
    def anchor(self, missing: str | None = None) -> None:
        """Score every span that has no anchor: `resident` for the committed version, else `snapshot`. `missing`: a rollout left out."""
        rows = self.core.store.rows(
            'SELECT rollout_id, span, version, start, "end" FROM spans JOIN rollouts USING (rollout_id) '
            "WHERE source IS NULL AND state IN ('buffered', 'leased') AND reward IS NOT NULL ORDER BY 1, 2"
        )
        heads, parts = [], []
        for i, (rollout, span, version, start, end) in enumerate(rows):
            source = "missing" if rollout == missing else "resident" if version == self.core.committed else "snapshot"
            old = self.old_logprobs(rollout, version, start, end if source != "missing" else start)
            heads.append(
                AnchorHead(
                    rollout, span, version, source, self.core.versions[version].weights_digest, TRAINER, ScoringPlan(4, 64, i % 4), len(old)
                )
            )
            parts.append(old)
        self.ask(PutAnchors(self.learner, heads), b"".join(part.tobytes() for part in parts))

    def update(self, *, skipped: bool = False, missing: str | None = None) -> None:
        while (missing_groups := 2 - len(self.core.book.in_state("complete"))) > 0:
            self.generate(missing_groups)
        self.anchor(missing)
        lease, bulk = self.ask(Lease(self.learner, self.core.committed, 0.0))
        assert isinstance(lease, Leased)
        self.ask(*self._commit(lease, bulk, skipped))
        if not skipped:
            self.apply_version(self.core.committed)
        self.evaluate()

    def _commit(self, lease: Leased, bulk: bytes, skipped: bool) -> tuple[Commit, bytes]:
        version = self.core.committed
        lens = [head.response_len for head in lease.heads]
        old, source = self._old(lease, bulk)
        keep = (source != ANCHOR_SOURCES.index("missing")).astype(np.uint8)
        columns = {} if skipped else {"old": old, "prox": old, "cur": old, "weight": keep.astype(F32), "keep": keep, "old_source": source}
        notice = None if skipped else self._publish(self.core.next_version, version)
        record = UpdateRecord(
            lease.update,
            version,
            version if notice is None else notice.version,
            skipped,
            lease.group_ids,
            [head.rollout_id for head in lease.heads],
            lens,
            [(name, "u1" if data.dtype == np.uint8 else "f4") for name, data in columns.items()],
            [] if skipped else [{"loss": 0.5, "grad_norm": 1.0, "lr": 1e-3}],
            {"seed": 0},
            "version_in",
            self.core.versions[version].weights_digest if notice is None else notice.weights_digest,
            METRICS,
            {"anchor": 0.25, "update": 0.5, "publish": 0.125, "wait": 1.0, "other": 0.125, "total": 2.0},
            [head.verdict.reward for head in lease.baselines if isinstance(head.verdict, Scored)],
        )
        return Commit(self.learner, record, notice), b"".join(data.tobytes() for data in columns.values())

    def _old(self, lease: Leased, bulk: bytes) -> tuple[np.ndarray, np.ndarray]:
        at = len(bulk) - 4 * sum(anchor.count for anchor in lease.anchors)
        values: dict[tuple[str, int], np.ndarray] = {}
        sources: dict[tuple[str, int], int] = {}
        for anchor in lease.anchors:
            values[anchor.rollout_id, anchor.span] = np.frombuffer(bulk, F32, anchor.count, at)
            sources[anchor.rollout_id, anchor.span] = ANCHOR_SOURCES.index(anchor.source)
            at += 4 * anchor.count
        old, source = [], []
        for head in lease.heads:
            for index, span in enumerate(head.spans):
                key, count = (head.rollout_id, index), span.end - span.start
                old.append(values[key] if len(values[key]) else np.full(count, np.nan, F32))
                source.append(np.full(count, sources[key], np.uint8))
        return np.concatenate(old), np.concatenate(source)

    def checkpoint(self) -> None:
        version = self.core.committed
        path = f"checkpoints/v{version:06d}"
        (self.run_dir / path).mkdir()
        body = json.dumps({"version": version, "ledger_head": self.core.store.ledger.head}).encode()
        (self.run_dir / path / "manifest.json").write_bytes(body)
        self.ask(Checkpointed(self.learner, version, path, digest(body)))

    def fork(self, checkpoint: int) -> None:
        self.ask(Fork(self.learner, checkpoint, self._publish(self.core.next_version, checkpoint)))
        self.apply_version(self.core.committed)

    # ------------------------------------------------------------ ends
    def resume(self, **replay: Any) -> None:
        """Stop replay and start it again, with other settings of [replay]."""
        from replay.rundir import changes, save_config

        self.core.store.close()
        before, tree = self.config, self.config.model_dump(mode="json")
        self.config = Config.model_validate({**tree, "replay": {**tree["replay"], **replay}})
        save_config(self.run_dir, self.config)
        self.core = self._open(changes(before, self.config))
        self.actor, self.learner = self._hello("actor", "a0"), self._hello("learner", "learner")
        self.apply_version(self.core.committed)

    def finish(self, status: str = "done") -> Path:
        if status == "done":
            self.ask(Finished(self.learner, {"total": 1.0}))
        self.core.store.close()
        write_summary(self.run_dir, status)
        return self.run_dir


def small_run(run_dir: Path) -> Path:
    """Four updates, one skipped lease, two checkpoints with retention, a quarantined rollout, an unverified and an aborted one."""
    build = RunBuilder(run_dir)
    build.update()
    build.update()
    build.checkpoint()
    build.generate(verdict=lambda sample: Scored(1.0))
    build.update(skipped=True)
    build.generate(1, verdict=lambda sample: Failed("timeout") if sample else Scored(1.0))
    build.generate(1, verdict=lambda sample: Failed("aborted") if sample else Scored(1.0))
    spoiled = build.pull(1)
    build.put(spoiled, lambda sample: Scored(1.0), spoil=f"{spoiled[0].order_id}.{spoiled[0].attempt}.1")
    build.update()
    build.checkpoint()
    build.generate(1, verdict=lambda sample: Failed("timeout"))
    build.update()
    return build.finish()
