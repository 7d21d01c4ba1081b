"""Memory from the tables: what a restarted replay knows is what was committed."""

import json
from collections import Counter

from replay.baselines import baseline_id
from replay.books import FREED, PRODUCED
from replay.budget import too_old
from replay.core import Core
from replay.evals import EvalGroup, EvalRound
from replay.orders import stored_order
from replay.sampler import QUARANTINED, Group, Outcome
from replay.sessions import Sessions
from wire.record import ABORTED, ABORTED_WITHOUT_TOKEN, VersionNotice

REWARDS = ("SELECT reward FROM rollouts WHERE group_id = ? AND reward IS NOT NULL "
           "UNION SELECT reward FROM eval_rollouts WHERE rollout_id = ? AND reward IS NOT NULL")


def rebuild(core: Core) -> None:
    """Fill a fresh Core from its store. Granted orders stay with their actors; their leases begin anew."""
    _versions(core)
    _updates(core)
    _sessions(core)
    _prompts(core)
    _groups(core)
    _evals(core)
    core.vocabularies = {name: json.loads(body).get("vocabulary", 0) for name, body in core.store.rows("SELECT id, body FROM fingerprints")}
    core.finished = core.store.meta("finished") == "1" and core.over
    core.store.count(PRODUCED, 0 if PRODUCED in core.store.counters else core.store.one("SELECT count(*) FROM rollouts"))
    core.store.count(FREED, 0 if FREED in core.store.counters else core.store.one("SELECT count(*) FROM rollouts WHERE payload IS NULL"))
    unlease_if_too_old(core)


def _versions(core: Core) -> None:
    rows = core.store.rows("SELECT version, path, manifest_digest, weights_digest, state FROM versions ORDER BY version")
    core.versions = {version: VersionNotice(version, *rest) for version, *rest, state in rows if state == "live"}
    core.committed = max(core.versions, default=-1)
    core.next_version = max((row[0] for row in rows), default=-1) + 1


def _updates(core: Core) -> None:
    rows = core.store.rows("SELECT update_id, skipped, state FROM updates")
    core.next_update = max((update for update, _, _ in rows), default=0) + 1
    counts = Counter(bool(skipped) for _, skipped, state in rows if state == "committed")
    core.stepped, core.skipped = counts[False], counts[True]
    core.read_last_metrics()


def _sessions(core: Core) -> None:
    store = core.store
    core.sessions = Sessions(json.loads(store.meta("sessions") or "[]"), int(store.meta("next_epoch") or 1))
    for name, epoch, confirmed, mean, largest in store.rows("SELECT name, epoch, confirmed, probe_mean, probe_max FROM actors"):
        session = core.sessions.get(epoch)
        if session is not None and session.name == name:
            session.confirmed = confirmed
            session.applied = {confirmed} - {-1}
            session.probe = None if mean is None else (mean, largest)
            session.last_seen = core.now


def _prompts(core: Core) -> None:
    core.cursor = int(core.store.meta("cursor") or 0)
    queued = core.store.rows("SELECT group_id, work_order, work_order_digest FROM groups WHERE state = 'queued' AND purpose = 'train' "
                             "ORDER BY rowid")
    core.queue.extend(stored_order(*row) for row in queued)


def _groups(core: Core) -> None:
    outcomes = _outcomes(core)
    for group_id, order_id, attempt, n, state, actor, seq, text, told in core.store.rows(
            "SELECT group_id, order_id, attempt, n, state, actor, grant_seq, work_order, work_order_digest FROM groups "
            "WHERE state IN ('granted', 'complete', 'leased') AND purpose = 'train'"):
        found = outcomes.get(group_id, [])
        oldest = min((version for _, outcome, version in found if outcome == "scored"), default=None)
        by_sample = {sample: outcome for sample, outcome, _ in found}
        rewards = {reward for reward, in core.store.rows(REWARDS, group_id, baseline_id(group_id, n))}
        order = core.orders[group_id] = stored_order(group_id, text, told)
        core.book.restore(Group(group_id, order_id, attempt, n, actor, seq, core.now, state, by_sample, oldest, rewards, order.excused,
                                order.baseline is not None, order.outlived))
    core.book.next_seq = core.store.one("SELECT coalesce(max(grant_seq), -1) FROM groups") + 1


