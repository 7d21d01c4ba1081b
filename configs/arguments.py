"""The one command line of all daemons: `PROG CONFIG... [--name NAME] [--set key=value]... [--resume] [--dry-run]`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from configs.load import check_name, load
from configs.schema import Config
from configs.summary import recipe_lines, warnings


class Arguments(NamedTuple):
    config: Config
    name: str
    resume: bool
    dry_run: bool

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run.dir) / self.name


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"leeway: error: {message}\n")


def parser(prog: str) -> argparse.ArgumentParser:
    build = Parser(prog=prog, allow_abbrev=False)
    build.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="TOML files, joined left to right")
    build.add_argument("--name", help="the run's name; default: the last file's name")
    build.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, e.g. replay.max_staleness=4")
    build.add_argument("--resume", action="store_true", help="go on with an existing run")
    build.add_argument("--dry-run", action="store_true",
                       help="print the resolved config and what its recipe computes, check what can be checked without starting, and "
                            "exit")
    if prog == "leeway replay":
        build.usage = ("leeway replay CONFIG... [--name NAME] [--set KEY=VALUE]... [--resume] [--dry-run]\n"
                       "       leeway replay --verify RUN")
        build.add_argument("--verify", metavar="RUN", help="alone, without CONFIG: check the store of a run; exit 3 when it has findings")
    return build


def parse(argv: list[str], prog: str, check: Callable[[Arguments], object] = lambda arguments: None) -> Arguments:
    """A wrong config or option ends the process: one line, exit 2. `--dry-run` prints the resolved tree as JSON, then does `check`, whose
    errors are the caller's, says on stderr what the recipe computes, and exits 0."""
    build = parser(prog)
    options = build.parse_args(argv)
    try:
        config = load(options.configs, options.set)
        name = check_name(options.name if options.name is not None else options.configs[-1].stem)
    except ValueError as error:
        build.error(str(error))
    arguments = Arguments(config, name, options.resume, options.dry_run)
    if options.dry_run:
        print(json.dumps(config.model_dump(mode="json"), indent=2), flush=True)
        check(arguments)
        for line in [*recipe_lines(config), *(f"warning: {line}" for line in warnings(config))]:
            print(line, file=sys.stderr)
        build.exit(0)
    return arguments
