"""What the read-only tools share: the RUN argument, and errors as one line."""

import sys
from collections.abc import Callable
from pathlib import Path

from leeway.arguments import Parser
from wire.errors import LeewayError


def tool_parser(prog: str, description: str | None) -> Parser:
    parser = Parser(prog, description)
    parser.add_argument("run", type=find_run, metavar="RUN", help="the run's folder, or the name of a run in runs/")
    return parser


def find_run(text: str) -> Path:
    """The folder `text`, or `runs/<text>` when only that exists."""
    named = Path("runs") / text
    return named if named.is_dir() and not Path(text).exists() else Path(text)


def one_line(body: Callable[[], int]) -> int:
    """Run `body`; an error of ours becomes one line on stderr and its exit code."""
    try:
        return body()
    except LeewayError as error:
        print(f"leeway: error: {error}", file=sys.stderr)
        return error.exit_code
