"""A lease as the learner sees it: arrays as they came, then tensors; and which row goes to which rank and micro-batch.

Suffixes: `_RT` response x token, `_R` response, `_N` response tokens of all rows end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.scoring import Row, round_up
from wire.errors import RunError
from wire.messages import AnchorHead, Leased
from wire.record import ANCHOR_SOURCES, F32, AnchorSource, Payload, RolloutHead, Scored, group_id, payload_size, unpack_payload

SpanKey = tuple[str, int]
"""(rollout id, index of the span)"""


class Anchor(NamedTuple):
    """Stored old log-probs of one span, float32; empty when the source is `missing`."""

    source: AnchorSource
    values: np.ndarray


@dataclass
class LeaseRows:
    """Whole groups in grant order, rows in group order. `anchors` is filled up by `learner/anchor.py` before the lease becomes a table."""

    update: int
    version_in: int
    group_ids: list[str]
    heads: list[RolloutHead]
    payloads: list[Payload]
    anchors: dict[SpanKey, Anchor] = field(default_factory=dict)
    baselines: list[RolloutHead] = field(default_factory=list)
    """The head of each group's greedy response, in the order of `group_ids`; empty where the recipe has none. Never a row."""

    def row(self, index: int) -> Row:
        return to_row(self.heads[index], self.payloads[index])

    @property
    def lengths(self) -> list[int]:
        """Prompt and response, in tokens."""
        return [head.prompt_len + head.response_len for head in self.heads]

    @property
    def group_of(self) -> list[int]:
        """Index into `group_ids` of each row."""
        index = {group_id: i for i, group_id in enumerate(self.group_ids)}
        return [index[group_id(head)] for head in self.heads]

    @property
    def greedy_rewards(self) -> list[float]:
        return [head.verdict.reward for head in self.baselines if isinstance(head.verdict, Scored)]


def to_row(head: RolloutHead, payload: Payload) -> Row:
    return Row(np.concatenate([payload.prompt_ids, payload.response_ids]), head.prompt_len, head.sampling.temperature)


def read_payloads(heads: Sequence[RolloutHead], bulk: bytes) -> tuple[list[Payload], int]:
    """Payloads that lie end to end in `bulk`, and where they end. Raises ProtocolError."""
    view, start, payloads = memoryview(bulk), 0, []
    for head in heads:
        end = start + payload_size(head)
        payloads.append(unpack_payload(head, view[start:end]))
        start = end
    return payloads, start


def read_lease(reply: Leased, bulk: bytes, version_in: int, max_staleness: int) -> LeaseRows:
    """Raises RunError for a token outside the staleness budget, a greedy response among the rows, or a group that lacks its own: replay
    must not lease such a thing, and if it does, it is not trained on."""
    for head in (*reply.heads, *reply.baselines):
        oldest, newest = head.spans[0].version, head.spans[-1].version
        if not version_in - max_staleness <= oldest <= newest <= version_in:
            raise RunError(f"rollout {head.rollout_id} holds tokens of versions {oldest} to {newest}: an update from version {version_in} "
                           f"must not train on it with max_staleness = {max_staleness}")
        if not isinstance(head.verdict, Scored):
            raise RunError(f"rollout {head.rollout_id} was leased without a reward")
    return lease_rows(reply.update, version_in, reply.group_ids, reply.heads, reply.anchors, bulk, reply.baselines)


def lease_rows(update: int, version_in: int, group_ids: list[str], heads: list[RolloutHead], anchor_heads: Sequence[AnchorHead],
               bulk: bytes, baselines: Sequence[RolloutHead] = ()) -> LeaseRows:
    """`bulk`: the payloads of `heads`, then the float32 log-probs of `anchor_heads`. Raises ProtocolError; RunError as `read_lease`."""
    check_baselines(group_ids, heads, baselines)
    payloads, start = read_payloads(heads, bulk)
    anchors = {}
    for anchor in anchor_heads:
        anchors[anchor.rollout_id, anchor.span] = Anchor(anchor.source, np.frombuffer(bulk, F32, anchor.count, start))
        start += 4 * anchor.count
    return LeaseRows(update, version_in, group_ids, heads, payloads, anchors, list(baselines))


def check_baselines(group_ids: Sequence[str], heads: Sequence[RolloutHead], baselines: Sequence[RolloutHead]) -> None:
    """Greedy responses are no rows: their `mu` is of another distribution than they were sampled from. RunError."""
    for head in heads:
        if head.sampling.temperature <= 0:
            raise RunError(f"rollout {head.rollout_id} is a greedy response: its log-probs are not those it was sampled with")
    if baselines and [group_id(head) for head in baselines] != list(group_ids):
        raise RunError(f"{len(baselines)} greedy responses do not belong to the {len(group_ids)} groups of the lease")


@dataclass(frozen=True)
class Table:
    """Tensors of one lease, on the CPU. `response_RT`: where a response has a token; `mask_RT`: where that token has an anchor, too, so
    that it can be trained. `old_RT` is NaN where there is a token without one; `source_RT` indexes ANCHOR_SOURCES; `engines`: the
    fingerprint id of each row's engine."""

    prompt_lens_R: Tensor
    response_lens_R: Tensor
    response_RT: Tensor
    mask_RT: Tensor
    mu_RT: Tensor
    old_RT: Tensor
    source_RT: Tensor
    version_RT: Tensor
    group_R: Tensor
    reward_R: Tensor
    temperature_R: Tensor
    engines: tuple[str, ...]


