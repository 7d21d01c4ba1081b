"""A light program for the supervisor's tests: `python stand_in.py NAME JOURNAL BEHAVIOUR...`. Writes what it does into the journal."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from wire.errors import RunError
from wire.process import run_main


def main() -> int:
    name, journal, behaviour = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

    def write(text: str) -> None:
        with journal.open("a") as file:
            file.write(f"{name} {text}\n")

    write("started " + " ".join(sys.argv[3:]))
    if behaviour == "exit":
        print(f"leeway: error: {name} was told to end")
        return int(sys.argv[4])
    if behaviour == "cannot":
        raise RunError("nothing to learn")
    if behaviour == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        write(f"child {child.pid}")
    write("ready")
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(0.2)
        write("interrupted")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
