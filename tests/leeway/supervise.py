"""A parent for the kill -9 test: supervises stand-ins until it is killed. `python supervise.py FOLDER`."""

import sys
import time
from pathlib import Path

from leeway.programs import Program, Spec
from leeway.supervisor import Supervisor

folder = Path(sys.argv[1])
stand_in = str(Path(__file__).with_name("stand_in.py"))
names = ("replay", "actor-0", "learner")
programs = [Program(Spec(name, (sys.executable, stand_in, name, str(folder / "journal"), "wait"), folder / f"{name}.log"))
            for name in names]
supervisor = Supervisor(programs, print)
supervisor.start()
print(*(program.pid for program in programs), flush=True)
while True:
    supervisor.poll()
    time.sleep(0.05)
