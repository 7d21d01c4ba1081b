"""What `leeway run` starts: a pure function from the options to the programs, in the order in which they start."""

import errno
import sys
from pathlib import Path
from typing import NamedTuple

from configs.arguments import Arguments
from configs.schema import Config
from leeway.programs import Spec
from wire.errors import ConfigError
from wire.process import free_port
from wire.sockets import check_endpoint, in_use


class Plan(NamedTuple):
    replay: Spec
    actors: list[Spec]
    learner: Spec


def make_plan(options: Arguments, files: list[Path], sets: list[str]) -> Plan:
    """`files` and `sets` are what the children are given again; `sets` name the endpoint where it was picked."""
    config, logs = options.config, options.run_dir / "logs"
    same = (*map(str, files), "--name", options.name, *(word for item in sets for word in ("--set", item)))
    resume = ("--resume",) if options.resume else ()
    again = () if options.resume else ("--resume",)
    quiet = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    one_thread = {"OMP_NUM_THREADS": "1"}
    python = (sys.executable, "-m")
    actor_environment = {**quiet, **(one_thread if config.actor.device == "cpu" else {})}
    learner_environment = {**quiet, **({**one_thread, "DS_ACCELERATOR": "cpu"} if config.learner.device == "cpu" else {})}
    return Plan(
        Spec("replay", (*python, "replay", *same, *resume), logs / "replay.log", {**quiet, **one_thread}, again,
             options.run_dir / "config.json"),
        [Spec(f"actor-{name}", (*python, "actor", *same, "--set", f"actor.name={name}"), logs / f"actor-{name}.log", actor_environment)
         for name in (f"a{index}" for index in range(config.actor.count))],
        Spec("learner", (*python, *_learner(config), *same), logs / "learner.log", learner_environment))


def _learner(config: Config) -> tuple[str, ...]:
    if config.learner.ranks == 1:
        return ("learner",)
    return ("leeway.ranks", "--nproc-per-node", str(config.learner.ranks), "--master-port", str(free_port("127.0.0.1")), "-m", "learner")


def settle_endpoint(endpoint: str, *, keyed: bool = False) -> str:
    """The endpoint itself, or with a free port in place of port 0. Raises ConfigError when it is beyond loopback without keys, or
    in use."""
    host, _, port = check_endpoint(endpoint, keyed=keyed).removeprefix("tcp://").rpartition(":")
    try:
        found = free_port(host.strip("[]"), int(port) if port.isdigit() else 0)
    except OSError as error:
        raise ConfigError(in_use(endpoint) if error.errno == errno.EADDRINUSE else
                          f"replay.endpoint = {endpoint!r}: cannot listen there ({error.strerror})") from None
    return f"tcp://{host}:{found}"
