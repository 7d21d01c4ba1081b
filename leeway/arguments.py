"""Arguments of the tools. A wrong one is one line and exit 2."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"leeway: error: {message}\n")


def no_arguments(prog: str, description: str | None, arguments: list[str]) -> None:
    """For a command that takes none but --help."""
    Parser(prog, description).parse_args(arguments)
