"""`leeway recipes`: the named recipes, and what a recipe can be made of. Read from the code, so that it cannot drift."""

import json
import sys
from typing import NamedTuple

from configs.load import validate
from configs.needs import record_needs
from configs.recipes import RECIPES
from configs.reference import keys
from configs.schema import Recipe
from leeway.arguments import no_arguments

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


def rows() -> list[Row]:
    found = []
    for name, recipe in RECIPES.items():
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in recipe.settings.items())
        needs = ", ".join(record_needs(validate({**ANY_RUN, "recipe": {"name": name}})))
        found.append(Row(name, recipe.status, recipe.citation, settings, needs, recipe.note))
    return found


def main(arguments: list[str]) -> int:
    no_arguments("leeway recipes", __doc__, arguments)
    out = [HEAD]
    for row in rows():
        out += [f"  {row.name:17} {row.status}: {row.citation}", f"{'':20}{row.settings}", f"{'':20}needs {row.needs}"]
        out += [f"{'':20}ours: {row.note}"] if row.status == "reconstructed" else [f"{'':20}{row.note}"] if row.note else []
    out += ["\nSettings of the [recipe] table: --set recipe.<setting>=<value>, or a TOML file.\n"]
    for key in keys(Recipe):
        out += [f"  {key.name:17} {key.kind}  (default {key.default})"] + ([f"{'':20}{key.text}"] if key.text else [])
    sys.stdout.write("\n".join(out) + "\n")
    return 0
