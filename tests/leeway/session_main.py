"""A `leeway run` of light stand-ins: `python session_main.py FOLDER REPLAY ACTOR LEARNER`, each a behaviour of stand_in.py."""

import sys
from pathlib import Path

from rich.console import Console

from leeway.plan import Plan
from leeway.programs import Spec
from leeway.run import Session
from leeway.screen import PlainScreen
from wire.process import run_main

folder = Path(sys.argv[1])
stand_in = str(Path(__file__).with_name("stand_in.py"))
journal = str(folder / "journal")


def spec(name: str, behaviour: str) -> Spec:
    return Spec(name, (sys.executable, stand_in, name, journal, *behaviour.split()), folder / "logs" / f"{name}.log")


replay, actor, learner = sys.argv[2:]
plan = Plan(spec("replay", replay), [spec("actor-0", actor)], spec("learner", learner))
sys.exit(run_main(Session(plan, folder, "tcp://127.0.0.1:1", PlainScreen(Console(), 10, folder)).run))
