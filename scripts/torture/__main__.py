"""`python -m scripts.torture [-j N] [--share X] [PART...]`: kills, random, learner, histories, wal, files, pressure, fuzz, guided,
partition, properties. Without a part: all. Each part's result is a line on the screen and a row of the table in docs/reliability.md; one
that fails is named, and the rest go on. Exit 0: all passed; 1: one did not; 2: no such part.
"""

import argparse
import sys
import time
from pathlib import Path

from scripts.bench.machine import describe_machine, markdown
from scripts.page import place, placed
from scripts.torture.parts import PARTS
from scripts.torture.run import Outcome, run

PAGE, MARK = Path("docs/reliability.md"), "torture: results"
HEADER = ["part", "what is done", "last result", "when, how long"]
NEVER = ["not run", "-"]


def main(argv: list[str]) -> int:
    options = arguments().parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        print(f"torture: no part named {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    failed = []
    for name in options.parts or list(PARTS):
        print(f"{name}: {PARTS[name].what} ...", flush=True)
        outcome = run(name, PARTS[name], options.processes, options.share)
        print(f"{name}: {'passed' if outcome.passed else 'FAILED'} in {outcome.seconds:.0f} s: {outcome.text}", flush=True)
        if options.share == 1:
            place(PAGE, MARK, table(placed(PAGE, MARK), name, outcome, options.processes))
        failed += [] if outcome.passed else [name]
    print(f"torture: {'these parts failed: ' + ', '.join(failed) + ' (output: build/torture)' if failed else 'all passed'}")
    return 1 if failed else 0


def arguments() -> argparse.ArgumentParser:
    build = argparse.ArgumentParser(prog="python -m scripts.torture", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    build.add_argument("parts", nargs="*", metavar="PART")
    build.add_argument("-j", dest="processes", type=int, default=1, metavar="N",
                       help="processes that share a part's work, where it can be shared")
    build.add_argument("--share", type=float, default=1.0, metavar="X",
                       help="of all there is to do: .1 for a tenth; then no row is written")
    return build


def table(before: str, name: str, outcome: Outcome, processes: int) -> str:
    """`before` with this part's row put in its place. Parts that are no more are left out; those that have no row say so."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in before.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells[2:] for cells in lines}
    text = outcome.text.replace("|", "/")
    shared = f", {processes} processes" if processes > 1 and PARTS[name].shared else ""
    rows[name] = [text if outcome.passed else f"**failed**: {text}", f"{time.strftime('%Y-%m-%d')}, {outcome.seconds:.0f} s{shared}"]
    return f"{markdown(HEADER, [[part, PARTS[part].what, *rows.get(part, NEVER)] for part in PARTS])}\n\n{describe_machine()}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
