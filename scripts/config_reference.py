"""Writes docs/configuration.md from the schema: `python scripts/config_reference.py`. With --check: exit 1 when the page is not current."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.reference import Key, keys, tables  # noqa: E402
from configs.schema import RESUMABLE, SHARED  # noqa: E402
from scripts.pages import write  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

HEAD = f"""# Configuration

Generated from `configs/schema.py` by `scripts/config_reference.py`. A test holds it current.

Every command takes one or more TOML files, joined left to right (a later file wins key by key), then `--set table.key=value` on top. An
unknown key is an error that names the nearest right one, and so is a setting of `[recipe]` that the chosen method does not
read. `--dry-run` prints the resolved tree, and what its recipe computes; a run keeps it in `<run>/config.json`. A value of
`null` is one that is not set; `--set table.key=null` unsets a key that a file or a recipe sets.

All processes of a run must agree on the tables {", ".join(f"`{name}`" for name in SHARED)} (`replay.endpoint` apart): one that
differs is refused when it says hello. The rest may differ from process to process.

With `--resume` only these may change: {", ".join(f"`{name}`" for name in RESUMABLE)}. The change is a row of the ledger.
"""


def page() -> str:
    parts = [HEAD]
    for name, model, required in tables():
        about = " ".join((model.__dict__.get("__doc__") or "").split())
        parts += [f"\n## `[{name}]`\n", f"{about}\n" if about else "", "Required.\n" if required else "",
                  "\n| key | value | default | |\n|---|---|---|---|\n", *(_row(key) for key in keys(model))]
    return "".join(parts)


def _row(key: Key) -> str:
    cells = [f"`{key.name}`", key.kind, key.default if key.default == "required" else f"`{key.default}`", key.text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
