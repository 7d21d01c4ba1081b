"""`python -m scripts.bench [PART...]`: budgets, slow, mismatch, smollm2, head, correction, ingest.
Without a part: all. Each part's table goes to its place in docs/performance.md, with the machine and the date, and to the screen."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.bench import budgets, correction, head, ingest, mismatch, slow, smollm2
from scripts.bench.machine import describe_machine
from scripts.page import place

PARTS: dict[str, Callable[[], str]] = {
    "budgets": budgets.table, "slow": slow.table, "mismatch": mismatch.table, "smollm2": smollm2.table, "head": head.table,
    "correction": correction.table, "ingest": ingest.table}
PAGE = Path("docs/performance.md")


def main(parts: list[str]) -> int:
    if unknown := set(parts) - set(PARTS):
        print(f"bench: no part named {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for part in parts or list(PARTS):
        began = time.monotonic()
        text = PARTS[part]()
        foot = f"{describe_machine()}; measured {time.strftime('%Y-%m-%d')}, {time.monotonic() - began:.0f} s."
        place(PAGE, f"bench: {part}", f"{text}\n\n{foot}")
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
