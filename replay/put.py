"""Put: rollouts in, each of them judged before anything is written. What is acknowledged is on disk, once."""

import logging
from collections import Counter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from replay.baselines import BASELINES, baseline_order
from replay.books import PRODUCED
from replay.core import Core, encode
from replay.sampler import QUARANTINED, Outcome, Transition
from replay.sessions import Session
from replay.validate import Item, cut, faults
from wire.digest import digest as digest_of
from wire.errors import RunError
from wire.messages import Put, Refusal, Reply, SampleFailure, Stored
from wire.record import ABORTED, ABORTED_WITHOUT_TOKEN, Failed, RolloutHead, Scored, group_id
from wire.text import printable

log = logging.getLogger(__name__)
_json = msgspec.json.Encoder().encode
INSERT_ROLLOUT = "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_SPAN = 'INSERT INTO spans (rollout_id, span, version, start, "end", kv_clean) VALUES (?, ?, ?, ?, ?, ?)'
WATCH_FROM = 100
"""Verdicts before their failures are judged."""
WARN_RATE = 0.05
REASON_KEPT = 300
"""Characters of a failure's reason that are shown."""

NAME_KEPT = 100
"""Characters of the name that poison gives itself."""
MOST_EVIDENCE = 64 << 20
"""Bytes of heads and payloads that are kept of a run's poison: of what comes then, only who sent it, and why it is poison."""
EVIDENCE = "quarantine_bytes"

Standing = Literal["open", "baseline", "eval", "duplicate"]
ACCEPTED = ("open", "baseline", "eval")


class Tally(NamedTuple):
    quarantined: list[tuple[str, str]]
    refused: list[tuple[str, str]]
    transitions: list[Transition]


def put(core: Core, session: Session, request: Put, bulk: bytes) -> Reply:
    if len(request.digests) != len(request.heads):
        return Refusal("protocol", f"Put: {len(request.heads)} rollouts with {len(request.digests)} digests")
    store = core.begin()
    tally = Tally([], [], [])
    payloads = cut(request.heads, bulk)
    train: list[Item] = []
    baselines: list[Item] = []
    evals: list[Item] = []
    duplicates = 0
    seen: set[tuple[str, int]] = set()
    for index, head in enumerate(request.heads):
        of = group_id(head)
        standing = _standing(core, session, of, head.sample, head.rollout_id)
        if (of, head.sample) in seen and standing in ACCEPTED:
            standing = "duplicate"
        if standing == "duplicate":
            duplicates += 1
        elif standing not in ACCEPTED:
            tally.refused.append((head.rollout_id, standing))
        elif payloads is None:
            misfit = f"wrong lengths: {len(bulk)} payload bytes do not fit the heads"
            _quarantine(core, session, head, bulk if index == 0 else b"", misfit, tally)
            seen.add((of, head.sample))
        else:
            seen.add((of, head.sample))
            order = core.eval_group(of)[1].order if standing == "eval" else core.orders[of]  # type: ignore[index]
            if standing == "baseline":
                order = baseline_order(order)
            kind = {"open": train, "baseline": baselines, "eval": evals}[standing]
            kind.append(Item(head, payloads[index], request.digests[index], order))
    stored = (_store_train(core, session, train, tally) + _store_baselines(core, session, baselines, tally)
              + _store_evals(core, session, evals, tally))
    duplicates += sum(_fail(core, session, failure, tally) for failure in request.failures)
    store.count("duplicates_refused", duplicates)
    store.count("refused_closed", len(tally.refused))
    store.count("quarantined", len(tally.quarantined))
    core.apply("groups", tally.transitions)
    core.close_evaluations()
    _watch(core, session, request.heads, dict(tally.quarantined))
    return Stored(stored, duplicates, tally.quarantined, tally.refused)


def _standing(core: Core, session: Session, of: str, sample: int, rollout: str) -> str:
    """open | baseline | eval | duplicate, else why the rollout is refused."""
    group = core.book.groups.get(of)
    if group is not None:
        if sample in group.outcomes:
            return "duplicate"
        if group.state != "granted":
            return "this attempt is closed"
        if group.actor != session.name:
            return f"its order is held by {group.actor}"
        if group.baseline and sample == group.n:
            return "baseline"
        return "open" if 0 <= sample < group.n else f"sample {sample} of {group.n}"
    if found := core.eval_group(of):
        current, eval_group = found
        if sample in eval_group.outcomes:
            return "duplicate"
        if not eval_group.held or current.actor != session.name:
            return "its order is held by another actor"
        return "eval" if 0 <= sample < eval_group.order.n else f"sample {sample} of {eval_group.order.n}"
    known = core.store.one("SELECT 1 FROM rollouts WHERE rollout_id = ? UNION ALL SELECT 1 FROM eval_rollouts WHERE rollout_id = ? "
                           "UNION ALL SELECT 1 FROM failures WHERE group_id = ? AND sample = ?", rollout, rollout, of, sample)
    return "duplicate" if known else "this attempt is closed"