def _outcomes(core: Core) -> dict[str, list[tuple[int, Outcome, int]]]:
    """(sample, outcome, oldest version) of every sample that has one, by live group."""
    live = "SELECT group_id FROM groups WHERE state IN ('granted', 'complete', 'leased') AND purpose = 'train'"
    found: dict[str, list[tuple[int, Outcome, int]]] = {}
    for group_id, sample, state, reason, reward, oldest in core.store.rows(
            f"SELECT group_id, sample, state, reason, reward, oldest_version FROM rollouts WHERE group_id IN ({live}) UNION ALL "
            "SELECT g.group_id, g.n, 'dropped', e.failure, e.reward, e.version FROM groups g JOIN eval_rollouts e "
            f"ON e.rollout_id = g.group_id || '.' || g.n WHERE g.group_id IN ({live})"):
        outcome: Outcome = "aborted" if (state, reason) == ("dropped", ABORTED) else "failed" if reward is None else "scored"
        found.setdefault(group_id, []).append((sample, outcome, oldest))
    for group_id, sample, reason in core.store.rows(f"SELECT group_id, sample, reason FROM failures WHERE group_id IN ({live})"):
        found.setdefault(group_id, []).append((sample, _outcome_of(reason), 0))
    return found


def _outcome_of(reason: str) -> Outcome:
    """Of a sample in `failures`."""
    if reason == QUARANTINED:
        return "quarantined"
    return "aborted" if reason == ABORTED_WITHOUT_TOKEN else "failed"


def _evals(core: Core) -> None:
    store = core.store
    core.next_eval = (store.one("SELECT max(eval_id) FROM evals") or 0) + 1
    core.evaluated = evaluated(core)
    for eval_id, version, updates in store.rows("SELECT eval_id, version, updates FROM evals WHERE state = 'pending' ORDER BY eval_id"):
        groups = {row[0]: EvalGroup(stored_order(*row)) for row in store.rows(
            "SELECT group_id, work_order, work_order_digest FROM groups WHERE eval_id = ? ORDER BY rowid", eval_id)}
        for group_id, rollout, reward in store.rows("SELECT group_id, rollout_id, reward FROM eval_rollouts WHERE eval_id = ?", eval_id):
            groups[group_id].outcomes[int(rollout.rpartition(".")[2])] = reward
        for group_id, sample in store.rows("SELECT group_id, sample FROM failures JOIN groups USING (group_id) WHERE eval_id = ?", eval_id):
            groups[group_id].outcomes[sample] = None
        core.evals.append(EvalRound(eval_id, version, updates, groups))
        _give_back_to_holder(core.evals[-1], dict(store.rows(
            "SELECT group_id, actor FROM groups WHERE eval_id = ? AND state = 'granted'", eval_id)), core.now)


def evaluated(core: Core) -> list[int]:
    """The update counts that need no further evaluation: theirs is planned or done, and no fork has undone the version it is of."""
    return [updates for updates, in core.store.rows("SELECT e.updates FROM evals e JOIN versions v USING (version) "
                                                    "WHERE e.state != 'lost' AND v.state = 'live' ORDER BY eval_id")]


def _give_back_to_holder(current: EvalRound, held: dict[str, str], now: float) -> None:
    for group_id, actor in held.items():
        if group_id in current.queue:
            current.queue.remove(group_id)
            current.groups[group_id].held, current.groups[group_id].touched = True, now
            current.actor = actor


def unlease_if_too_old(core: Core) -> None:
    """A budget lowered on resume may make a lease untrainable: its groups are complete again, and the next lease looks at them anew."""
    oldest = [group.oldest_version for group in core.book.in_state("leased") if group.oldest_version is not None]
    if oldest and too_old(core.committed, min(oldest), core.book.max_staleness):
        core.apply("groups", core.book.unlease(), why="lease_no_longer_trainable")
