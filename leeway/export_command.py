"""`leeway export RUN --format parquet|jsonl [--out FILE]`: every stored training rollout with its spans, log-probs, verdict and outcome.

JSON lines go to standard output unless --out names a file; parquet to <run>.parquet here. Reads one snapshot of a live or finished run.
"""

import sys
from pathlib import Path
from typing import Any

from leeway.export_rows import rows
from leeway.row_files import write_rows
from leeway.tools import one_line, tool_parser
from replay.reader import RunReader


def schema() -> Any:
    """Of a parquet file: one row per rollout; lists run over tokens."""
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    ids, logprobs, messages = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.struct([("role", text), ("content", text)]))
    spans = pa.list_(pa.struct([("version", whole), ("start", whole), ("end", whole), ("kv_clean", pa.bool_()), ("old_source", text)]))
    return pa.schema([
        ("rollout_id", text), ("group_id", text), ("sample", whole), ("state", text), ("reason", text), ("update", whole), ("actor", text),
        ("prompt_id", text), ("prompt", text), ("messages", messages), ("prompt_ids", ids), ("response_ids", ids), ("finish_reason", text),
        ("temperature", real), ("fingerprint", text), ("reward", real), ("failure", text), ("verifier", text), ("verdict_detail", text),
        ("spans", spans), ("mu", logprobs), ("old", logprobs), ("prox", logprobs), ("cur", logprobs), ("weight", logprobs),
        ("keep", pa.list_(pa.uint8())), ("started", real), ("finished", real)])  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway export", __doc__)
    parser.add_argument("--format", choices=("parquet", "jsonl"), required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a file that does not exist yet")
    options = parser.parse_args(arguments)

    def body() -> int:
        out = options.out or (Path(f"{options.run.resolve().name}.parquet") if options.format == "parquet" else None)
        with RunReader(options.run) as run:
            count = write_rows(rows(run), out, options.format, schema)
        print(f"{count} rollouts{f' in {out}' if out else ''}", file=sys.stderr)
        return 0

    return one_line(body)
