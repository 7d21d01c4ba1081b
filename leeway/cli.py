"""The `leeway` command: finds the subcommand and hands over. Imports what a command needs only when it runs."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

BAD_USAGE, INTERRUPTED = 2, 130


def _run(arguments: list[str]) -> int:
    from leeway.run import main

    return main(arguments)


def _daemon(name: str) -> Callable[[list[str]], int]:
    """The same process as `python -m NAME`, so that both are one thing to signals and supervisors."""

    def become(arguments: list[str]) -> int:
        os.execv(sys.executable, [sys.executable, "-m", name, *arguments])

    return become


def _stats(arguments: list[str]) -> int:
    from leeway.stats_command import main

    return main(arguments)


def _audit(arguments: list[str]) -> int:
    from leeway.audit_command import main
    from wire.process import end

    end(main(arguments))  # with --update it was a rank


def _export(arguments: list[str]) -> int:
    from leeway.export_command import main

    return main(arguments)


def _sft_export(arguments: list[str]) -> int:
    from leeway.sft_command import main

    return main(arguments)


def _report(arguments: list[str]) -> int:
    from leeway.report import main

    return main(arguments)


def _whatif(arguments: list[str]) -> int:
    from leeway.whatif import main

    return main(arguments)


def _versions(arguments: list[str]) -> int:
    from leeway.versions_command import main

    return main(arguments)


def _doctor(arguments: list[str]) -> int:
    from leeway.doctor import main

    return main(arguments)


def _recipes(arguments: list[str]) -> int:
    from leeway.recipes import main

    return main(arguments)


def _keys(arguments: list[str]) -> int:
    from leeway.keys_command import main

    return main(arguments)


class Command(NamedTuple):
    call: Callable[[list[str]], int]
    usage: str
    help: str


START = "CONFIG... [--name NAME] [--set KEY=VALUE]... [--resume] [--dry-run]"
COMMANDS = {
    "run": Command(_run, START, "start a whole run on this machine: replay, actors, learner; supervise it"),
    "replay": Command(_daemon("replay"), f"{START} | --verify RUN",
                      "the replay daemon: owns the run's store, hands out work, keeps the books"),
    "actor": Command(_daemon("actor"), START, "one actor with its SGLang server: generates and verifies"),
    "learner": Command(_daemon("learner"), START, "the learner: scores, corrects, updates, publishes weights"),
    "stats": Command(_stats, "RUN [--json]", "where a run stands, and whether its books balance"),
    "audit": Command(_audit, "RUN [--rollout ID | --update U] [--json]", "check a run's record, and re-score a sample of it"),
    "export": Command(_export, "RUN --format parquet|jsonl [--out FILE]", "write a run's rollouts with their log-probs and outcomes"),
    "sft-export": Command(_sft_export, "RUN --min-reward R [--out FILE]", "write a run's verified responses as a supervised set"),
    "report": Command(_report, "RUN", "write report.html of a run"),
    "versions": Command(_versions, "RUN [--json]", "every version of the weights: its parent, its files, what it sampled"),
    "whatif": Command(_whatif, "RUN --update U [--json]", "one recorded batch under every corrector and recipe, side by side"),
    "keys": Command(_keys, "FOLDER [NAME...]", "make the keys that let actors on other machines in"),
    "doctor": Command(_doctor, "", "does this machine have what Leeway needs"),
    "recipes": Command(_recipes, "[NAME]", "the named recipes, and what a recipe can be made of"),
}


def usage() -> str:
    lines = ["usage: leeway COMMAND ...", "", "Asynchronous off-policy RL for language models.", ""]
    lines += [f"  {name:11}{command.help}" for name, command in COMMANDS.items()]
    lines += ["", "`leeway COMMAND --help` says more; docs/commands.md says it all."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        print(usage(), file=sys.stderr)
        return BAD_USAGE
    if words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(importlib.metadata.version("leeway"))
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.0)[0]
        print(f"leeway: error: no command {words[0]!r}; the nearest is {near}", file=sys.stderr)
        return BAD_USAGE
    try:
        return COMMANDS[words[0]].call(words[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        return 0


if __name__ == "__main__":
    sys.exit(main())
