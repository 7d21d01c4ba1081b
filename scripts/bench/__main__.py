"""`python -m scripts.bench [PART...]`: budgets, slow, mismatch, smollm2, ingest. Without a part: all.
Writes docs/performance/<part>.md and prints it."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.bench import budgets, ingest, mismatch, slow, smollm2
from scripts.bench.machine import describe_machine

PARTS: dict[str, Callable[[], str]] = {"budgets": budgets.table, "slow": slow.table, "mismatch": mismatch.table, "smollm2": smollm2.table,
                                     "ingest": ingest.table}
OUT = Path("docs/performance")


def main(parts: list[str]) -> int:
    if unknown := set(parts) - set(PARTS):
        print(f"bench: no part named {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    OUT.mkdir(exist_ok=True)
    for part in parts or list(PARTS):
        began = time.monotonic()
        text = PARTS[part]()
        (OUT / f"{part}.md").write_text(
            f"{text}\n\n{describe_machine()}; measured {time.strftime('%Y-%m-%d')}, {time.monotonic() - began:.0f} s.\n"
        )
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
