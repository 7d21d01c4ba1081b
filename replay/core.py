"""The run as replay knows it: decisions in memory, every change written in the open transaction together with its ledger row.

Handlers call the methods here; the daemon commits and only then answers. Nothing here touches a socket.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.needs import greedy_baseline
from configs.schema import Config
from replay import retention
from replay.books import FREED, PRODUCED
from replay.busy import UpdateTimes
from replay.evals import EvalGroup, EvalRound, evaluation_due
from replay.orders import order_columns, stored_order
from replay.prompts import PromptFile, PromptOrder, PromptRow
from replay.sampler import MANY_LIVES, NO_CONTRAST, Group, GroupBook, Transition
from replay.sessions import Session, Sessions
from replay.store import Store
from wire.process import Clock
from wire.record import Sampling, VersionNotice, WorkOrder, group_id

log = logging.getLogger(__name__)
INSERT_GROUP = """INSERT INTO groups
    (group_id, order_id, attempt, purpose, prompt_id, n, state, actor, grant_seq, granted_at_version, eval_id, work_order,
    work_order_digest)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
MOVE_GROUP = """UPDATE groups SET state = ?1, reason = ?2, oldest_version = ?3,
    update_id = CASE ?1 WHEN 'lost' THEN update_id ELSE ?4 END WHERE group_id = ?5"""
FINAL = ("trained", "dropped", "expired", "lost")
VERDICTS_WATCHED = 1000


