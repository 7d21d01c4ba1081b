"""Audit of the tables against the ledger's story: what was put, moved, anchored, committed and removed, and nothing else."""

from collections.abc import Iterator

import msgspec

from replay.audit_ledger import Story
from replay.audit_rollouts import Finding
from replay.books import PRODUCED, books, imbalance
from replay.reader import RunReader
from replay.rows import ColumnRow, EvalRow, GroupRow, RolloutRow, SpanRow, UpdateRow, VersionRow
from replay.sound import anchor_digest
from wire.digest import digest
from wire.messages import AnchorHead
from wire.record import ScoringPlan

FINAL = ("trained", "dropped", "expired", "lost")
ABORTED = ("dropped", "aborted")


def check_groups(run: RunReader, story: Story) -> Iterator[Finding]:
    unseen = dict(story.groups)
    for row in run.read(GroupRow, "purpose = 'train'"):
        state, reason = unseen.pop(row.group_id, (None, None))
        told = f"{state}({reason})" if reason and state in FINAL else state
        found = f"{row.state}({row.reason})" if row.reason else row.state
        if told != found:
            yield Finding("state", [row.group_id], f"the ledger left this group {told or 'unheard of'}, its row says {found}")
    if unseen:
        yield Finding("state", sorted(unseen)[:20], f"{len(unseen)} groups of the ledger have no row")


def check_books(run: RunReader, story: Story) -> Iterator[Finding]:
    """Every rollout acknowledged has its row, every row was acknowledged, and the states add up."""
    stored = {rollout for (rollout,) in run.sql("SELECT rollout_id FROM rollouts")}
    if missing := sorted(story.payloads.keys() - stored):
        yield Finding(
            "books",
            missing[:20],
            f"{len(missing)} rollouts were stored according to the ledger and have no row: "
            f"produced {len(story.payloads)}, found {len(stored)}",
        )
    if extra := sorted(stored - story.payloads.keys()):
        yield Finding(
            "books", extra[:20], f"{len(extra)} rollouts have a row and no ledger row: produced {len(story.payloads)}, found {len(stored)}"
        )
    found = books(run.db)
    if found["produced"] != story.produced:
        yield Finding("books", [PRODUCED], f"the counter says {found['produced']} rollouts were stored, the ledger {story.produced}")
    if gap := imbalance(found):
        names = run.sql(
            "SELECT rollout_id, state FROM rollouts WHERE state NOT IN ('trained', 'dropped', 'expired', 'lost', 'buffered', 'leased')"
        )
        yield Finding(
            "books",
            [rollout for rollout, _ in names[:20]],
            f"the books do not balance: {gap} of {found['produced']} rollouts are in no known state"
            + (f" ({', '.join(sorted({repr(state) for _, state in names}))})" if names else ", or their rows are gone"),
        )


def check_rollout_row(story: Story, row: RolloutRow) -> Iterator[Finding]:
    """One row against the ledger: digests, and the state that follows from its group's."""
    ids = [row.rollout_id]
    if (acknowledged := story.payloads.get(row.rollout_id, row.payload_digest)) != row.payload_digest:
        yield Finding("payload", ids, f"the row's payload digest is {row.payload_digest[:16]}, the ledger acknowledged {acknowledged[:16]}")
    told, found = story.heads.get(row.rollout_id, row.head_digest), digest(row.head.encode())
    if not told == found == row.head_digest:
        yield Finding(
            "head",
            ids,
            f"the head (spans, verdict, times) was changed: the ledger acknowledged {told[:16]}, found {found[:16]}, "
            f"the row says {row.head_digest[:16]}",
        )
    expected, found_state = _expected_state(story, row), (row.state, row.reason)
    if expected is not None and expected != found_state:
        group = story.groups[row.group_id]
        yield Finding(
            "state",
            ids,
            f"its group {row.group_id} is {_show(*group)} in the ledger, so it should be {_show(*expected)}; "
            f"the row says {_show(*found_state)}",
        )


def _expected_state(story: Story, row: RolloutRow) -> tuple[str, str | None] | None:
    """None: its group is not in the ledger, which is a finding of its own."""
    if row.group_id not in story.groups:
        return None
    if row.failure == "aborted":
        return ABORTED
    state, reason = story.groups[row.group_id]
    unverified = row.reward is None
    match state:
        case "granted" | "complete":
            return "buffered", None
        case "trained" | "lost" if unverified:
            return "dropped", "unverified"
        case "dropped" if unverified and reason == "no_signal":
            return "dropped", "unverified"
        case "expired":
            return "expired", None
        case "leased" | "trained":
            return state, None
        case _:
            return state, reason


def check_anchors(run: RunReader, story: Story) -> Iterator[Finding]:
    unseen = dict(story.anchors)
    for row in run.read(SpanRow, "source IS NOT NULL"):
        ids = [row.rollout_id]
        if (row.rollout_id, row.span) not in unseen:
            yield Finding("anchor", ids, f"span {row.span} has an anchor of source {row.source} that no ledger row speaks of")
            continue
        told, found = unseen.pop((row.rollout_id, row.span)), _anchor_digest(row)
        if not told == row.anchor_digest == found:
            yield Finding(
                "anchor",
                ids,
                f"span {row.span}: its old log-probs, source, weights, trainer and plan digest to {found[:16]}, the row says "
                f"{str(row.anchor_digest)[:16]}, the ledger recorded {told[:16]}",
            )
    for rollout, span in sorted(unseen)[:20]:
        yield Finding("anchor", [rollout], f"span {span} was anchored according to the ledger; no such anchor is stored")
    for (rollout,) in run.sql("SELECT DISTINCT rollout_id FROM spans WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)"):
        yield Finding("spans", [rollout], "spans of a rollout that has no row")


