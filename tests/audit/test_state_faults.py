"""One row of a finished run changed at a time: `leeway replay --verify` says which. Each of these once passed for sound, or could."""

from collections.abc import Callable
from pathlib import Path

import pytest

from replay.verify import verify
from tests.support.run_builder import ENGINE, RunBuilder
from wire.messages import GiveBack, Lease

ROLLOUT = "(SELECT min(rollout_id) FROM rollouts WHERE state = 'trained')"
GROUP = "(SELECT min(group_id) FROM groups WHERE state = 'trained')"
ANSWER = "(SELECT min(rollout_id) FROM eval_rollouts)"
ORDER = "(SELECT min(group_id) FROM groups WHERE purpose = 'eval')"

FAULTS = {
    "a group's state": (f"UPDATE groups SET state = 'expired' WHERE group_id = {GROUP}", "state", "the ledger left this group trained"),
    "the prompt frontier": (
        "UPDATE meta SET value = value + 1 WHERE key = 'cursor'", "meta", "remembered: the ledger says 10, the row says 11"),
    "no prompt frontier": ("DELETE FROM meta WHERE key = 'cursor'", "meta", "the ledger says 10, there is no row"),
    "the probe's baseline": (
        "UPDATE meta SET value = '0.5' WHERE key LIKE 'probe_mean%'", "meta", "the ledger says 1e-06, the row says 0.5"),
    "not finished": ("DELETE FROM meta WHERE key = 'finished'", "meta", "there is no row"),
    "an epoch again": ("UPDATE meta SET value = '1' WHERE key = 'next_epoch'", "meta", "the ledger's epochs go to 2, the next is 1"),
    "who put a rollout": (f"UPDATE rollouts SET actor = 'a1' WHERE rollout_id = {ROLLOUT}", "actor", "the ledger says a0, the row says a1"),
    "by which update": (
        "UPDATE rollouts SET update_id = 2 WHERE state = 'dropped' AND reason = 'unverified'", "trained", "2, and not None"),
    "a fingerprint's body": ("UPDATE fingerprints SET body = replace(body, 'float32', 'float16')", "fingerprint", "but of "),
    "a fingerprint gone": ("DELETE FROM fingerprints", "fingerprint", "there is no row of it"),
    "a fingerprint invented": ("INSERT INTO fingerprints SELECT 'f9', body FROM fingerprints", "fingerprint", "no ledger row speaks of it"),
    "the order of grants": (
        f"UPDATE groups SET grant_seq = grant_seq + 1 WHERE group_id = {GROUP}", "group", "['a0', 0, 0, 0, 1], the row says"),
    "the version of a grant": (
        f"UPDATE groups SET granted_at_version = 1 WHERE group_id = {GROUP}", "group", "the row says ['a0', 0, 1, 0, 1]"),
    "who was granted it": (f"UPDATE groups SET actor = 'a1' WHERE group_id = {GROUP}", "group", "the row says ['a1', 0, 0, 0, 1]"),
    "its oldest token": (f"UPDATE groups SET oldest_version = 1 WHERE group_id = {GROUP}", "group", "the row says ['a0', 0, 0, 1, 1]"),
    "its update": (f"UPDATE groups SET update_id = 2 WHERE group_id = {GROUP}", "group", "the row says ['a0', 0, 0, 0, 2]"),
    "a prompt": (
        f"UPDATE groups SET work_order = replace(work_order, '+', '-') WHERE group_id = {GROUP}", "order", "does not have the digest"),
    "a prompt's id": (f"UPDATE groups SET prompt_id = 'x' WHERE group_id = {GROUP}", "order", "'train', 'x', 2), its work order"),
    "a scoring plan": (
        f"UPDATE spans SET row = row + 1 WHERE rollout_id = {ROLLOUT}", "anchor", "source, weights, trainer and plan digest to"),
    "a trainer": (
        f"UPDATE spans SET trainer = '{{}}' WHERE rollout_id = {ROLLOUT}", "anchor", "source, weights, trainer and plan digest to"),
    "an anchor's digest": (f"UPDATE spans SET anchor_digest = old_digest WHERE rollout_id = {ROLLOUT}", "anchor", "the row says"),
    "a head's digest": (f"UPDATE rollouts SET head_digest = payload_digest WHERE rollout_id = {ROLLOUT}", "head", "the row says"),
    "metrics": (
        "UPDATE updates SET metrics = replace(metrics, '0.5', '0.4') WHERE update_id = 4", "metrics", "digest of the update's line"),
    "tokens": (
        "UPDATE counters SET value = value + 1 WHERE name = 'tokens_generated'", "counter", "the ledger says 126, the row says 127.0"),
    "quarantined": ("UPDATE counters SET value = 0 WHERE name = 'quarantined'", "counter", "the ledger says 1, the row says 0.0"),
    "answers": ("UPDATE counters SET value = 8 WHERE name = 'eval_rollouts'", "counter", "the ledger says 18, the row says 8.0"),
    "room made": (
        "UPDATE counters SET value = value + 1 WHERE name = 'payloads_freed'", "counter", "the row says "),
    "a failure's reason": ("UPDATE failures SET reason = 'x'", "failure", "the ledger says quarantined, the row says x"),
    "evidence gone": ("DELETE FROM quarantine", "quarantine", "there is no row"),
    "an order of an evaluation gone": (f"DELETE FROM groups WHERE group_id = {ORDER}", "eval", "the ledger says 6, the row says 5"),
    "an order's state": (f"UPDATE groups SET state = 'queued' WHERE group_id = {ORDER}", "state", "the ledger left it ('evaluated', 'a0')"),
    "an answer gone": (f"DELETE FROM eval_rollouts WHERE rollout_id = {ANSWER}", "eval", "there is no row"),
    "an answer's payload": (
        "UPDATE eval_rollouts SET payload = zeroblob(60) WHERE payload IS NOT NULL AND eval_id = 2", "eval", "its payload"),
    "an answer's head": (f"UPDATE eval_rollouts SET head = replace(head, 'stop', 'sto') WHERE rollout_id = {ANSWER}", "eval", "its head"),
    "an answer's purpose": (f"UPDATE eval_rollouts SET purpose = 'eval1' WHERE rollout_id = {ANSWER}", "eval", "'eval1', 0, 6, 1.0"),
    "an answer's version": (
        f"UPDATE eval_rollouts SET version = 1 WHERE rollout_id = {ANSWER}", "eval", "'greedy_baseline', 1, 6, 1.0, None), the head"),
    "an evaluation's state": (
        "UPDATE evals SET state = 'pending' WHERE eval_id = 1", "eval", "the row says Evaluation(version=0, updates=0"),
    "an evaluation's failures": ("UPDATE evals SET failed = 3 WHERE eval_id = 1", "eval", "result=(0.5, 1.0, 3)"),
    "an actor's version": ("UPDATE actors SET confirmed = 0", "actor", "epoch, version, probe, engine"),
    "an actor's probe": ("UPDATE actors SET probe_max = 0", "actor", "the ledger says 1e-05, the row says 0.0"),
    "an actor's engine": ("UPDATE actors SET fingerprint = NULL", "actor", f"'{ENGINE}'), the row says"),
    "a parent": ("UPDATE versions SET parent = 1 WHERE version = 1", "version", "the ledger says (0, 1), the row says (1, 1)"),
    "a checkpoint's update": ("UPDATE checkpoints SET update_id = 1 WHERE version = 3", "checkpoint", "the row says [1,"),
    "a checkpoint's state": ("UPDATE checkpoints SET state = 'complete' WHERE version = 2", "checkpoint", "'removed'], the row says"),
    "a column's type": (
        "UPDATE update_columns SET dtype = 'u1' WHERE update_id = 5 AND name = 'cur'", "column", "the row says type u1, the record f4"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_changed_row_is_named(run: Path, damage: Callable[..., object], name: str) -> None:
    statement, kind, text = FAULTS[name]
    damage(statement)
    findings = verify(run).findings
    assert [f for f in findings if f.kind == kind and text in f.text], findings
    assert len(findings) <= 20


def test_what_a_lost_update_left_is_looked_at_too(tmp_path: Path) -> None:
    """Nothing reads its columns any more, and yet they are the record of what was done."""
    build = RunBuilder(tmp_path / "lost")
    build.update()
    build.checkpoint()
    build.update()
    build.fork(1)
    assert verify(build.run_dir).findings == []
    build.core.store.db.execute("UPDATE update_columns SET data = zeroblob(length(data)) WHERE update_id = 2 AND name = 'cur'")
    assert [(f.kind, f.ids) for f in verify(build.run_dir).findings] == [("column", ["update 2", "cur"])]
    build.core.store.close()


def test_an_order_that_went_back_and_an_evaluation_that_was_lost_are_sound(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "back", updates=2)
    build.update()
    build.checkpoint()
    build.generate(2)
    build.anchor()
    lease, bulk = build.ask(Lease(build.learner, 1, 0.0))
    build.ask(*build._commit(lease, bulk, skipped=False))
    build.apply_version(2)
    orders = build.pull(2)
    assert {order.version for order in orders} == {2}
    assert verify(build.run_dir).findings == []
    build.ask(GiveBack(build.actor, [f"{orders[0].order_id}.1"], "stopping"))
    assert verify(build.run_dir).findings == []
    build.fork(1)
    assert build.core.store.rows("SELECT version, state FROM evals") == [(0, "done"), (2, "lost")]
    assert verify(build.run_dir).findings == []
    build.core.store.close()
