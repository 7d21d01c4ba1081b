"""Prompt files and the seeded order."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from replay.prompts import PromptFile, PromptOrder, PromptRow
from wire.errors import ConfigError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2="}]
    file = PromptFile(write(tmp_path / "x.jsonl", {"prompt": "1+1=", "answer": "2", "n": 3}, {"prompt": chat, "id": "second"}), "prompt")
    assert file.rows == [PromptRow("0", "1+1=", {"answer": "2", "n": 3}), PromptRow("second", chat, {"id": "second"})]


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"question": ["a", "b"], "answer": [1.5, None], "day": [date(2026, 1, 2)] * 2, "tags": [["x"], []]})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert PromptFile(tmp_path / "x.parquet", "question").rows == [
        PromptRow("0", "a", {"answer": 1.5, "day": "2026-01-02", "tags": ["x"]}),
        PromptRow("1", "b", {"answer": None, "day": "2026-01-02", "tags": []}),
    ]


def test_only_the_first_so_many(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *({"prompt": str(i)} for i in range(9)))
    assert [row.prompt for row in PromptFile(path, "prompt", 3).rows] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"prompt": "a"}\n{"other": 1}\n', "row 2 has no column 'prompt'"),
        ('{"prompt": 5}\n', "row 1: 'prompt' is neither text nor chat messages"),
        ('{"prompt": [{"role": 1}]}\n', "neither text nor chat"),
        ("[1]\n", "row 1 has no column"),
        ("{\n", r"x\.jsonl: line 1 is not JSON: [^:]*\(character 2\)$"),
        ("[" * 100_000, "line 1 cannot be read"),
        ("", "no prompts in it"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=line):
        PromptFile(tmp_path / "x.jsonl", "prompt")


def test_a_file_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match="line 2 is not UTF-8 text: save the file as UTF-8"):
        PromptFile(tmp_path / "x.jsonl", "prompt")


def test_a_missing_file_and_what_is_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        PromptFile(tmp_path / "x.jsonl", "prompt")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 it is not")
    with pytest.raises(ConfigError, match="not a parquet file"):
        PromptFile(tmp_path / "x.parquet", "prompt")


def test_every_pass_holds_every_prompt_once_in_an_order_of_its_own() -> None:
    order = PromptOrder(50, seed=3)
    passes = [[order.row_at(50 * turn + i) for i in range(50)] for turn in range(3)]
    assert all(sorted(found) == list(range(50)) for found in passes)
    assert passes[0] != passes[1] != passes[2]
    assert PromptOrder(50, seed=3).row_at(73) == passes[1][23]
    assert [PromptOrder(50, seed=4).row_at(i) for i in range(50)] != passes[0]