def _anchor_digest(row: SpanRow) -> str:
    """Of what the row says of the anchor."""
    source, plan = row.source, (row.rows, row.width, row.row)
    count = 0 if source == "missing" else row.end - row.start
    return anchor_digest(AnchorHead(row.rollout_id, row.span, row.version, source, row.weights_digest, row.trainer,  # type: ignore[arg-type]
                                    ScoringPlan(*plan), count), row.old_digest)  # type: ignore[arg-type]


def check_commits(run: RunReader, story: Story) -> Iterator[Finding]:
    unseen = dict(story.commits)
    for row in run.read(UpdateRow):
        ids = [f"update {row.update_id}"]
        body = unseen.pop(row.update_id, None)
        if body is None:
            yield Finding("record", ids, "the update has a row and no commit in the ledger")
            continue
        if body["record"] != row.record_digest:
            yield Finding("record", ids, f"the record's digest is {row.record_digest[:16]}, the ledger committed {body['record'][:16]}")
        columns = {}
        for column in run.read(ColumnRow, "update_id = ?", row.update_id):
            columns[column.name] = column.digest
            if column.data is not None and (found := digest(column.data)) != column.digest:
                yield Finding("column", [*ids, column.name], f"digest: expected {column.digest[:16]}, found {found[:16]}")
        for name in sorted({*columns, *body["columns"]}):
            if columns.get(name) != body["columns"].get(name):
                yield Finding(
                    "column",
                    [*ids, name],
                    f"digest {str(columns.get(name))[:16]}, the ledger committed {str(body['columns'].get(name))[:16]}",
                )
        if (told := "lost" if row.update_id in story.lost_updates else "committed") != row.state:
            yield Finding("state", ids, f"the ledger left it {told}, the row says {row.state}")
    for update in sorted(unseen)[:20]:
        yield Finding("record", [f"update {update}"], "committed according to the ledger; it has no row")


def check_notices(run: RunReader, story: Story) -> Iterator[Finding]:
    unseen = dict(story.notices)
    for row in run.read(VersionRow):
        ids, notice = [f"v{row.version}"], unseen.pop(row.version, None)
        if notice is None:
            yield Finding("version", ids, "the version has a row and no ledger row")
            continue
        for name in ("path", "manifest_digest", "weights_digest"):
            if getattr(row, name) != notice[name]:
                yield Finding("version", ids, f"{name}: the row says {getattr(row, name)[:24]}, the ledger committed {notice[name][:24]}")
        if (told := "orphaned" if row.version in story.orphaned else "live") != row.state:
            yield Finding("state", ids, f"the ledger left it {told}, the row says {row.state}")
        if bool(row.retained) == (row.version in story.removed_versions):
            yield Finding("retention", ids, f"the row says {'retained' if row.retained else 'not retained'}, the ledger says otherwise")
    for version in sorted(unseen):
        yield Finding("version", [f"v{version}"], "committed according to the ledger; it has no row")


def check_retention(run: RunReader, story: Story, notes: list[str]) -> Iterator[Finding]:
    """What is gone may be gone: it lies before the newest retention's checkpoint."""
    version, update = story.line
    gone = run.sql("SELECT rollout_id, newest_version, g.update_id FROM rollouts r JOIN groups g USING (group_id) WHERE payload IS NULL")
    wrong = [rollout for rollout, newest, by in gone if newest >= version or (by or -1) > update]
    if wrong:
        yield Finding(
            "retention", wrong[:20], f"{len(wrong)} payloads are gone although no retention covers them (it reached version {version})"
        )
    columns = sorted({u for (u,) in run.sql("SELECT update_id FROM update_columns WHERE data IS NULL")})
    if wrong_columns := [u for u in columns if u > update]:
        yield Finding(
            "retention",
            [f"update {u}" for u in wrong_columns[:20]],
            f"columns are gone although no retention covers them (it reached update {update})",
        )
    olds = run.sql(
        "SELECT DISTINCT rollout_id FROM spans s JOIN rollouts r USING (rollout_id) "
        "WHERE s.source IS NOT NULL AND s.source != 'missing' AND s.old IS NULL AND r.payload IS NOT NULL"
    )
    if olds:
        yield Finding(
            "retention",
            [rollout for (rollout,) in olds[:20]],
            f"{len(olds)} rollouts have lost old log-probs, and retention did not remove them",
        )
    if gone:
        notes.append(
            f"not retained: the tokens and log-probs of {len(gone)} rollouts "
            f"and the columns of {len(columns)} updates (before version {version})"
        )


def check_evals(run: RunReader) -> Iterator[Finding]:
    """The accuracies are the means of the stored verdicts."""
    for row in run.read(EvalRow, "state = 'done'"):
        for name, purpose, stored in (("sampled", "eval", row.sampled), ("greedy", "greedy_baseline", row.greedy)):
            found = run.one("SELECT avg(reward) FROM eval_rollouts WHERE eval_id = ? AND purpose = ?", row.eval_id, purpose)
            if (found is None) != (stored is None) or (found is not None and stored is not None and abs(found - stored) > 1e-9):
                yield Finding("eval", [f"eval {row.eval_id}"], f"{name}: the row says {stored}, its stored verdicts give {found}")
        for rollout, reward, head in run.sql("SELECT rollout_id, reward, head FROM eval_rollouts WHERE eval_id = ?", row.eval_id):
            if (said := msgspec.json.decode(head)["verdict"].get("reward")) != reward:
                yield Finding("eval", [rollout], f"the verdict gave {said}, the row holds {reward}")


def _show(state: str, reason: str | None) -> str:
    return f"{state}({reason})" if reason else state