def _store_train(core: Core, session: Session, items: list[Item], tally: Tally) -> int:
    sound = _sound(core, session, items, tally)
    if not sound:
        return 0
    store, wall = core.store, core.clock.wall()
    rollouts, spans, heads, aborted = [], [], {}, 0
    for head, payload, told, order in sound:
        outcome = _outcome(head)
        state, reason = ("dropped", ABORTED) if outcome == "aborted" else ("buffered", None)
        reward, failure = (head.verdict.reward, None) if isinstance(head.verdict, Scored) else (None, head.verdict.reason)
        oldest, newest = head.spans[0].version, head.spans[-1].version
        of, text = group_id(order), _json(head)
        heads[head.rollout_id] = digest_of(text)
        rollouts.append((head.rollout_id, of, head.sample, state, reason, session.name, head.response_len, oldest, newest,
                         reward, failure, text.decode(), heads[head.rollout_id], payload, told, wall))
        spans += [(head.rollout_id, i, s.version, s.start, s.end, s.kv_clean) for i, s in enumerate(head.spans)]
        aborted += outcome == "aborted"
        _settle(core, tally, of, head.sample, outcome, oldest, reward)
        if outcome != "aborted":
            core.verdicts.append(_why(head) if outcome == "failed" else None)
    store.db.executemany(INSERT_ROLLOUT, rollouts)
    store.db.executemany(INSERT_SPAN, spans)
    store.wrote(sum(len(item.payload) for item in sound))
    store.count(PRODUCED, len(sound))
    store.record("put", {"actor": session.name, "produced": int(store.counters[PRODUCED]),
                         "rollouts": {item.head.rollout_id: item.digest for item in sound},
                         "heads": heads, "aborted": aborted})
    _count_tokens(core, [item.head for item in sound])
    return len(sound)


def _store_baselines(core: Core, session: Session, items: list[Item], tally: Tally) -> int:
    """Greedy responses of training groups: beside the books, without span rows, so that nothing ever anchors or trains them."""
    sound = _sound(core, session, items, tally)
    if not sound:
        return 0
    rows = []
    for item in sound:
        head, oldest = item.head, item.head.spans[0].version
        rows.append(_outside_the_books(item, BASELINES, oldest))
        _settle(core, tally, group_id(item.order), head.sample, _outcome(head), oldest, rows[-1][6])
        if _outcome(head) != "aborted":
            core.verdicts.append(_why(head) if _outcome(head) == "failed" else None)
    _insert_outside(core, rows)
    core.store.record("baseline_put", {"actor": session.name, **_digests_outside(rows)})
    core.store.count("greedy_rollouts", len(rows))
    return len(rows)


def _store_evals(core: Core, session: Session, items: list[Item], tally: Tally) -> int:
    rows = []
    for item in _sound(core, session, items, tally):
        of = group_id(item.order)
        found = core.eval_group(of)
        assert found is not None
        rows.append(_outside_the_books(item, found[0].eval_id, item.order.version))
        _eval_outcome(core, of, item.head.sample, rows[-1][6])
    if rows:
        _insert_outside(core, rows)
        core.store.record("eval_put", {"actor": session.name, "eval": rows[0][1], **_digests_outside(rows)})
        core.store.count("eval_rollouts", len(rows))
    return len(rows)


def _sound(core: Core, session: Session, items: list[Item], tally: Tally) -> list[Item]:
    """What is left when the poison is in quarantine."""
    bad = faults(items, core.versions, core.vocabularies)
    for index, fault in bad.items():
        _quarantine(core, session, items[index].head, bytes(items[index].payload), fault, tally)
    return [item for index, item in enumerate(items) if index not in bad]


def _outside_the_books(item: Item, eval_id: int, version: int | None) -> tuple[Any, ...]:
    head, order = item.head, item.order
    reward, failure = (head.verdict.reward, None) if isinstance(head.verdict, Scored) else (None, head.verdict.reason)
    text = _json(head)
    return (head.rollout_id, eval_id, group_id(order), order.purpose, version, head.response_len, reward, failure, text.decode(),
            digest_of(text), item.payload, item.digest)


