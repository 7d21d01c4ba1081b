"""`python -m scripts.bench [PART...]`: budgets, slow, mismatch, smollm2, head, correction.
Without a part: all. Each part's table goes to its place in docs/performance.md, with the machine and the date, and to the screen."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.bench import budgets, correction, head, mismatch, slow, smollm2
from scripts.bench.machine import describe_machine

PARTS: dict[str, Callable[[], str]] = {
    "budgets": budgets.table, "slow": slow.table, "mismatch": mismatch.table, "smollm2": smollm2.table, "head": head.table,
    "correction": correction.table}
PAGE = Path("docs/performance.md")


def main(parts: list[str]) -> int:
    if unknown := set(parts) - set(PARTS):
        print(f"bench: no part named {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for part in parts or list(PARTS):
        began = time.monotonic()
        text = PARTS[part]()
        place(part, f"{text}\n\n{describe_machine()}; measured {time.strftime('%Y-%m-%d')}, {time.monotonic() - began:.0f} s.")
        print(text, flush=True)
    return 0


def place(part: str, text: str) -> None:
    """Put the text between the page's two marks of this part. Raises ValueError when they are not there."""
    page = PAGE.read_text()
    begin, end = f"<!-- bench: {part} -->\n", "<!-- end -->"
    if begin not in page:
        raise ValueError(f"{PAGE} has no place for {part}: add '{begin.strip()}' and '{end}'")
    PAGE.write_text(re.sub(f"({begin}).*?({end})", lambda marks: f"{marks[1]}{text}\n{marks[2]}", page, count=1, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
