"""How much a test does: a little in `make test`, much more in `make torture` (LEEWAY_TORTURE=1, or more than 1 for that share of it)."""

import os

TORTURE = float(os.environ.get("LEEWAY_TORTURE", "0"))
"""0: as in `make test`. 1: all of it. 0.1: a tenth of it."""


def scaled(quick: int, torture: int) -> int:
    return max(quick, round(torture * TORTURE)) if TORTURE else quick
