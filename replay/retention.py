"""What may be removed, and its removal. Payloads, columns, version files and old checkpoints go; rows never do.

The line is the oldest checkpoint that is kept: everything needed to run any update after it again stays. One ledger row says what each
removal was; it is committed before any file goes, so a crash leaves files that are garbage and are swept the next time.
"""

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import Config
from replay.baselines import DROP_PAYLOADS
from replay.books import Readable
from replay.store import Storage
from wire.manifest import version_path

log = logging.getLogger(__name__)
SETTLED = ("trained", "dropped", "expired", "lost")
PAGES_AT_ONCE = 4096


class Facts(NamedTuple):
    """What the decision needs to know. `checkpoints`: version -> update id of the complete ones; `needed`: versions that a pending
    evaluation or an unsettled rollout's span still refers to; `rollouts`: settled ones that still have a payload, as (id, newest version,
    the update that trained or skipped its group, if any); `columns`: updates with columns; `evals`: finished ones with payloads, as
    (id, version)."""

    version: int
    checkpoints: dict[int, int]
    orphaned_checkpoints: list[int]
    versions: list[int]
    needed: set[int]
    rollouts: list[tuple[str, int, int | None]]
    columns: list[int]
    evals: list[tuple[int, int]]


class MayGo(NamedTuple):
    """`line` is the (version, update) of the oldest checkpoint kept."""

    line: tuple[int, int]
    checkpoints: list[int]
    versions: list[int]
    rollouts: list[str]
    columns: list[int]
    evals: list[int]


def what_may_go(
    facts: Facts, *, max_staleness: int, keep_checkpoints: int, keep_versions: int = 0, retain_payloads: bool = False
) -> MayGo | None:
    """None while there is no complete checkpoint: then a run can only be repeated from its beginning, and all of it is needed.

    Kept: the newest `keep_checkpoints` checkpoints; from the oldest of them on every version and every payload; the last
    `max_staleness + 1 + keep_versions` versions; every version in `needed`.
    """
    if not facts.checkpoints:
        return None
    kept = sorted(facts.checkpoints)[-keep_checkpoints:]
    version, update = line = kept[0], facts.checkpoints[kept[0]]
    first_recent = facts.version - max_staleness - keep_versions
    return MayGo(
        line=line,
        checkpoints=sorted({*facts.checkpoints, *facts.orphaned_checkpoints} - set(kept)),
        versions=[v for v in facts.versions if v < min(version, first_recent) and v not in facts.needed],
        rollouts=[]
        if retain_payloads
        else [rollout for rollout, newest, by in facts.rollouts if newest < version and (by is None or by <= update)],
        columns=[] if retain_payloads else [u for u in facts.columns if u <= update],
        evals=[e for e, of in facts.evals if of < version],
    )


def read_facts(db: Readable) -> Facts:
    marks = ", ".join("?" * len(SETTLED))

    def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in db.execute(query, values)]

    return Facts(
        version=max((v for (v,) in rows("SELECT max(version) FROM versions WHERE state = 'live'") if v is not None), default=0),
        checkpoints={v: u or 0 for v, u in rows("SELECT version, update_id FROM checkpoints WHERE state = 'complete'")},
        orphaned_checkpoints=[v for (v,) in rows("SELECT version FROM checkpoints WHERE state = 'orphaned'")],
        versions=[v for (v,) in rows("SELECT version FROM versions WHERE retained ORDER BY version")],
        needed={
            v
            for (v,) in rows(
                "SELECT version FROM evals WHERE state = 'pending' UNION SELECT s.version FROM spans s JOIN rollouts r USING (rollout_id) "
                f"WHERE r.state NOT IN ({marks})",
                *SETTLED,
            )
        },
        rollouts=[
            (rollout, newest, by)
            for rollout, newest, by in rows(
                "SELECT r.rollout_id, r.newest_version, g.update_id FROM rollouts r JOIN groups g USING (group_id) "
                f"WHERE r.state IN ({marks}) AND r.payload IS NOT NULL ORDER BY r.rollout_id",
                *SETTLED,
            )
        ],
        columns=[u for (u,) in rows("SELECT DISTINCT update_id FROM update_columns WHERE data IS NOT NULL ORDER BY update_id")],
        evals=rows(
            "SELECT DISTINCT eval_id, e.version FROM evals e JOIN eval_rollouts r USING (eval_id) "
            "WHERE e.state = 'done' AND r.payload IS NOT NULL"
        ),
    )


def mark(db: Storage, config: Config, append: Callable[[str, dict[str, Any]], object]) -> MayGo | None:
    """Inside the open transaction: clear what may go and append the ledger row `retention`. None when nothing goes.

    `append(kind, body)` writes a ledger row in the same transaction. Files are removed by `sweep`, after the commit.
    """
    going = what_may_go(
        read_facts(db),
        max_staleness=config.replay.max_staleness,
        keep_checkpoints=config.learner.keep_checkpoints,
        keep_versions=config.learner.keep_versions or 0,
        retain_payloads=config.replay.retain_payloads,
    )
    if going is None or not any(going[1:]):
        return None
    _each(db, "UPDATE rollouts SET payload = NULL WHERE rollout_id = ?", going.rollouts)
    _each(db, "UPDATE spans SET old = NULL WHERE rollout_id = ?", going.rollouts)
    if not config.replay.retain_payloads:
        db.execute(DROP_PAYLOADS)
    _each(db, "UPDATE update_columns SET data = NULL WHERE update_id = ?", going.columns)
    _each(db, "UPDATE eval_rollouts SET payload = NULL WHERE eval_id = ?", going.evals)
    _each(db, "UPDATE versions SET retained = 0 WHERE version = ?", going.versions)
    _each(db, "UPDATE checkpoints SET state = 'removed' WHERE version = ?", going.checkpoints)
    version, update = going.line
    append(
        "retention",
        {
            "version": version,
            "update": update,
            "checkpoints": going.checkpoints,
            "versions": going.versions,
            "evals": going.evals,
            "rollouts": len(going.rollouts),
            "columns": len(going.columns),
        },
    )
    return going


def sweep(db: Readable, run_dir: Path) -> None:
    """After the commit: remove the folders of what is no longer retained, and give free pages back to the file system."""
    for (version,) in db.execute("SELECT version FROM versions WHERE NOT retained").fetchall():
        _remove(run_dir / version_path(version))
    checkpoints = (run_dir / "checkpoints").resolve()
    for (path,) in db.execute("SELECT path FROM checkpoints WHERE state = 'removed'").fetchall():
        folder = (run_dir / path).resolve()
        if folder.parent != checkpoints:
            log.error("checkpoint path %r is not a folder in %s: it is left alone", path, checkpoints)
            continue
        _remove(folder)
    db.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()


def _each(db: Storage, query: str, ids: Iterable[str | int]) -> None:
    db.executemany(query, [(one,) for one in ids])


def _remove(folder: Path) -> None:
    if folder.is_dir():
        (folder / "manifest.json").unlink(missing_ok=True)  # a half-removed folder must not look complete
        shutil.rmtree(folder)
