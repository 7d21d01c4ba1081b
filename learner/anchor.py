"""Old log-probs: the trainer's, under the very weights that sampled a token, exact or `missing`.

What has arrived of the live version is scored before the step to the next one (`resident`); what a lease still lacks is scored with stored
weights swapped in (`snapshot`), one swap per version. Each span is stored once by replay.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from learner.batch import Anchor, LeaseRows, SpanKey, read_payloads, to_row
from learner.deepspeed_engine import TrainEngine, digest_state
from learner.model import trainer_fingerprint
from learner.publish import read_version
from learner.scoring import Row, plan_passes, plans_of, run_pass
from learner.session import Session
from wire.errors import RunError
from wire.messages import AnchorHead, PutAnchors, Rows, Unscored
from wire.record import AnchorSource, Payload, RolloutHead, ScoringPlan, VersionNotice

log = logging.getLogger(__name__)
NO_PLAN = ScoringPlan(0, 0, 0)
MOST_ROWS = 4096


class Live(NamedTuple):
    """The live weights are the published `version`: their digests agreed when the engine had made `steps` optimizer steps."""

    version: int
    weights_digest: str
    steps: int


class Found(NamedTuple):
    """A span that wants an anchor, and the row it belongs to."""

    head: RolloutHead
    span: int
    payload: Payload


class Anchors:
    def __init__(self, engine: TrainEngine, session: Session, config: Config, run_dir: Path) -> None:
        self.engine, self.session, self.ranks, self.run_dir = engine, session, session.ranks, run_dir
        self.rows, self.bucket, self.device = config.learner.score_rows, config.learner.length_bucket, config.learner.device
        self.kept_versions, self.refuse = config.replay.max_staleness + 1, config.anchor.on_missing == "refuse"
        self.trainer = trainer_fingerprint(config, engine.policy)
        self.live: Live | None = None
        self.decoded: dict[int, tuple[str, dict[str, Tensor]]] = {}
        """The last few versions on rank 0: weights digest and tensors."""

    # ------------------------------------------------------------ which weights are live
    def published(self, notice: VersionNotice, state: dict[str, Tensor]) -> None:
        """The live weights (`state`, on rank 0) were published. RunError when their digest is not the published one."""
        if self.ranks.is_first:
            if digest_state(state) != notice.weights_digest:
                raise RunError(f"version {notice.version}: the published weights are not the live ones")
            self.decoded[notice.version] = (notice.weights_digest, {name: tensor.clone() for name, tensor in state.items()})
            for version in sorted(self.decoded)[: -self.kept_versions]:
                del self.decoded[version]
        self.live = Live(notice.version, notice.weights_digest, self.engine.steps)

    def resident(self) -> Live:
        """RunError when the live weights have moved on since they were published: `resident` would be a lie."""
        if self.live is None or self.live.steps != self.engine.steps:
            raise RunError("the live weights are no published version: they cannot give old log-probs")
        return self.live

    # ------------------------------------------------------------ what is scored
    def score_arrived(self) -> bool:
        """While nothing else is to do: full passes of what has arrived of the live version. False when there was no full pass."""
        live = self.resident()
        arrived = self._arrived(live.version, 4 * self.rows)
        count = len({found.head.rollout_id for found in arrived}) // self.rows * self.rows
        wanted = set(list(dict.fromkeys(found.head.rollout_id for found in arrived))[:count])
        chosen = [found for found in arrived if found.head.rollout_id in wanted]
        return bool(self._anchor(chosen, "resident", live.version, live.weights_digest))

    def complete(self, lease: LeaseRows) -> None:
        """Give every span of the lease an anchor. Also scores whatever else has arrived of the live version, as the step is near."""
        live = self.resident()
        lacking: dict[int, list[Found]] = {}
        for head, payload in zip(lease.heads, lease.payloads, strict=True):
            for index, span in enumerate(head.spans):
                if (head.rollout_id, index) not in lease.anchors:
                    lacking.setdefault(span.version, []).append(Found(head, index, payload))
        for version in sorted(lacking.keys() - {live.version}):
            lease.anchors |= self._snapshot(version, lacking[version])
        ours = {(found.head.rollout_id, found.span) for found in lacking.get(live.version, [])}
        others = [found for found in self._arrived(live.version, MOST_ROWS) if (found.head.rollout_id, found.span) not in ours]
        lease.anchors |= self._anchor(lacking.get(live.version, []) + others, "resident", live.version, live.weights_digest)
        missing = [head.rollout_id for head in lease.heads for index in range(len(head.spans))
                   if lease.anchors[head.rollout_id, index].source == "missing"]
        if missing and self.refuse:
            raise RunError(f"{len(missing)} spans have no old log-probs, the first in rollout {missing[0]}: anchor.on_missing = 'refuse'")

    def score_live(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probs under the live weights, for `prox`; not stored as anchors."""
        self.resident()
        return self._score(rows)[0]

    def _arrived(self, version: int, limit: int) -> list[Found]:
        """Spans of `version` without an anchor that replay has, leased or not."""
        reply, bulk = self.session.call(Unscored(self.session.epoch, version, limit) if self.ranks.is_first else None)
        assert isinstance(reply, Rows)
        payloads, _ = read_payloads(reply.heads, bulk)
        return [Found(head, index, payload) for head, payload in zip(reply.heads, payloads, strict=True)
                for index, span in enumerate(head.spans) if span.version == version]

    def _snapshot(self, version: int, wanted: list[Found]) -> dict[SpanKey, Anchor]:
        weights_digest, state = self._stored(version) if self.ranks.is_first else ("", {})
        weights_digest = self.ranks.broadcast(weights_digest.encode()).decode()
        if not weights_digest:
            log.warning("version %d is gone: %d spans have no old log-probs", version, len(wanted))
            return self._put([], wanted, [], [], "missing", version, "")
        with self.engine.holding(state):
            return self._anchor(wanted, "snapshot", version, weights_digest)

    def _stored(self, version: int) -> tuple[str, dict[str, Tensor]]:
        """Weights digest and tensors, on rank 0; the digest is empty when the version is gone."""
        if version not in self.decoded:
            stored = read_version(self.run_dir, version)
            if stored is None:
                return "", {}
            self.decoded[version] = stored
        return self.decoded[version]

    # ------------------------------------------------------------ scoring and storing
    def _anchor(self, wanted: list[Found], source: AnchorSource, version: int, weights_digest: str) -> dict[SpanKey, Anchor]:
        """Score these spans of one version under the weights in the module, and store them. Spans with a stale KV cache are `missing`."""
        exact = [found for found in wanted if found.head.spans[found.span].kv_clean]
        stale = [found for found in wanted if not found.head.spans[found.span].kv_clean]
        olds, plans = self._score([to_row(found.head, found.payload) for found in exact])
        return self._put(exact, stale, olds, plans, source, version, weights_digest)

    def _put(self, exact: list[Found], missing: list[Found], olds: list[np.ndarray], plans: list[ScoringPlan], source: AnchorSource,
             version: int, weights_digest: str) -> dict[SpanKey, Anchor]:
        heads, values, anchors = [], [], {}
        for found, old, plan in zip(exact, olds, plans, strict=True):
            span = found.head.spans[found.span]
            part = old[span.start : span.end]
            heads.append(AnchorHead(found.head.rollout_id, found.span, version, source, weights_digest, self.trainer, plan, len(part)))
            values.append(part)
            anchors[found.head.rollout_id, found.span] = Anchor(source, part)
        for found in missing:
            heads.append(AnchorHead(found.head.rollout_id, found.span, version, "missing", "", self.trainer, NO_PLAN, 0))
            anchors[found.head.rollout_id, found.span] = Anchor("missing", np.zeros(0, np.float32))
        if heads:
            bulk = b"".join(part.tobytes() for part in values)
            self.session.call(PutAnchors(self.session.epoch, heads) if self.ranks.is_first else None, bulk)
        return anchors

    def _score(self, rows: Sequence[Row]) -> tuple[list[np.ndarray], list[ScoringPlan]]:
        """All ranks share the passes and all get every result."""
        if not rows:
            return [], []
        passes = plan_passes([len(row.ids) for row in rows], self.rows, self.bucket)
        found: dict[int, np.ndarray] = {}
        for turn in range(-(-len(passes) // self.ranks.world)):  # under ZeRO 3 every rank has to run equally many
            index = turn * self.ranks.world + self.ranks.rank
            scored = run_pass(self.engine.score, passes[min(index, len(passes) - 1)], rows, self.device)
            found |= scored if index < len(passes) else {}
        plans = plans_of(passes)
        return self._gather(found, [len(row.ids) - row.prompt_len for row in rows]), [plans[i] for i in range(len(rows))]

    def _gather(self, found: dict[int, np.ndarray], counts: Iterable[int]) -> list[np.ndarray]:
        parts = [found.get(index, np.zeros(count, np.float32)) for index, count in enumerate(counts)]
        if self.ranks.world == 1:
            return parts
        flat = self.ranks.sum(torch.from_numpy(np.concatenate(parts))).numpy()
        return np.split(flat, np.cumsum([len(part) for part in parts])[:-1])