def _insert_outside(core: Core, rows: list[tuple[Any, ...]]) -> None:
    core.store.db.executemany("INSERT INTO eval_rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    core.store.wrote(sum(len(row[10]) for row in rows))


def _digests_outside(rows: list[tuple[Any, ...]]) -> dict[str, dict[str, str]]:
    """For the ledger: payload and head digests by rollout."""
    return {"rollouts": {row[0]: row[11] for row in rows}, "heads": {row[0]: row[9] for row in rows}}


def _fail(core: Core, session: Session, failure: SampleFailure, tally: Tally) -> bool:
    """A sample without a token. True when it already had an outcome."""
    of = group_id(failure)
    standing = _standing(core, session, of, failure.sample, f"{of}.{failure.sample}")
    if standing not in ACCEPTED:
        if standing != "duplicate":
            tally.refused.append((f"{of}.{failure.sample}", standing))
        return standing == "duplicate"
    aborted = failure.reason == ABORTED_WITHOUT_TOKEN
    core.store.count("aborted_without_token" if aborted else "failed_without_token")
    core.store.record("put", {"actor": session.name, "failures": [[of, failure.sample, failure.reason]]})
    _no_rollout(core, tally, of, failure.sample, failure.reason, "aborted" if aborted else "failed")
    return False


def _quarantine(core: Core, session: Session, head: RolloutHead, payload: bytes, reason: str, tally: Tally) -> None:
    """Keep the evidence, while there is room; the sample has its outcome, and nothing of it is trained on."""
    name, said, told = head.rollout_id[:NAME_KEPT], encode(head), reason[:REASON_KEPT]
    size = len(said) + len(payload)
    fits = core.store.counters.get(EVIDENCE, 0) + size <= MOST_EVIDENCE
    core.store.db.execute("INSERT INTO quarantine (rollout_id, actor, reason, head, payload, stored_at) VALUES (?, ?, ?, ?, ?, ?)",
                          (name, session.name, told, said if fits else "{}", payload if fits else None, core.clock.wall()))
    core.store.count(EVIDENCE, size if fits else 0)
    core.store.count("quarantined_without_evidence", 0 if fits else 1)
    core.store.wrote(size if fits else 0)
    core.store.record("put", {"actor": session.name, "quarantined": [[name, told, group_id(head), head.sample]]})
    tally.quarantined.append((head.rollout_id, reason))
    _no_rollout(core, tally, group_id(head), head.sample, QUARANTINED, "quarantined")


def _no_rollout(core: Core, tally: Tally, of: str, sample: int, reason: str, outcome: Outcome) -> None:
    core.store.db.execute("INSERT INTO failures VALUES (?, ?, ?)", (of, sample, reason))
    if of in core.book.groups:
        _settle(core, tally, of, sample, outcome, None)
    else:
        _eval_outcome(core, of, sample, None)


def _settle(core: Core, tally: Tally, of: str, sample: int, outcome: Outcome, oldest: int | None, reward: float | None = None) -> None:
    if transition := core.book.outcome(of, sample, outcome, oldest, reward):
        tally.transitions.append(transition)


def _eval_outcome(core: Core, of: str, sample: int, reward: float | None) -> None:
    found = core.eval_group(of)
    if found is not None and found[0].outcome(of, sample, reward):
        core.store.db.execute("UPDATE groups SET state = 'evaluated' WHERE group_id = ?", (of,))


def _outcome(head: RolloutHead) -> Outcome:
    if isinstance(head.verdict, Scored):
        return "scored"
    return "aborted" if head.verdict.reason == ABORTED else "failed"


def _why(head: RolloutHead) -> str:
    """Reason and detail as one short line that a terminal can show."""
    assert isinstance(head.verdict, Failed)
    return printable(" ".join(f"{head.verdict.reason}; {head.verdict.detail}".strip("; ").split())[:REASON_KEPT])


def _commonest(reasons: Counter[str]) -> str:
    ((reason, count),) = reasons.most_common(1)
    return f"the commonest reason ({count}): {reason}"


def _count_tokens(core: Core, heads: list[RolloutHead]) -> None:
    tokens = np.array([head.response_len for head in heads])
    started, finished = (np.array([getattr(head, end) for head in heads]) for end in ("started", "finished"))
    share = core.update_times.share(started, finished, core.clock.wall())
    core.store.count("tokens_generated", int(tokens.sum()))
    core.store.count("tokens_generated_during_updates", float((tokens * share).sum()))


def _watch(core: Core, session: Session, heads: list[RolloutHead], quarantined: dict[str, str]) -> None:
    """Poison in a row stops the actor; too many failed verdicts stop the run, and so do too many groups in a row without contrast."""
    most = core.config.learner.max_consecutive_skips * core.config.learner.groups_per_update
    if core.no_contrast_in_a_row > most:
        raise RunError(f"{core.no_contrast_in_a_row} groups in a row had equal rewards, and recipe.dynamic_sampling drops such groups: "
                       "these prompts are too easy or too hard for this model, or the verifier says the same of everything")
    for head in heads:
        session.poisoned_in_a_row = session.poisoned_in_a_row + 1 if head.rollout_id in quarantined else 0
    if quarantined:
        last = list(quarantined.values())[-1]
        log.warning("actor %s: %d rollouts quarantined, the last because %s", session.name, len(quarantined), last)
        if session.poisoned_in_a_row >= core.config.actor.max_quarantined:
            session.stopped = f"{session.poisoned_in_a_row} rollouts in a row were quarantined, the last because {last}"
    reasons = Counter(reason for reason in core.verdicts if reason is not None)
    failed = reasons.total()
    if len(core.verdicts) < WATCH_FROM or failed <= WARN_RATE * len(core.verdicts):
        core.verdicts_warned = False
        return
    limit = core.config.replay.max_failure_rate
    if failed > limit * len(core.verdicts):
        raise RunError(f"{failed} of the last {len(core.verdicts)} verdicts failed, more than replay.max_failure_rate = {limit}: "
                       f"look at task.verifier and its data; {_commonest(reasons)}")
    if not core.verdicts_warned:
        log.warning("%d of the last %d verdicts failed; %s", failed, len(core.verdicts), _commonest(reasons))
        core.verdicts_warned = True
