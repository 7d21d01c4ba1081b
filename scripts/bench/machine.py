"""The machine in one line, for the foot of each table."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    stack = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "deepspeed"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; {stack}; no GPU; one thread per process"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
