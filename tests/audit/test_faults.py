"""Every planted fault is found, with the ids concerned. Each fault is one that a person, a disk or a bug could make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from replay.audit import Finding, audit
from replay.ledger import row_hash
from tests.support.run_builder import LENGTH, PROMPT, RunBuilder
from wire.digest import digest
from wire.record import RolloutHead, Scored

Sql = Callable[..., list[tuple]]


class Fault(NamedTuple):
    """What was damaged: the kind of finding and an id that must be in it, and words that its text must hold."""

    kind: str
    id: str
    text: str


def trained(sql: Sql, update: int = 5, sample: int = 0) -> str:
    """A rollout trained by an update whose payloads are retained."""
    return sql("SELECT rollout_id FROM rollouts WHERE state = 'trained' AND update_id = ? ORDER BY 1", update)[sample][0]


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# ---------------------------------------------------------------- rollouts
def payload_bit(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    data = sql("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout)[0][0]
    sql("UPDATE rollouts SET payload = ? WHERE rollout_id = ?", flip(data, 4 * PROMPT), rollout)
    return Fault("payload", rollout, "digest: expected")


def mu_value(value: float) -> Callable[[Path, Sql], Fault]:
    """With the row's digest made to fit."""

    def plant(run: Path, sql: Sql) -> Fault:
        rollout = trained(sql)
        words = np.frombuffer(sql("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout)[0][0], "<f4").copy()
        words[PROMPT + LENGTH + 4] = value
        sql("UPDATE rollouts SET payload = ?, payload_digest = ? WHERE rollout_id = ?", words.tobytes(), digest(words.tobytes()), rollout)
        return Fault("mu", rollout, "the first at 4")

    return plant


def payload_with_new_digest(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    data = flip(sql("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout)[0][0], 0)
    sql("UPDATE rollouts SET payload = ?, payload_digest = ? WHERE rollout_id = ?", data, digest(data), rollout)
    return Fault("payload", rollout, "the ledger acknowledged")


def token_beyond_the_vocabulary(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    data = sql("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout)[0][0]
    data = (16).to_bytes(4, "little") + data[4:]
    sql("UPDATE rollouts SET payload = ?, payload_digest = ? WHERE rollout_id = ?", data, digest(data), rollout)
    return Fault("payload", rollout, "token id 16 is outside the vocabulary of 16")


def payload_gone(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE rollouts SET payload = NULL WHERE rollout_id = ?", rollout)
    return Fault("retention", rollout, "no retention covers")


def reward_of_row(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE rollouts SET reward = 1 - reward WHERE rollout_id = ?", rollout)
    return Fault("reward", rollout, "the row holds reward 0.0")


def reward_everywhere(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    head = msgspec.json.decode(sql("SELECT head FROM rollouts WHERE rollout_id = ?", rollout)[0][0], type=RolloutHead)
    forged = msgspec.json.encode(msgspec.structs.replace(head, verdict=Scored(9.0))).decode()
    sql("UPDATE rollouts SET reward = 9, head = ? WHERE rollout_id = ?", forged, rollout)
    return Fault("head", rollout, "the ledger acknowledged")


def span_gap(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET start = 3 WHERE rollout_id = ? AND span = 1", rollout)
    return Fault("spans", rollout, "should begin at token 2")


def span_order(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET version = 3 WHERE rollout_id = ? AND span = 0", rollout)
    return Fault("spans", rollout, "versions may not decrease")


def state_without_transition(run: Path, sql: Sql) -> Fault:
    rollout = sql("SELECT rollout_id FROM rollouts WHERE reason = 'incomplete_group' ORDER BY 1")[0][0]
    sql("UPDATE rollouts SET state = 'trained', reason = NULL, update_id = 5, reward = 1, failure = NULL WHERE rollout_id = ?", rollout)
    return Fault("state", rollout, "so it should be dropped(incomplete_group)")


def trained_without_record(run: Path, sql: Sql) -> Fault:
    fault = state_without_transition(run, sql)
    return Fault("trained", fault.id, "does not name it")


def group_state(run: Path, sql: Sql) -> Fault:
    group = sql("SELECT group_id FROM groups WHERE state = 'trained' ORDER BY 1")[0][0]
    sql("UPDATE groups SET state = 'expired' WHERE group_id = ?", group)
    return Fault("state", group, "the ledger left this group trained, its row says expired")


def rollout_deleted(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("DELETE FROM rollouts WHERE rollout_id = ?", rollout)
    return Fault("books", rollout, "produced 21, found 20")


def rollout_invented(run: Path, sql: Sql) -> Fault:
    sql("INSERT INTO rollouts SELECT 'x.1.9', group_id, 9, state, reason, update_id, actor, response_len, "
        "oldest_version, newest_version, reward, "
        "failure, head, head_digest, payload, payload_digest, stored_at FROM rollouts WHERE rollout_id = ?", trained(sql))  # fmt: skip
    return Fault("books", "x.1.9", "produced 21, found 22")


def books_out_of_balance(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE rollouts SET state = 'elsewhere' WHERE rollout_id = ?", rollout)
    return Fault("books", rollout, "1 of 21 rollouts are in no known state ('elsewhere')")


def produced_counter_changed(run: Path, sql: Sql) -> Fault:
    sql("UPDATE counters SET value = value - 1 WHERE name = 'produced'")
    return Fault("books", "produced", "the counter says 20 rollouts were stored, the ledger 21")


def produced_in_the_ledger(run: Path, sql: Sql) -> Fault:
    seq, body = sql("SELECT seq, body FROM ledger WHERE body LIKE '%produced%' ORDER BY seq DESC LIMIT 1")[0]
    sql("UPDATE ledger SET body = ? WHERE seq = ?", body.replace('"produced":21', '"produced":22'), seq)
    return Fault("books", f"row {seq}", "produced is 22 in this row; the rows so far stored 21")


# ---------------------------------------------------------------- anchors, budget, updates
def anchor_gone(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET source = NULL, old = NULL WHERE rollout_id = ? AND span = 1", rollout)
    return Fault("anchor", rollout, "was trained without an anchor")


def source_unknown(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET source = 'ewma' WHERE rollout_id = ? AND span = 1", rollout)
    return Fault("source", rollout, "'ewma'")


def source_swapped(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET source = 'snapshot' WHERE rollout_id = ? AND source = 'resident'", rollout)
    return Fault("source", rollout, "the column old_source of the update says otherwise")


def stale_cache_anchored(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET kv_clean = 0 WHERE rollout_id = ? AND span = 1", rollout)
    return Fault("source", rollout, "cannot have an exact anchor")


def anchor_under_other_weights(run: Path, sql: Sql) -> Fault:
    rollout = trained(sql)
    sql("UPDATE spans SET weights_digest = ? WHERE rollout_id = ? AND span = 1", "0" * 64, rollout)
    return Fault("anchor", rollout, "scored under weights 0000000000000000")


def old_changed(run: Path, sql: Sql) -> Fault:
    """With its digest made to fit: the column that was trained on gives it away, and so does the ledger."""
    rollout = trained(sql)
    old = np.frombuffer(sql("SELECT old FROM spans WHERE rollout_id = ? AND span = 1", rollout)[0][0], "<f4").copy()
    old[1] -= 0.5
    sql("UPDATE spans SET old = ?, old_digest = ? WHERE rollout_id = ? AND span = 1", old.tobytes(), digest(old.tobytes()), rollout)
    return Fault("old", rollout, "token 3 was stored")


def old_against_ledger(run: Path, sql: Sql) -> Fault:
    return Fault("anchor", old_changed(run, sql).id, "the ledger recorded")


def column_changed(run: Path, sql: Sql) -> Fault:
    data = sql("SELECT data FROM update_columns WHERE update_id = 5 AND name = 'cur'")[0][0]
    sql("UPDATE update_columns SET data = ? WHERE update_id = 5 AND name = 'cur'", flip(data, 7))
    return Fault("column", "update 5", "digest: expected")


def column_gone(run: Path, sql: Sql) -> Fault:
    sql("DELETE FROM update_columns WHERE update_id = 5 AND name = 'weight'")
    return Fault("column", "update 5", "the record has columns")


def weight_of_a_masked_token(run: Path, sql: Sql) -> Fault:
    data = bytes(sql("SELECT length(data) FROM update_columns WHERE update_id = 5 AND name = 'keep'")[0][0])
    sql("UPDATE update_columns SET data = ? WHERE update_id = 5 AND name = 'keep'", data)
    return Fault("weight", trained(sql), "are masked and yet have a weight")


def over_budget(run: Path, sql: Sql) -> Fault:
    """A group three versions old, consistently so in its row, spans and head."""
    rollout = trained(sql)
    head = msgspec.json.decode(sql("SELECT head FROM rollouts WHERE rollout_id = ?", rollout)[0][0])
    head["spans"][0][0] = 0
    sql("UPDATE rollouts SET oldest_version = 0, head = ? WHERE rollout_id = ?", json.dumps(head), rollout)
    sql("UPDATE spans SET version = 0 WHERE rollout_id = ? AND span = 0", rollout)
    return Fault("budget", rollout, "3 versions old, the budget is 2")


def record_changed(run: Path, sql: Sql) -> Fault:
    sql("UPDATE updates SET record = replace(record, '\"loss\":0.5', '\"loss\":0.4') WHERE update_id = 4")
    return Fault("record", "update 4", "digest of the record")


def record_with_new_digest(run: Path, sql: Sql) -> Fault:
    body = sql("SELECT record FROM updates WHERE update_id = 4")[0][0].replace('"loss":0.5', '"loss":0.4')
    sql("UPDATE updates SET record = ?, record_digest = ? WHERE update_id = 4", body, digest(body.encode()))
    return Fault("record", "update 4", "the ledger committed")


def trained_twice(run: Path, sql: Sql) -> Fault:
    """Update 5's record names a rollout that update 4 trained, too."""
    again, replaced = trained(sql, 4), trained(sql, 5)
    sql("UPDATE updates SET record = replace(record, ?, ?) WHERE update_id = 5", replaced, again)
    return Fault("trained twice", again, "updates 4, 5")


# ---------------------------------------------------------------- versions, checkpoints, evaluations, files
def weights_file_bit(run: Path, sql: Sql) -> Fault:
    file = run / "weights/v000004/model.safetensors"
    file.write_bytes(flip(file.read_bytes(), -1 + file.stat().st_size))
    return Fault("version", "v4", "digest of")


def weights_manifest(run: Path, sql: Sql) -> Fault:
    file = run / "weights/v000003/manifest.json"
    file.write_bytes(file.read_bytes() + b" ")
    return Fault("version", "v3", "manifest's digest is not the one committed")


def weights_gone(run: Path, sql: Sql) -> Fault:
    (run / "weights/v000003/model.safetensors").unlink()
    return Fault("version", "v3", "No such file")


def version_digest(run: Path, sql: Sql) -> Fault:
    sql("UPDATE versions SET weights_digest = ? WHERE version = 4", "f" * 64)
    return Fault("version", "v4", "the row says ffffffffffff")


def version_deleted(run: Path, sql: Sql) -> Fault:
    sql("DELETE FROM versions WHERE version = 2")
    return Fault("version", "v2", "never committed")


def version_marked_removed(run: Path, sql: Sql) -> Fault:
    sql("UPDATE versions SET retained = 0 WHERE version = 4")
    return Fault("retention", "v4", "the ledger says otherwise")


def checkpoint_manifest(run: Path, sql: Sql) -> Fault:
    (run / "checkpoints/v000003/manifest.json").write_text("{}")
    return Fault("checkpoint", "checkpoint v3", "manifest digest: expected")


def accuracy_forged(run: Path, sql: Sql) -> Fault:
    sql("UPDATE evals SET sampled = 0.99 WHERE eval_id = 2")
    return Fault("eval", "eval 2", "the row says 0.99, its stored verdicts give 0.5")


def config_edited(run: Path, sql: Sql) -> Fault:
    file = run / "config.json"
    file.write_text(file.read_text().replace('"max_staleness": 2', '"max_staleness": 3'))
    return Fault("config", "config.json", "last started with config")


# ---------------------------------------------------------------- ledger
def ledger_row_removed(run: Path, sql: Sql) -> Fault:
    sql("DELETE FROM ledger WHERE seq = 20")
    return Fault("ledger", "row 21", "1 rows are missing before it")


def ledger_body_changed(run: Path, sql: Sql) -> Fault:
    seq = sql("SELECT min(seq) FROM ledger WHERE kind = 'grant'")[0][0]
    sql("UPDATE ledger SET body = replace(body, 'a0', 'a1') WHERE seq = ?", seq)
    return Fault("ledger", f"row {seq}", "kind or body was changed")


def ledger_body_rehashed(run: Path, sql: Sql) -> Fault:
    """The row's own hash made to fit: the next row still holds the old one."""
    seq, kind, body, prev = sql("SELECT seq, kind, body, prev FROM ledger WHERE kind = 'lease' ORDER BY seq")[0]
    body = body.replace('"update":1', '"update":2')
    sql("UPDATE ledger SET body = ?, hash = ? WHERE seq = ?", body, row_hash(prev, seq, kind, body), seq)
    return Fault("ledger", f"row {seq + 1}", "does not follow the row before")


def ledger_tail_cut(run: Path, sql: Sql) -> Fault:
    sql("DELETE FROM ledger WHERE seq > 60")
    return Fault("ledger head", "summary.json", "its tail was cut")


def ledger_tail_cut_before_a_checkpoint(run: Path, sql: Sql) -> Fault:
    (run / "summary.json").unlink()
    sql("DELETE FROM ledger WHERE seq >= (SELECT max(seq) FROM ledger WHERE kind = 'checkpoint') - 1")
    return Fault("ledger head", "checkpoint v3", "no row of the ledger")


def commit_without_row(run: Path, sql: Sql) -> Fault:
    sql("DELETE FROM updates WHERE update_id = 5")
    return Fault("record", "update 5", "committed according to the ledger; it has no row")


def transition_skipped(run: Path, sql: Sql) -> Fault:
    """A chain that is right, but in which a group is trained that was never leased."""
    group = sql("SELECT group_id FROM groups WHERE state = 'trained' ORDER BY 1")[0][0]
    prev = "0" * 64
    for seq, kind, body in sql("SELECT seq, kind, body FROM ledger ORDER BY seq"):
        if kind == "lease":
            body = body.replace(f'"{group}",', "")
        digest_of_row = row_hash(prev, seq, kind, body)
        sql("UPDATE ledger SET body = ?, prev = ?, hash = ? WHERE seq = ?", body, prev, digest_of_row, seq)
        prev = digest_of_row
    return Fault("transition", group, "from complete to trained")


FAULTS = [
    payload_bit, mu_value(0.25), mu_value(np.nan), mu_value(-np.inf), payload_with_new_digest, payload_gone,
    token_beyond_the_vocabulary, reward_of_row,
    reward_everywhere, span_gap, span_order, state_without_transition, trained_without_record, group_state, rollout_deleted,
    rollout_invented, books_out_of_balance, produced_counter_changed, produced_in_the_ledger, anchor_gone,
    source_unknown, source_swapped, stale_cache_anchored, anchor_under_other_weights,
    old_changed, old_against_ledger, column_changed, column_gone, weight_of_a_masked_token, over_budget, record_changed,
    record_with_new_digest, trained_twice, weights_file_bit, weights_manifest, weights_gone, version_digest, version_deleted,
    version_marked_removed, checkpoint_manifest, accuracy_forged, config_edited, ledger_row_removed, ledger_body_changed,
    ledger_body_rehashed, ledger_tail_cut, ledger_tail_cut_before_a_checkpoint, commit_without_row, transition_skipped,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_fault(run: Path, damage: Sql, plant: Callable[[Path, Sql], Fault]) -> None:
    fault = plant(run, damage)
    findings = audit(run).findings
    assert [f for f in findings if f.kind == fault.kind and fault.id in f.ids and fault.text in f.text], findings
    assert len(findings) <= 20, "one fault should not bury the reader"


def test_missing_is_refused_where_the_config_says_so(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "refuse", updates=1, on_missing="refuse")
    rollout = f"{build.generate(2)[0].order_id}.1.0"
    build.update(missing=rollout)
    assert audit(build.finish()).findings == [
        Finding("source", [rollout, "update 1"], "span 0 (version 0, tokens 0 to 6) has source missing, which anchor.on_missing = 'refuse' "
                                                 "does not allow")]  # fmt: skip


def test_a_token_without_anchor_that_was_kept(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "kept", updates=1)
    rollout = f"{build.generate(2)[0].order_id}.1.0"
    build.update(missing=rollout)
    keep = build.core.store.one("SELECT data FROM update_columns WHERE name = 'keep'")
    build.core.store.db.execute("UPDATE update_columns SET data = ? WHERE name = 'keep'", (flip(keep, 2),))
    assert [f.text for f in audit(build.finish()).findings if f.kind == "source" and rollout in f.ids] == [
        "span 0 (version 0, tokens 0 to 6) has no anchor, and yet 1 of its tokens were kept"
    ]
