"""What the read-only tools share: the RUN argument, and errors as one line."""

import sqlite3
import sys
from collections.abc import Callable

from leeway.arguments import Parser
from replay.reader import find_run
from wire.errors import LeewayError
from wire.text import printable_lines

FAILURE = 1


def tool_parser(prog: str, description: str | None) -> Parser:
    parser = Parser(prog, description)
    parser.add_argument("run", type=find_run, metavar="RUN", help="the run's folder, or the name of a run in runs/")
    return parser


def one_line(body: Callable[[], int]) -> int:
    """Run `body`; an error of ours becomes one line on stderr and its exit code."""
    try:
        return body()
    except LeewayError as error:
        print(f"leeway: error: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    except sqlite3.DatabaseError as error:
        print(f"leeway: error: the run's store cannot be read: {error}: see what is damaged, with `leeway replay --verify RUN`",
              file=sys.stderr)
        return FAILURE
