"""Audit of the rest of the tables against what the ledger told: who was granted and put what, outcomes, actors, checkpoints, evaluations,
counters, the prompt frontier; and of work orders and fingerprints against their digests."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from replay.audit_ledger import Story
from replay.audit_rollouts import Finding
from replay.audit_told import COUNTED, Evaluation
from replay.books import FREED, PROBE_MEAN
from replay.reader import RunReader
from wire.digest import digest
from wire.record import Fingerprint, RolloutHead, Scored, WorkOrder, fingerprint_id, group_id

SHOWN = 20
OLDEST = ("SELECT group_id, min(oldest) FROM (SELECT group_id, oldest_version AS oldest FROM rollouts WHERE reward IS NOT NULL UNION ALL "
          "SELECT group_id, version FROM eval_rollouts WHERE eval_id = 0 AND reward IS NOT NULL) GROUP BY group_id")
UNSETTLED = ("queued", "granted")
_order = msgspec.json.Decoder(WorkOrder)


def check_state(run: RunReader, story: Story) -> Iterator[Finding]:
    yield from _group_rows(run, story)
    yield from _eval_groups(run, story)
    yield from _rollout_rows(run, story)
    yield from _outside(run, story)
    yield from _outcomes(run, story)
    yield from _engines(run, story)
    yield from _versions(run, story)
    yield from _rest(run, story)


def _differ(kind: str, name: str, told: Mapping[Any, Any], found: Mapping[Any, Any]) -> Iterator[Finding]:
    """The first few keys in which what the ledger told and what a table holds differ."""
    wrong = sorted((key for key in told.keys() | found.keys() if told.get(key) != found.get(key)), key=str)
    for key in wrong[:SHOWN]:
        what = f"the row says {found[key]}" if key in found else "there is no row"
        yield Finding(kind, [_id(key)], f"{name}: the ledger says {told.get(key, 'nothing of it')}, {what}")


def _id(key: Any) -> str:
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


# ---------------------------------------------------------------- groups and rollouts
def _group_rows(run: RunReader, story: Story) -> Iterator[Finding]:
    """Each work order by its digest, the columns that repeat it, and what the ledger says of a training group."""
    oldest = dict(run.sql(OLDEST))
    for group, order_id, attempt, purpose, prompt, n, text, told, *rest in run.sql(
            "SELECT group_id, order_id, attempt, purpose, prompt_id, n, work_order, work_order_digest, state, actor, grant_seq, "
            "granted_at_version, oldest_version, update_id FROM groups"):
        if digest(text.encode()) != told:
            yield Finding("order", [group], f"its work order does not have the digest {str(told)[:16]} of its row")
            continue
        order = _order.decode(text)
        columns, said = (group, order_id, attempt, purpose, prompt, n), (
            group_id(order), order.order_id, order.attempt, order.purpose, order.prompt_id, order.n)
        if columns != said:
            yield Finding("order", [group], f"the row says {columns}, its work order {said}")
        if purpose != "train":
            continue
        state, *found = rest
        grant = story.told.grants.get(group, (None, None, None))
        settled = None if state in UNSETTLED else oldest.get(group)
        expected = [*grant, settled, story.told.updates.get(group)]
        if found != expected:
            yield Finding("group", [group], f"actor, grant, version, oldest token, update: the ledger and its rollouts say {expected}, "
                                            f"the row says {found}")


def _eval_groups(run: RunReader, story: Story) -> Iterator[Finding]:
    answered = Counter(rollout.rpartition(".")[0] for rollout, (of, *_) in story.told.outside.items() if of)
    answered.update(group for group, _ in story.told.failures)
    counts = Counter[int]()
    for group, of, n, state, actor in run.sql("SELECT group_id, eval_id, n, state, actor FROM groups WHERE purpose != 'train'"):
        counts[of] += 1
        holder, evaluation = story.told.holders.get(group), story.told.evals.get(of)
        lost = evaluation is not None and evaluation.state == "lost"
        expected = ("evaluated" if answered[group] >= n else "dropped" if lost else "granted" if holder else "queued"), holder
        if (state, actor) != expected:
            yield Finding("state", [group], f"an order of evaluation {of}: the ledger left it {expected}, the row says {(state, actor)}")
    yield from _differ("eval", "orders of this evaluation", {of: one.groups for of, one in story.told.evals.items()}, counts)


def _rollout_rows(run: RunReader, story: Story) -> Iterator[Finding]:
    """Who put it, which update trained it."""
    found, trained = {}, {}
    for rollout, group, actor, state, update in run.sql("SELECT rollout_id, group_id, actor, state, update_id FROM rollouts"):
        found[rollout] = actor
        if update != (expected := story.told.updates.get(group) if state in ("trained", "lost") else None):
            trained[rollout] = f"{update}, and not {expected}"
    stored = {rollout: actor for rollout, actor in story.told.put_by.items() if rollout in found}  # one without a row is in the books
    yield from _differ("actor", "put by", stored, {rollout: actor for rollout, actor in found.items() if rollout in stored})
    for rollout, text in list(trained.items())[:SHOWN]:
        yield Finding("trained", [rollout], f"its update is {text}, that of its group")


def _outside(run: RunReader, story: Story) -> Iterator[Finding]:
    """Answers of evaluations and greedy baselines as acknowledged."""
    found = {}
    for rollout, of, group, purpose, version, length, reward, failure, text, head_told, payload, payload_told, asked in run.sql(
            "SELECT e.rollout_id, e.eval_id, e.group_id, e.purpose, e.version, response_len, reward, failure, head, head_digest, payload, "
            "payload_digest, g.purpose FROM eval_rollouts e LEFT JOIN groups g USING (group_id)"):
        found[rollout] = (of, payload_told, head_told)
        if payload is not None and digest(payload) != payload_told:
            yield Finding("eval", [rollout], f"its payload does not have the digest {payload_told[:16]} of its row")
        if digest(text.encode()) != head_told:
            yield Finding("eval", [rollout], f"its head does not have the digest {head_told[:16]} of its row")
            continue
        head = msgspec.json.decode(text, type=RolloutHead)
        judged = (head.verdict.reward, None) if isinstance(head.verdict, Scored) else (None, head.verdict.reason)
        said = (group_id(head), asked if of else "greedy_baseline", head.spans[0].version, head.response_len, *judged)
        if (group, purpose, version, length, reward, failure) != said:
            yield Finding("eval", [rollout], f"the row says {(group, purpose, version, length, reward, failure)}, the head {said}")
    yield from _differ("eval", "evaluation, digests of payload and head", story.told.outside, found)


def _outcomes(run: RunReader, story: Story) -> Iterator[Finding]:
    failures = {(group, sample): reason for group, sample, reason in run.sql("SELECT group_id, sample, reason FROM failures")}
    yield from _differ("failure", "why the sample came to nothing", story.told.failures, failures)
    found = run.sql("SELECT rollout_id, actor, reason FROM quarantine ORDER BY id")
    yield from _differ("quarantine", "rollout, actor, reason", _numbered(story.told.quarantine), _numbered(found))


def _numbered(rows: Iterable[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    return {f"quarantine {number}": row for number, row in enumerate(rows, 1)}


# ---------------------------------------------------------------- the run
def _engines(run: RunReader, story: Story) -> Iterator[Finding]:
    ids = set()
    for name, body in run.sql("SELECT id, body FROM fingerprints"):
        ids.add(name)
        try:
            computed = fingerprint_id(msgspec.json.decode(body, type=Fingerprint))
        except msgspec.MsgspecError as error:
            computed = str(error)
        if computed != name:
            yield Finding("fingerprint", [name], f"its body is not that of this id, but of {computed}")
    for name in sorted(ids ^ story.told.engines):
        yield Finding("fingerprint", [name], "there is no row of it" if name in story.told.engines else "no ledger row speaks of it")
    told = {name: (one.epoch, one.confirmed, one.probe_mean, one.fingerprint) for name, one in story.told.actors.items()}
    found, largest = {}, {}
    for name, epoch, confirmed, mean, probe_max, engine in run.sql(
            "SELECT name, epoch, confirmed, probe_mean, probe_max, fingerprint FROM actors"):
        found[name] = (epoch, confirmed, mean, engine)
        largest[name] = probe_max
    yield from _differ("actor", "epoch, version, probe, engine", told, found)
    known = {name: one.probe_max for name, one in story.told.actors.items() if one.probe_max is not None}  # JSON has no infinity
    yield from _differ("actor", "largest difference of the probe", known, {name: largest[name] for name in known if name in largest})


def _versions(run: RunReader, story: Story) -> Iterator[Finding]:
    began = dict(run.sql("SELECT update_id, version_in FROM updates"))
    told = {version: (parent if update is None else began.get(update), update) for version, (parent, update) in story.told.parents.items()}
    found = {version: (parent, update) for version, parent, update in run.sql("SELECT version, parent, update_id FROM versions")}
    yield from _differ("version", "parent and update", told, {version: row for version, row in found.items() if version in told})
    checkpoints = {row[0]: list(row[1:]) for row in run.sql("SELECT version, update_id, path, manifest_digest, state FROM checkpoints")}
    yield from _differ("checkpoint", "update, path, manifest, state", story.told.checkpoints, checkpoints)
    evals = {of: Evaluation(version, updates, story.told.evals[of].groups if of in story.told.evals else 0, state, tuple(result))
             for of, version, updates, state, *result in run.sql(
                 "SELECT eval_id, version, updates, state, sampled, greedy, failed FROM evals")}
    yield from _differ("eval", "evaluation", story.told.evals, evals)


def _rest(run: RunReader, story: Story) -> Iterator[Finding]:
    """Metrics, counters, and what `meta` remembers."""
    metrics = {update: digest(text.encode()) for update, text in run.sql("SELECT update_id, metrics FROM updates")}
    told = {update: body.get("metrics") for update, body in story.commits.items() if update in metrics}
    yield from _differ("metrics", "digest of the update's line", told, {update: metrics[update] for update in told})
    counters = run.counters()
    expected = {name: story.told.counters[name] for name in COUNTED}
    expected["tokens_generated"] = run.one("SELECT coalesce(sum(response_len), 0) FROM rollouts")
    expected[FREED] = run.one("SELECT count(*) FROM rollouts WHERE payload IS NULL")
    yield from _differ("counter", "counted", expected, {name: counters.get(name, 0) for name in expected})
    meta = dict(run.sql("SELECT key, value FROM meta"))
    known = {key: value for key, value in meta.items()
             if key in story.told.meta or key.startswith(PROBE_MEAN.format("")) or key == "finished"}
    if int(meta.get("cursor", 0)):
        known["cursor"] = meta["cursor"]
    yield from _differ("meta", "remembered", story.told.meta, known)
    if int(meta.get("next_epoch", 1)) < story.told.next_epoch:
        last = story.told.next_epoch - 1
        yield Finding("meta", ["next_epoch"], f"the ledger's epochs go to {last}, the next is {meta.get('next_epoch')}")