class Core:
    def __init__(self, config: Config, run_dir: Path, store: Store, clock: Clock, train: PromptFile, heldout: PromptFile | None) -> None:
        self.config, self.run_dir, self.store, self.clock = config, run_dir, store, clock
        self.train, self.heldout = train, heldout
        self.book = GroupBook(max_staleness=config.replay.max_staleness, groups_per_update=config.learner.groups_per_update,
                              min_scored=config.min_scored, max_attempts=config.replay.max_attempts,
                              dynamic_sampling=config.recipe.dynamic_sampling)
        self.prompt_order = PromptOrder(len(train), config.run.seed)
        self.run_id = ""
        self.cursor = 0
        self.queue: deque[WorkOrder] = deque()
        self.orders: dict[str, WorkOrder] = {}
        self.sessions = Sessions()
        self.versions: dict[int, VersionNotice] = {}
        self.committed = -1
        self.next_version = 0
        self.next_update = 1
        self.stepped = 0
        self.skipped = 0
        self.evals: list[EvalRound] = []
        self.evaluated: list[int] = []
        self.next_eval = 1
        self.vocabularies: dict[str, int] = {}  # by engine fingerprint
        self.verdicts: deque[str | None] = deque(maxlen=VERDICTS_WATCHED)
        """Why each failed; None for a score."""
        self.verdicts_warned = False
        self.no_contrast_in_a_row = 0
        self.update_times = UpdateTimes()
        self.finished = False
        self.last_metrics: dict[str, Any] = {}
        self.full_told = False
        self.metrics_due: list[str] = []
        self.retention_due = False
        self.sweep_due = False
        self._last_update: tuple[float, float] | None = None
        self.sampling = Sampling(config.sampling.temperature, config.sampling.max_new_tokens, top_logprobs=config.sampling.top_logprobs)
        self.greedy = msgspec.structs.replace(self.sampling, temperature=0.0, top_logprobs=0)
        self.baseline = self.greedy if greedy_baseline(config) else None

    # ------------------------------------------------------------ where the run is
    @property
    def now(self) -> float:
        return self.clock.monotonic()

    @property
    def training_done(self) -> bool:
        return self.stepped >= self.config.learner.updates

    @property
    def over(self) -> bool:
        """Nothing more is wanted from actors."""
        return self.training_done and not self.evals

    @property
    def evaluates(self) -> bool:
        return self.heldout is not None and (self.config.eval.samples > 0 or self.config.eval.greedy)

    @property
    def may_train(self) -> bool:
        """Training orders wait until the first evaluation is stored."""
        return self.committed >= 0 and (not self.evaluates or (bool(self.evaluated) and all(e.updates > 0 for e in self.evals)))

    @property
    def kept(self) -> int:
        """Rollouts that are stored with their tokens."""
        return int(self.store.counters[PRODUCED] - self.store.counters[FREED])

    @property
    def on_order(self) -> int:
        """Samples that actors are to make, or have made and not yet put."""
        return sum(group.rows - len(group.outcomes) for group in self.book.groups.values() if group.state == "granted")

    @property
    def full(self) -> bool:
        return self.kept + self.on_order + self.config.sampling.n > self.config.replay.max_rollouts

    def tell_full(self) -> None:
        if not self.full_told:
            self.full_told = True
            log.warning("actors are held back: %d rollouts are stored with their tokens, and replay.max_rollouts = %d; what "
                        "retention removes after a checkpoint makes room", self.kept, self.config.replay.max_rollouts)

    def begin(self) -> Store:
        """The store with its transaction open."""
        self.store.begin(self.now)
        return self.store

    def since_last_update(self, tokens: float) -> tuple[float, float]:
        """(seconds, generated tokens) since the update before this one; (0, 0) for the first of this process."""
        before, self._last_update = self._last_update, (self.now, tokens)
        return (self.now - before[0], tokens - before[1]) if before else (0.0, 0.0)

    def read_last_metrics(self) -> None:
        """Of the newest update that counts: at the start, and when later ones were given up."""
        last = self.store.one("SELECT metrics FROM updates WHERE state = 'committed' ORDER BY update_id DESC LIMIT 1")
        self.last_metrics = json.loads(last) if last else {}

    # ------------------------------------------------------------ orders
    def next_order(self) -> WorkOrder:
        """The head of the queue, else the next prompt of the seeded order. The caller writes the grant."""
        if self.queue:
            return self.queue.popleft()
        row = self.train.rows[self.prompt_order.row_at(self.cursor)]
        order = self._order(f"t{self.cursor:07d}", "train", row, self.config.sampling.n, self.sampling, baseline=self.baseline)
        self.cursor += 1
        return order

    def _order(self, order_id: str, purpose: Any, row: PromptRow, n: int, sampling: Sampling, version: int | None = None,
               baseline: Sampling | None = None) -> WorkOrder:
        return WorkOrder(order_id, 1, purpose, row.prompt_id, row.prompt, row.columns, n, sampling, version, baseline=baseline)

    def grant(self, count: int, actor: str) -> list[WorkOrder]:
        """Grant up to `count` training groups to an actor, and write it."""
        orders = [self.next_order() for _ in range(count)]
        rows = []
        for order in orders:
            group = Group(group_id(order), order.order_id, order.attempt, order.n, excused=order.excused,
                          baseline=order.baseline is not None, outlived=order.outlived)
            self.book.grant(group, actor, self.now)
            self.orders[group.group_id] = order
            rows.append((*self.group_row(order, "granted"), actor, group.seq, self.committed, None, *order_columns(order)))
        store = self.begin()
        store.db.executemany(INSERT_GROUP + " ON CONFLICT (group_id) DO UPDATE SET state = 'granted', actor = excluded.actor, "
                             "grant_seq = excluded.grant_seq, granted_at_version = excluded.granted_at_version", rows)
        store.set_meta("cursor", str(self.cursor))
        store.record("grant", {"actor": actor, "version": self.committed, "groups": [row[0] for row in rows]})
        return orders

    @staticmethod
    def group_row(order: WorkOrder, state: str) -> tuple[Any, ...]:
        return group_id(order), order.order_id, order.attempt, order.purpose, order.prompt_id, order.n, state

    # ------------------------------------------------------------ transitions
    def apply(self, kind: str, transitions: Sequence[Transition], *, update: int | None = None, **body: Any) -> None:
        """Write transitions of groups, and of their rollouts, with one ledger row of this kind. Requeues where they say so."""
        if not transitions and not body:
            return
        store = self.begin()
        db = store.db
        for transition in transitions:
            if transition.reason == NO_CONTRAST:
                self.no_contrast_in_a_row += 1
            elif transition.to == "complete":
                self.no_contrast_in_a_row = 0
        moved: dict[str, list[str]] = {}
        for group, to, reason, _ in transitions:
            moved.setdefault(f"{to}({reason})" if reason else to, []).append(group.group_id)
        db.executemany(MOVE_GROUP, [(to, reason if to in FINAL else None, group.oldest_version, update, group.group_id)
                                    for group, to, reason, _ in transitions])
        for to in {transition.to for transition in transitions}:
            some = [transition for transition in transitions if transition.to == to]
            db.executemany(*_rollout_moves(to, some, update))
            if to in ("trained", "dropped"):
                self._drop_unverified(to, some)
        requeued = [self._requeue(transition.group) for transition in transitions if transition.requeue]
        for transition in transitions:
            if transition.to in FINAL:
                self.orders.pop(transition.group.group_id, None)
        store.record(kind, {**({} if update is None else {"update": update}), **body, "to": moved, "requeued": requeued})

    def _drop_unverified(self, to: str, transitions: Sequence[Transition]) -> None:
        """Members without a verdict of a group that was leased: never trained on, and no part of the signal."""
        ids = [(t.group.group_id,) for t in transitions if to == "trained" or t.reason == "no_signal"]
        self.store.db.executemany("UPDATE rollouts SET state = 'dropped', reason = 'unverified' WHERE group_id = ? AND reward IS NULL "
                                  "AND state IN ('buffered', 'leased')", ids)

    def _requeue(self, group: Group) -> str:
        order = self.orders.get(group.group_id) or self.read_order(group.group_id)
        again = msgspec.structs.replace(order, attempt=order.attempt + 1, excused=group.excused, outlived=group.outlived)
        self.queue.append(again)
        self.store.db.execute(INSERT_GROUP, (*self.group_row(again, "queued"), None, None, None, None, *order_columns(again)))
        return group_id(again)

    def read_order(self, of: str) -> WorkOrder:
        (row,) = self.store.rows("SELECT group_id, work_order, work_order_digest FROM groups WHERE group_id = ?", of)
        return stored_order(*row)

    # ------------------------------------------------------------ evaluations
    def plan_evaluation(self) -> None:
        """Plan one of the committed version if it is due. While one is open only the run's last is; others are skipped, and counted."""
        settings = self.config.eval
        if self.heldout is None or not self.evaluates or self.committed < 0:
            return
        if not evaluation_due(stepped=self.stepped, total=self.config.learner.updates, every=settings.every, at=self.evaluated):
            return
        if self.evals and self.stepped < self.config.learner.updates:
            log.warning("no evaluation after %d updates: that after %d is not finished", self.stepped, self.evals[0].updates)
            self.begin().count("evaluations_skipped")
            self.evaluated.append(self.stepped)
            return
        orders, number = [], self.next_eval
        sampled = msgspec.structs.replace(self.sampling, top_logprobs=0)
        for index, row in enumerate(self.heldout.rows):
            if settings.samples:
                orders.append(self._order(f"e{number}s{index:05d}", "eval", row, settings.samples, sampled, self.committed))
            if settings.greedy:
                orders.append(self._order(f"e{number}g{index:05d}", "greedy_baseline", row, 1, self.greedy, self.committed))
        orders.sort(key=lambda order: order.purpose)  # all of one sampling together: one engine request takes only those
        store = self.begin()
        store.db.execute("INSERT INTO evals VALUES (?, ?, ?, 'pending', NULL, NULL, NULL, NULL)", (number, self.committed, self.stepped))
        rows = [(*self.group_row(order, "queued"), None, None, None, number, *order_columns(order)) for order in orders]
        store.db.executemany(INSERT_GROUP, rows)
        store.record("eval_planned", {"eval": number, "version": self.committed, "updates": self.stepped, "groups": len(orders)})
        self.evals.append(EvalRound(number, self.committed, self.stepped, {group_id(order): EvalGroup(order) for order in orders}))
        self.evaluated.append(self.stepped)
        self.next_eval += 1

    def eval_group(self, of: str) -> tuple[EvalRound, EvalGroup] | None:
        return next(((found, found.groups[of]) for found in self.evals if of in found.groups), None)

    def eval_orders_back(self, current: EvalRound, back: list[str], why: str) -> None:
        """Write that these orders of an evaluation are in its queue again."""
        if back:
            store = self.begin()
            store.db.executemany("UPDATE groups SET state = 'queued', actor = NULL WHERE group_id = ?", [(of,) for of in back])
            store.record("give_back", {"eval": current.eval_id, "groups": back, "why": why})
            log.warning("%d orders of evaluation %d go to another actor: %s", len(back), current.eval_id, why)

    def close_evaluations(self) -> None:
        """Write the result of the first evaluation when all its answers are there."""
        while self.evals and self.evals[0].done:
            done = self.evals.pop(0)
            sampled, greedy, failed = done.result()
            store = self.begin()
            store.db.execute("UPDATE evals SET state = 'done', sampled = ?, greedy = ?, failed = ?, committed_at = ? WHERE eval_id = ?",
                             (sampled, greedy, failed, self.clock.wall(), done.eval_id))
            store.record("eval_done", {"eval": done.eval_id, "version": done.version,
                                       "sampled": sampled, "greedy": greedy, "failed": failed})
            log.info("evaluation of version %d after %d updates: sampled %s, greedy %s, %d without a verdict",
                     done.version, done.updates, _show(sampled), _show(greedy), failed)

    # ------------------------------------------------------------ the rest of a transaction
    def save_sessions(self) -> None:
        self.store.set_meta("sessions", encode(self.sessions.saved()))
        self.store.set_meta("next_epoch", str(self.sessions.next_epoch))

    def keep_house_before_commit(self) -> None:
        """Retention follows a checkpoint, in the same transaction; files go after the commit."""
        if self.retention_due:
            self.retention_due = False
            if (gone := retention.mark(self.store.db, self.config, self.store.record)) is not None:
                self.sweep_due = True
                self.store.count(FREED, len(gone.rollouts))

    # ------------------------------------------------------------ time
    def stood_still(self, stop_s: float) -> None:
        """Replay was away for so long, not those that it did not hear of: they have as much time left as before."""
        log.warning("replay itself stood still for %.1f s: orders' leases are longer by as much", stop_s)
        self.begin().count("replay_stops")
        for group in self.book.groups.values():
            group.touched = min(group.touched + stop_s, self.now)
        for asked in (asked for current in self.evals for asked in current.groups.values()):
            asked.touched = min(asked.touched + stop_s, self.now)
        for session in (*self.sessions.of("actor"), *self.sessions.of("learner")):
            session.last_seen = min(session.last_seen + stop_s, self.now) if session.last_seen else 0.0

    def expire_orders(self, now: float | None = None) -> None:
        """Orders whose actor showed no sign of life until `now` go elsewhere."""
        now, lease_s = self.now if now is None else now, self.config.replay.order_lease_s
        if transitions := self.book.expire_orders(now, lease_s):
            log.warning("%d orders outlived their lease of %g s and were settled with what they had", len(transitions), lease_s)
            self.tell_outlived([transition.group for transition in transitions if transition.requeue])
            self.begin().count("order_leases_ended", len(transitions))
            self.apply("groups", transitions, why="order_lease_ended")
        for current in self.evals:
            holder = self.sessions.find("actor", current.actor or "")
            self.eval_orders_back(current, current.expire(now, lease_s, holder.last_seen if holder else now), "order_lease_ended")

    def tell_outlived(self, groups: Iterable[Group]) -> None:
        """A prompt is never dropped because actors vanish; one that may be why they do is named."""
        for group in groups:
            if group.outlived >= MANY_LIVES:
                log.warning("order %s (prompt %s) was left without an answer %d times, the last time by %s: if it is what ends actors, "
                            "take it out of task.train", group.order_id, self.orders[group.group_id].prompt_id, group.outlived, group.actor)

    def idle_share(self, session: Session, elapsed_s: float) -> float:
        """Share of the time since the last update in which an actor held nothing and waited for orders; begins anew."""
        idle, session.idle_s = session.idle_s, 0.0
        return min(1.0, idle / elapsed_s) if elapsed_s else 0.0


def encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _show(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _rollout_moves(to: str, transitions: Sequence[Transition], update: int | None) -> tuple[str, list[tuple[Any, ...]]]:
    """The statement that moves the rollouts of groups that went to `to`, with its values."""
    ids = [t.group.group_id for t in transitions]
    match to:
        case "complete":
            return "UPDATE rollouts SET state = 'buffered' WHERE group_id = ? AND state = 'leased'", [(g,) for g in ids]
        case "leased":
            return "UPDATE rollouts SET state = 'leased' WHERE group_id = ? AND state = 'buffered'", [(g,) for g in ids]
        case "trained":
            return ("UPDATE rollouts SET state = 'trained', update_id = ? WHERE group_id = ? AND state = 'leased' AND reward IS NOT NULL",
                    [(update, g) for g in ids])
        case "lost":
            return ("UPDATE rollouts SET state = 'lost', reason = ? WHERE group_id = ? AND state = 'trained'",
                    [(t.reason, t.group.group_id) for t in transitions])
        case "expired":
            return ("UPDATE rollouts SET state = 'expired' WHERE group_id = ? AND state IN ('buffered', 'leased')", [(g,) for g in ids])
        case _:
            scored = "UPDATE rollouts SET state = 'dropped', reason = ? WHERE group_id = ? AND state IN ('buffered', 'leased')"
            only = " AND (? != 'no_signal' OR reward IS NOT NULL)"
            return scored + only, [(t.reason, t.group.group_id, t.reason) for t in transitions]
