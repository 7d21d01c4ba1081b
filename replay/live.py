"""What a live table shows."""

from typing import Any

from replay.books import PRODUCED, books, imbalance
from replay.core import Core
from replay.evals import EvalRound
from replay.sessions import Session
from replay.watchdog import awaited


def live_values(core: Core) -> dict[str, Any]:
    counts = books(core.store.db, core.store.counters.get(PRODUCED))
    states = {state: len(core.book.in_state(state)) for state in ("granted", "complete", "leased")}
    return {
        "updates": core.stepped, "updates_wanted": core.config.learner.updates, "updates_skipped": core.skipped,
        "version": core.committed, "versions": len(core.versions), "max_staleness": core.book.max_staleness,
        "over": core.over, "finished": core.finished,
        "groups": {**states, "queued": len(core.queue), "groups_per_update": core.book.groups_per_update},
        "rollouts": counts, "imbalance": imbalance(counts),
        "kept": core.kept, "max_rollouts": core.config.replay.max_rollouts, "full": core.full,
        "counters": core.store.counters,
        "actors": [_actor(core, session) for session in core.sessions.of("actor")],
        "evals": [_evaluation(current) for current in core.evals],
        "heldout": [{"version": version, "updates": updates, "sampled": sampled, "greedy": greedy, "failed": failed}
                    for version, updates, sampled, greedy, failed in core.store.rows(
                        "SELECT version, updates, sampled, greedy, failed FROM evals WHERE state = 'done' ORDER BY eval_id")],
        "awaited": awaited(core),
        "metrics": core.last_metrics, "ledger_head": core.store.ledger.head, "ledger_rows": core.store.ledger.seq,
    }


def _evaluation(current: EvalRound) -> dict[str, Any]:
    return {"eval": current.eval_id, "version": current.version, "updates": current.updates, "answered": current.answered,
            "total": current.total, "actor": current.actor}


def _actor(core: Core, session: Session) -> dict[str, Any]:
    holding = [group for group in core.book.in_state("granted") if group.actor == session.name]
    mean, largest = session.probe or (None, None)
    return {"name": session.name, "epoch": session.epoch, "confirmed": session.confirmed, "groups": len(holding),
            "probe_mean": mean, "probe_max": largest, "idle_s": session.idle_s, "seen_s_ago": core.now - session.last_seen,
            "stopped": session.stopped}
