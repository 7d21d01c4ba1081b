"""One response to judge, and a look at the machine's processes."""

import os
from pathlib import Path

from verifier import VerifyItem


def item(completion: str, prompt: str = "2+3=", **columns: object) -> VerifyItem:
    return VerifyItem(prompt, completion, [ord(c) for c in completion], columns)


def processes_with(variable: str) -> list[int]:
    """Live processes whose environment holds `variable` (a zombie's is empty)."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        if variable.encode() in environment.split(b"\0") and int(name) != os.getpid():
            found.append(int(name))
    return found
