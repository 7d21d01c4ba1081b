"""`leeway keys FOLDER [NAME...]`: the keys that let actors on other machines in."""

from pathlib import Path

from leeway.arguments import Parser
from wire.keys import make_keys
from wire.process import run_main

TEXT = """Make keys for a run whose replay listens beyond loopback. The first call makes replay's pair (server), `learner` and `actor`; each
NAME is the key of one more machine with actors. A later call adds NAMEs and leaves what is there. Folder 0700, files 0600."""


def main(arguments: list[str]) -> int:
    parser = Parser("leeway keys", TEXT)
    parser.usage = "leeway keys FOLDER [NAME...]"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the keys are, or will be made")
    parser.add_argument("names", metavar="NAME", nargs="*", help="one more machine with actors, any number")
    options = parser.parse_args(arguments)
    return run_main(lambda: make(options.folder, options.names))


def make(folder: Path, names: list[str]) -> None:
    made = make_keys(folder, names)
    print(f"{folder}: made {', '.join(made)}" if made else f"{folder}: nothing to make; these keys are there")
    others = [name for name in names if name in made]
    if others:
        print(f"a machine with actors needs its own key and replay's public one, in a folder of its own:   {folder}/server.key and "
              + " or ".join(f"{folder}/{name}.key_secret" for name in others))
        print(f"its config says   security.keys = \"THAT FOLDER\"   and   security.actor_key = \"{others[0]}\"")
    if "server" not in made and made:
        print("a running replay sees the longer list within a second; nothing is started again")