def tabulate(lease: LeaseRows) -> Table:
    """KeyError when a span has no anchor: not even a `missing` one."""
    heads = lease.heads
    spans = [(head.rollout_id, index, span) for head in heads for index, span in enumerate(head.spans)]
    anchors = [lease.anchors[rollout_id, index] for rollout_id, index, _ in spans]
    counts = [span.end - span.start for _, _, span in spans]
    response_lens = torch.tensor([head.response_len for head in heads])
    response_RT = torch.arange(int(response_lens.max())) < response_lens[:, None]
    old_N = np.concatenate([np.full(count, np.nan, F32) if anchor.source == "missing" else anchor.values
                            for anchor, count in zip(anchors, counts, strict=True)])
    source_N = np.repeat(np.array([ANCHOR_SOURCES.index(anchor.source) for anchor in anchors], np.uint8), counts)
    version_N = np.repeat(np.array([span.version for _, _, span in spans], np.int64), counts)
    mu_N = np.concatenate([payload.mu for payload in lease.payloads])
    source_RT = to_table(torch.from_numpy(source_N), response_RT)
    return Table(
        prompt_lens_R=torch.tensor([head.prompt_len for head in heads]), response_lens_R=response_lens, response_RT=response_RT,
        mask_RT=response_RT & (source_RT != ANCHOR_SOURCES.index("missing")), mu_RT=to_table(torch.from_numpy(mu_N), response_RT),
        old_RT=to_table(torch.from_numpy(old_N), response_RT), source_RT=source_RT,
        version_RT=to_table(torch.from_numpy(version_N), response_RT), group_R=torch.tensor(lease.group_of),
        reward_R=torch.tensor([head.verdict.reward for head in heads if isinstance(head.verdict, Scored)]),
        temperature_R=torch.tensor([head.sampling.temperature for head in heads]), engines=tuple(head.fingerprint for head in heads))


def to_table(flat_N: Tensor, response_RT: Tensor) -> Tensor:
    """[R, T] from all rows' tokens end to end; 0 where there is no token. Keeps the gradient."""
    return torch.zeros(response_RT.shape, dtype=flat_N.dtype, device=flat_N.device).masked_scatter(response_RT, flat_N)


def padded_ids(lease: LeaseRows, rows: Sequence[int], width: int) -> Tensor:
    """Token ids [rows, width], right-padded with 0."""
    ids = np.zeros((len(rows), width), np.int64)
    for place, index in enumerate(rows):
        payload = lease.payloads[index]
        middle = len(payload.prompt_ids)
        ids[place, :middle] = payload.prompt_ids
        ids[place, middle : middle + len(payload.response_ids)] = payload.response_ids
    return torch.from_numpy(ids)


class MicroBatch(NamedTuple):
    """Row indices into the lease, and the width they are padded to. No rows: a rank that has fewer micro-batches than another."""

    rows: tuple[int, ...]
    width: int


def plan_steps(lengths: Sequence[int], group_of: Sequence[int], *, groups: int, steps: int, ranks: int, micro_batch_rows: int,
               bucket: int) -> list[list[list[MicroBatch]]]:
    """`plan[step][rank]`: the micro-batches. Steps take whole groups in grant order; ranks take whole groups, equally many, balanced by
    tokens; micro-batches may split a group. Every rank has equally many micro-batches. RunError when groups cannot be shared equally."""
    if groups % (steps * ranks):
        raise RunError(f"a lease of {groups} groups cannot be shared by {steps} steps and {ranks} ranks")
    members: list[list[int]] = [[] for _ in range(groups)]
    for row, group in enumerate(group_of):
        members[group].append(row)
    tokens = [sum(lengths[row] for row in rows) for rows in members]
    per_step = groups // steps
    plan = []
    for step in range(steps):
        shares = share(tokens, range(step * per_step, (step + 1) * per_step), ranks)
        batches = [micro_batches(lengths, [row for group in mine for row in members[group]], micro_batch_rows, bucket) for mine in shares]
        most = max(map(len, batches))
        plan.append([mine + [MicroBatch((), bucket)] * (most - len(mine)) for mine in batches])
    return plan


def share(tokens: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Equally many groups for each rank, the largest first to the rank with the fewest tokens so far. Each share in grant order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for group in sorted(groups, key=lambda g: (-tokens[g], g)):
        rank = min((r for r in range(ranks) if len(shares[r]) < len(groups) // ranks), key=lambda r: (load[r], r))
        shares[rank].append(group)
        load[rank] += tokens[group]
    return [sorted(mine) for mine in shares]


def micro_batches(lengths: Sequence[int], rows: Sequence[int], size: int, bucket: int) -> list[MicroBatch]:
    """Longest rows first, so that little is padded."""
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    return [MicroBatch(tuple(order[i : i + size]), round_up(lengths[order[i]], bucket)) for i in range(0, len(order), size)]
