"""The parts of `make torture`: what each does, and the tests that do it."""

from typing import NamedTuple

KILLS, DAMAGE = "tests/replay/test_kills.py", "tests/replay/test_damage.py"
PROFILE = "--hypothesis-profile=torture"
OTHERS = ("kills", "histories", "damage", "pressure", "fuzz", "partition")


class Part(NamedTuple):
    """`jobs`: pytest's arguments, a process each. `shared`: the tests of a job divide their work among processes (LEEWAY_SHARD)."""

    what: str
    jobs: tuple[tuple[str, ...], ...]
    shared: bool = False


PARTS = {
    "kills": Part("kill -9 at every named point of replay, two actors and a light learner, each x 20 (those at a HELLO once)",
                  ((f"{KILLS}::test_every_named_point",),)),
    "random": Part("kill -9 of them at 1,000 random instants", ((f"{KILLS}::test_random_instants",),)),
    "learner": Part("kill -9 of the real learner at its named points, each x 5: every version as in an undisturbed run",
                    (("tests/learner/test_killed.py",),)),
    "histories": Part("10,000 random histories of duplicates, late and lost messages, restarts, expiries, forks",
                      (("tests/replay/test_histories.py",),), shared=True),
    "wal": Part("the WAL cut, zeroed from there on, and a bit flipped, at every byte: the acknowledged prefix, or a named refusal",
                ((DAMAGE, "-k", "wal or zeros"),), shared=True),
    "files": Part("a bit flipped in every byte of the database and of version files: read as acknowledged, or found and refused by name",
                  ((DAMAGE, "-k", "not wal and not zeros"),), shared=True),
    "pressure": Part("learner stopped for 10 minutes, four actors at full speed; a full disk, twice; replay stopped for 30 s",
                     (("tests/replay/test_pressure.py",),)),
    "fuzz": Part("100,000 damaged messages to the decoder, 100,000 to the handlers",
                 (("tests/wire/test_fuzz.py",), ("tests/replay/test_fuzz.py",))),
    "guided": Part("coverage-guided, 10 minutes: decoder, handlers, version files, outbox file, key files",
                   (("tests/fuzz/test_guided.py",),), shared=True),
    "partition": Part("two network namespaces, the link down for 5 s and for 60 s", (("tests/replay/test_partition.py",),)),
    "properties": Part("the other tests of wire, replay and correction, with 5,000 examples for each property that sets no number",
                       (("tests/wire", "tests/replay", "tests/correction", PROFILE,
                         *(f"--ignore=tests/replay/test_{name}.py" for name in OTHERS), "--ignore=tests/wire/test_fuzz.py"),)),
}
