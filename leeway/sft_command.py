"""`leeway sft-export RUN --min-reward R [--out FILE]`: verified responses as a supervised set (rejection sampling), prompt/completion rows.

A row is {"prompt": text, "completion": text}, or both as chat messages where the task's prompts are; plus reward, prompt_id, rollout_id
and the version that sampled it. Held-out prompts are never in it. The same prompt with the same response comes once. JSON lines, or parquet
when FILE ends so.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leeway.export_rows import rows
from leeway.row_files import write_rows
from leeway.tools import one_line, tool_parser
from replay.reader import RunReader
from wire.digest import digest_json


class Selection:
    """`rows` of a run that were scored at least `least`; counts what it leaves out."""

    def __init__(self, run: RunReader, tokeniser: Any, least: float) -> None:
        self._run, self._tokeniser, self._least = run, tokeniser, least
        self.duplicates = self.not_retained = self.below = self.cut = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        for row in rows(self._run):
            if row["reward"] is None or row["reward"] < self._least:
                self.below += 1
            elif row["response_ids"] is None:
                self.not_retained += 1
            elif row["finish_reason"] != "stop":
                self.cut += 1
            elif (same := digest_json([row["prompt_ids"], row["response_ids"]])) in seen:
                self.duplicates += 1
            else:
                seen.add(same)
                yield self._row(row)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        text = self._tokeniser.texts([row["response_ids"][:-1]])[0]  # without the end token
        chat = row["messages"] is not None
        return {
            "prompt": row["messages"] if chat else row["prompt"], "completion": [{"role": "assistant", "content": text}] if chat else text,
            "reward": row["reward"], "prompt_id": row["prompt_id"], "rollout_id": row["rollout_id"],
            "version": row["spans"][0]["version"],
        }  # fmt: skip


def schema(chat: bool) -> Any:
    import pyarrow as pa

    words = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])) if chat else pa.string()
    return pa.schema([("prompt", words), ("completion", words), ("reward", pa.float64()), ("prompt_id", pa.string()),
                      ("rollout_id", pa.string()), ("version", pa.int64())])


def make_tokeniser(run_dir: Path, model: str) -> Any:
    """Of the exported model, else of the one the run began from. Raises ConfigError."""
    from actor.tokenise import Tokeniser

    return Tokeniser(str(run_dir / "model") if (run_dir / "model" / "config.json").is_file() else model, None)


def finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text!r}")
    return value


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway sft-export", __doc__)
    parser.add_argument("--min-reward", type=finite, required=True, metavar="R", help="least reward of a response that is taken")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a file that does not exist yet; default: standard output")
    options = parser.parse_args(arguments)

    def body() -> int:
        with RunReader(options.run) as run:
            selection = Selection(run, make_tokeniser(options.run, run.config().model.path), options.min_reward)
            chat = (run.one("SELECT json_type(work_order, '$.prompt') FROM groups LIMIT 1") == "array")
            form = "parquet" if options.out and options.out.suffix == ".parquet" else "jsonl"
            count = write_rows(selection, options.out, form, lambda: schema(chat))
        print(f"{count} rows; left out: {selection.below} below {options.min_reward:g} or without a verdict, {selection.cut} cut off, "
              f"{selection.duplicates} duplicates, {selection.not_retained} not retained", file=sys.stderr)
        return 0

    return one_line(body)
