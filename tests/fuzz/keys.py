"""Replay's list of keys and a certificate (`wire/keys.py`): ConfigError, or keys of 32 bytes."""

import random

from zmq.utils import z85

from configs.schema import Security
from tests.fuzz.parts import Mutate, folder, mutate_part, pack, unpack
from wire.errors import ConfigError
from wire.keys import ALLOWED, make_keys, read_allowed, server_keys

FOLDER = folder()
SECRET = FOLDER / "server.key_secret"
make_keys(FOLDER, ["host-b"])


def seeds() -> list[bytes]:
    text = (FOLDER / ALLOWED).read_bytes()
    return [pack([text, SECRET.read_bytes()]), pack([text + b"[[a]]\nb = [[1], {c = 1.5, d = 1979-05-27}]\n", b"metadata\ncurve\n"])]


def mutate(data: bytes, source: random.Random, engine: Mutate) -> bytes:
    return mutate_part(data, source, engine)


def check(data: bytes) -> None:
    allowed, certificate = unpack(data, 2)
    (FOLDER / ALLOWED).write_bytes(allowed)
    SECRET.write_bytes(certificate)
    try:
        for key, known in read_allowed(FOLDER).items():
            assert len(z85.decode(key)) == 32, known
    except ConfigError:
        pass
    try:
        keys = server_keys(Security(keys=str(FOLDER)))
    except ConfigError:
        return
    assert keys is not None
    assert [len(z85.decode(key)) for key in (keys.public, keys.secret)] == [32, 32]
