"""`leeway recipes [NAME]`: the named recipes, and what a recipe can be made of; or one of them, and what it computes."""

import difflib
import json
import sys
from typing import NamedTuple

from configs.load import validate
from configs.needs import record_needs
from configs.recipes import RECIPES
from configs.reference import keys
from configs.schema import Config, Recipe
from configs.summary import recipe_lines
from leeway.arguments import Parser

HEAD = """Named recipes: name = "<name>" in [recipe], or --set recipe.name=<name>. Keys written beside the name win.
Each needs rewards, response tokens and the engine's log-probs (mu); `needs` says what more.
"""
ANY_RUN = {"model": {"path": "-"}, "task": {"train": "-"}}


class Row(NamedTuple):
    name: str
    status: str
    citation: str
    settings: str
    needs: str
    note: str


def row(name: str) -> Row:
    recipe = RECIPES[name]
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in recipe.settings.items())
    return Row(name, recipe.status, recipe.citation, settings, ", ".join(record_needs(as_config(name))), recipe.note)


def rows() -> list[Row]:
    return [row(name) for name in RECIPES]


def as_config(name: str) -> Config:
    return validate({**ANY_RUN, "recipe": {"name": name}})


def described(of: Row) -> list[str]:
    out = [f"  {of.name:17} {of.status}: {of.citation}", f"{'':20}{of.settings}", f"{'':20}needs {of.needs}"]
    return out + ([f"{'':20}ours: {of.note}"] if of.status == "reconstructed" else [f"{'':20}{of.note}"] if of.note else [])


def main(arguments: list[str]) -> int:
    parser = Parser("leeway recipes", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="only this recipe, and what it computes")
    name = parser.parse_args(arguments).name
    if name is not None and name not in RECIPES:
        parser.error(f"no recipe {name!r}; the nearest is {difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)[0]}")
    if name is not None:
        out = [*described(row(name)), *(f"{'':20}{line}" for line in recipe_lines(as_config(name))[:-1])]
    else:
        out = [HEAD, *(line for one in rows() for line in described(one))]
        out += ["\nSettings of the [recipe] table: --set recipe.<setting>=<value>, or a TOML file.\n"]
        for key in keys(Recipe):
            out += [f"  {key.name:17} {key.kind}  (default {key.default})"] + ([f"{'':20}{key.text}"] if key.text else [])
    sys.stdout.write("\n".join(out) + "\n")
    return 0
