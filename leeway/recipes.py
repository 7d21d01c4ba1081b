"""`leeway recipes`: what a recipe can be made of. Read from the schema, so that it cannot drift."""

from configs.reference import keys
from configs.schema import Recipe
from leeway.arguments import no_arguments


def main(arguments: list[str]) -> int:
    no_arguments("leeway recipes", __doc__, arguments)
    print("Settings of the [recipe] table; --set recipe.<setting>=<value>, or a TOML file.\n")
    for key in keys(Recipe):
        print(f"  {key.name:16} {key.kind}  (default {key.default})" + (f"\n{'':19}{key.text}" if key.text else ""))
    return 0
