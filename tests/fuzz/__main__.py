"""`python -m tests.fuzz TARGET [--seconds N] [--seed N] [--found FOLDER]`: one target under libFuzzer (atheris), guided by what of our code
an input reaches. Ends with 0 when the time is over and nothing was found. Else the input is in FOLDER: copy it to tests/fuzz/found/TARGET,
where `make test` tries it again.
"""

import argparse
import importlib
import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.torture import IN_MEMORY, ROOM

OURS = ("configs", "wire", "replay", "actor", "tests.fuzz.planted")
TARGETS = ("decoder", "handlers", "version_files", "outbox", "keys")
FOUND = Path(__file__).with_name("found")
LIMITS = ("-rss_limit_mb=1024", "-malloc_limit_mb=512", "-timeout=30", "-max_len=20000",
          "-use_value_profile=1", "-keep_seed=1", "-print_final_stats=1")
"""An input that takes more than that is a finding."""


def main() -> None:
    build = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build.add_argument("target", choices=[*TARGETS, "planted"])
    build.add_argument("--seconds", type=int, default=600)
    build.add_argument("--seed", type=int, default=0, help="0: another one each time")
    build.add_argument("--found", default=".", metavar="FOLDER", help="where an input that fails is put")
    options = build.parse_args()
    if ROOM not in os.environ:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="leeway-") as room:
            sys.exit(subprocess.call([sys.executable, "-m", "tests.fuzz", *sys.argv[1:]], env={**os.environ, "TMPDIR": room, ROOM: room}))

    import atheris

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=OURS):
        target = importlib.import_module(f"tests.fuzz.{options.target}")

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        source = random.Random(seed)
        if source.random() < 0.05:
            return atheris.Mutate(data, most)
        return target.mutate(data, source, lambda part: atheris.Mutate(part, len(part) + 64))[:most]

    with tempfile.TemporaryDirectory(prefix="leeway-") as corpus:
        for number, seed in enumerate([*target.seeds(), *found(options.target)]):
            Path(corpus, f"seed{number:03d}").write_bytes(seed)
        atheris.Setup([sys.argv[0], f"-max_total_time={options.seconds}", f"-seed={options.seed}", f"-artifact_prefix={options.found}/",
                       *LIMITS, corpus], target.check, custom_mutator=mutate)
        atheris.Fuzz()


def found(target: str) -> list[bytes]:
    """What was found once."""
    return [path.read_bytes() for path in sorted((FOUND / target).glob("*"))]


if __name__ == "__main__":
    main()
