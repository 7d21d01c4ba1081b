"""Audit of versions and checkpoints: every one that is referred to was committed, and its files are the files committed."""

from collections.abc import Iterator

import msgspec

from replay.audit_rollouts import Finding
from replay.reader import RunReader
from replay.rows import CheckpointRow, VersionRow
from wire.digest import digest
from wire.errors import WeightsError
from wire.manifest import FILE, check_file, read_manifest, version_path
from wire.record import VersionNotice

REFERENCES = {
    "spans": "SELECT DISTINCT version FROM spans",
    "updates": "SELECT version_in FROM updates UNION SELECT version_out FROM updates",
    "checkpoints": "SELECT version FROM checkpoints",
    "evaluations": "SELECT version FROM evals",
    "evaluation rollouts": "SELECT DISTINCT version FROM eval_rollouts",
}


def check_versions(run: RunReader, notes: list[str], *, files: bool) -> Iterator[Finding]:
    """`files`: also digest every tensor of every retained version, not only its manifest."""
    rows = {row.version: row for row in run.read(VersionRow)}
    for table, query in REFERENCES.items():
        if unknown := sorted(v for (v,) in run.sql(query) if v not in rows):
            yield Finding("version", [f"v{v}" for v in unknown], f"{table} refer to versions that were never committed")
    for row in rows.values():
        if row.parent is not None and row.parent not in rows:
            yield Finding("version", [f"v{row.version}"], f"its parent v{row.parent} was never committed")
        if row.retained:
            yield from _version_files(run, row, files)
    removed = [row.version for row in rows.values() if not row.retained]
    if removed:
        notes.append(f"not retained: the files of {len(removed)} of {len(rows)} versions (v{removed[0]} to v{removed[-1]})")


def _version_files(run: RunReader, row: VersionRow, files: bool) -> Iterator[Finding]:
    ids = [f"v{row.version}"]
    if row.path != version_path(row.version):
        yield Finding("version", ids, f"path: expected {version_path(row.version)}, found {row.path}")
        return
    folder = run.run_dir / row.path
    try:
        manifest = read_manifest(folder, VersionNotice(row.version, row.path, row.manifest_digest, row.weights_digest))
        if manifest.parent != row.parent:
            yield Finding("version", ids, f"parent: the row says {row.parent}, the manifest says {manifest.parent}")
        if files:
            check_file(folder / FILE, manifest)
    except (WeightsError, OSError) as error:
        if _now(run, "SELECT retained FROM versions WHERE version = ?", row.version):
            yield Finding("version", ids, f"its files should be retained and are not sound: {error}")


def check_checkpoints(run: RunReader, hashes: set[str], notes: list[str]) -> Iterator[Finding]:
    """`hashes`: of every ledger row; the head in a checkpoint's manifest must be one of them, else the ledger's tail was cut."""
    rows = list(run.read(CheckpointRow))
    for row in rows:
        if row.state != "complete":
            continue
        ids = [f"checkpoint v{row.version}"]
        try:
            body = (run.run_dir / row.path / "manifest.json").read_bytes()
        except OSError as error:
            if _now(run, "SELECT state = 'complete' FROM checkpoints WHERE version = ?", row.version):
                yield Finding("checkpoint", ids, f"its manifest cannot be read: {error}")
            continue
        if (found := digest(body)) != row.manifest_digest:
            yield Finding("checkpoint", ids, f"manifest digest: expected {row.manifest_digest[:16]}, found {found[:16]}")
            continue
        head = msgspec.json.decode(body).get("ledger_head")
        if head not in hashes:
            yield Finding(
                "ledger head", ids, f"its manifest was written when the ledger ended at {str(head)[:16]}, which is no row of the ledger"
            )
    if gone := sum(row.state == "removed" for row in rows):
        notes.append(f"not retained: {gone} of {len(rows)} checkpoints")


def _now(run: RunReader, query: str, version: int) -> bool:
    """The answer of the store as it is now: in a live run retention may have removed a file since the snapshot was taken."""
    with RunReader(run.run_dir) as fresh:
        return bool(fresh.one(query, version))
