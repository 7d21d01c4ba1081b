"""Prompts from JSONL or parquet, and the seeded order in which they are asked: every prompt once per pass, no pass in the same order."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from wire.digest import digest_file
from wire.errors import ConfigError

Prompt = str | list[dict[str, str]]


class PromptRow(NamedTuple):
    """`columns` holds the row's other columns, for the verifier."""

    prompt_id: str
    prompt: Prompt
    columns: dict[str, Any]


class PromptFile:
    """All rows of one file, and its digest: a resumed run has to find the same file."""

    def __init__(self, path: Path, prompt_column: str, limit: int | None = None) -> None:
        """Raises ConfigError with one line that names the file and the row."""
        if not path.is_file():
            raise ConfigError(f"{path}: no such file (task.train and task.heldout name JSONL or parquet files)")
        try:
            self.digest = digest_file(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        rows = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
        self.rows = [_row(path, number, row, prompt_column) for number, row in zip(range(limit or 1 << 62), rows)]
        if not self.rows:
            raise ConfigError(f"{path}: no prompts in it")

    def __len__(self) -> int:
        return len(self.rows)


class PromptOrder:
    """Which row is asked at which position, for ever. The position is all there is to remember."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._pass, self._order = -1, list[int]()

    def row_at(self, position: int) -> int:
        turn, index = divmod(position, self.count)
        if turn != self._pass:
            self._pass, self._order = turn, list(range(self.count))
            random.Random(f"{self.seed}.{turn}").shuffle(self._order)
        return self._order[index]


def _row(path: Path, number: int, row: Any, prompt_column: str) -> PromptRow:
    if not isinstance(row, dict) or prompt_column not in row:
        raise ConfigError(f"{path}: row {number + 1} has no column {prompt_column!r} (task.prompt_column)")
    columns = msgspec.to_builtins(row, str_keys=True, order=None)
    try:
        prompt: Prompt = msgspec.convert(columns.pop(prompt_column), str | list[dict[str, str]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: row {number + 1}: {prompt_column!r} is neither text nor chat messages: {error}") from None
    return PromptRow(str(columns.get("id", number)), prompt, columns)


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if text := line.decode().strip():
                    yield json.loads(text)
            except UnicodeDecodeError:
                raise ConfigError(f"{path}: line {number} is not UTF-8 text: save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error.msg} (character {error.pos + 1})") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}: line {number} cannot be read: {error}") from None


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # large, and needed for parquet only
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: not a parquet file: {error}") from None
    with file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()
