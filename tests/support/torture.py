"""How much a test does: a little in `make test`, much more in `make torture`. And what it did, for the table in docs/reliability.md.

LEEWAY_TORTURE=1: all of it; 0.1: a tenth; unset: as in `make test`. LEEWAY_SHARD=0/2: the first of two processes that share the work.
LEEWAY_COUNTS: the file that `tell` writes to.
"""

import json
import os
from collections.abc import Sequence
from typing import TypeVar

TORTURE = float(os.environ.get("LEEWAY_TORTURE", "0"))
SHARD, SHARDS = map(int, os.environ.get("LEEWAY_SHARD", "0/1").split("/"))
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where folders are made that are read back a hundred thousand times, when no disk is what is tested."""
ROOM = "LEEWAY_FUZZ_ROOM"
"""Names the folder for all that a fuzzing process writes (`tests/fuzz`)."""
T = TypeVar("T")


def scaled(quick: int, torture: int) -> int:
    return max(quick, round(torture * TORTURE)) if TORTURE else quick


def shared(count: int) -> int:
    """This process's part of so many."""
    return count // SHARDS + (SHARD < count % SHARDS)


def mine(things: Sequence[T]) -> Sequence[T]:
    """This process's part of these."""
    return things[SHARD::SHARDS]


def tell(**counts: int) -> None:
    """What was done, by name (`_` stands for a space). Counts of one name are added up over the tests of a part."""
    if file := os.environ.get("LEEWAY_COUNTS"):
        with open(file, "a") as out:
            out.write(json.dumps({name.replace("_", " "): count for name, count in counts.items()}) + "\n")
