"""Rows into a file, as JSON lines or parquet: a temporary name first, then renamed, so that a file that is there is whole."""

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from wire.errors import ConfigError

BATCH = 512
"""Rows in memory at once."""


def write_rows(rows: Iterable[dict[str, Any]], out: Path | None, form: str, schema: Any) -> int:
    """How many there were. `out`: None is standard output (JSON lines only). `schema`: a function that makes the parquet schema. Raises
    ConfigError when `out` exists or cannot be written."""
    if out is None:
        return _lines(rows, sys.stdout.buffer)
    if out.exists():
        raise ConfigError(f"{out} exists: remove it, or give another --out")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with temporary.open("wb") as file:
            count = _lines(rows, file) if form == "jsonl" else _parquet(rows, file, schema())
        os.replace(temporary, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _lines(rows: Iterable[dict[str, Any]], file: IO[bytes]) -> int:
    count = 0
    for row in rows:
        file.write(msgspec.json.encode(row) + b"\n")
        count += 1
    file.flush()
    return count


def _parquet(rows: Iterable[dict[str, Any]], file: IO[bytes], schema: Any) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    source = iter(rows)
    while batch := list(islice(source, BATCH)):
        yield batch
