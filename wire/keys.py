"""Keys: who may talk to replay, and how each process proves who it is (CURVE, ZeroMQ's public-key handshake).

A folder made by `leeway keys`: 0700, its files 0600, checked whenever a process starts.

    server.key_secret   replay's own: never leaves its machine
    server.key          replay's public key: every client needs it
    NAME.key_secret     what the client NAME proves itself with
    allowed.toml        replay's list: [NAME] with a role (actor | learner) and a public key. Who is not on it does not get in

The certificate files are pyzmq's (`zmq.auth`).
"""

import os
import re
import stat
import struct
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import zmq.auth
from zmq.utils import z85

from configs.schema import Security
from wire.errors import ConfigError

Role = Literal["actor", "learner"]
KEY_NAME = re.compile(r"[a-z0-9_-]{1,32}")
SERVER, ALLOWED = "server", "allowed.toml"
UNREADABLE = (OSError, ValueError, IndexError)
"""What pyzmq raises for a file that is no certificate."""
LEARNER, ACTOR = "learner", "actor"
"""The keys that the first `leeway keys` makes."""


Signature = tuple[int, int, int] | None


class Known(NamedTuple):
    """Who a key on the list belongs to."""

    name: str
    role: Role


class ServerKeys(NamedTuple):
    """`allowed` maps public keys (40 characters of Z85) to their owners, as `folder` had them when its list was `read_at`."""

    public: bytes
    secret: bytes
    allowed: dict[bytes, Known]
    folder: Path
    read_at: Signature


class ClientKeys(NamedTuple):
    public: bytes
    secret: bytes
    server: bytes


def server_keys(security: Security) -> ServerKeys | None:
    """Replay's keys and its list; None when the config names no folder. Raises ConfigError."""
    if security.keys is None:
        return None
    folder = check_private(Path(security.keys))
    public, secret = _certificate(folder / f"{SERVER}.key_secret")
    read_at = signature(folder)
    return ServerKeys(public, secret, read_allowed(folder), folder, read_at)


def client_keys(security: Security, name: str) -> ClientKeys | None:
    """The key `name` and replay's public key; None when the config names no folder. Raises ConfigError."""
    if security.keys is None:
        return None
    folder = check_private(Path(security.keys))
    return ClientKeys(*_certificate(folder / f"{name}.key_secret"), _public(folder / f"{SERVER}.key"))


def check_private(folder: Path) -> Path:
    """Raises ConfigError unless the folder and all in it are this user's alone."""
    try:
        paths = [folder, *sorted(folder.iterdir())]
        for path in paths:
            found = path.lstat()
            if not (stat.S_ISDIR if path is folder else stat.S_ISREG)(found.st_mode):
                raise ConfigError(f"security.keys: {path} is not a plain {'folder' if path is folder else 'file'}")
            if found.st_uid != os.geteuid():
                raise ConfigError(f"security.keys: {path} belongs to another user")
            if found.st_mode & 0o077:
                raise ConfigError(f"security.keys: others have access to {path}: chmod {'700' if path is folder else '600'} {path}")
    except OSError as error:
        raise ConfigError(f"security.keys = {str(folder)!r} cannot be read ({error.strerror}): make it with `leeway keys {folder}`"
                          ) from None
    return folder


def read_allowed(folder: Path) -> dict[bytes, Known]:
    """The list in `folder`. Raises ConfigError naming the first entry that is wrong."""
    file = folder / ALLOWED
    try:
        entries = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None
    allowed: dict[bytes, Known] = {}
    for name, entry in entries.items():
        match entry:
            case {"role": role, "public_key": str() as text, **rest} if not rest and role in get_args(Role) and KEY_NAME.fullmatch(name):
                key = _z85(text.encode(), f"{file}: [{name}] public_key")
            case _:
                raise ConfigError(f"{file}: [{name}] must be 1 to 32 of a-z 0-9 _ - with role = \"actor\" or \"learner\" and public_key, "
                                  "and nothing else")
        if key in allowed:
            raise ConfigError(f"{file}: [{name}] and [{allowed[key].name}] have the same key")
        allowed[key] = Known(name, role)
    return allowed


def signature(folder: Path) -> Signature:
    """Another one when the list was written or replaced; None when there is none."""
    try:
        found = (folder / ALLOWED).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def make_keys(folder: Path, names: list[str]) -> list[str]:
    """Makes the folder, or adds to it: a key pair for each of `names` that has none, and its place on the list. The first call also makes
    replay's pair, and `learner` and `actor`. Returns the names of the keys made. Raises ConfigError."""
    for name in names:
        if not KEY_NAME.fullmatch(name) or name == SERVER:
            raise ConfigError(f"key name {name!r}: use 1 to 32 of a-z 0-9 _ -, and not {SERVER!r}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made a folder for keys ({error.strerror}): give another FOLDER") from None
    check_private(folder)
    first = not (folder / f"{SERVER}.key_secret").exists()
    if first and not (folder / ALLOWED).exists():
        _write_private(folder / ALLOWED, "# Who may talk to replay. To shut someone out, remove the entry: a running replay sees it.\n")
    made = []
    for name in dict.fromkeys([LEARNER, ACTOR, *names, SERVER] if first else names):  # replay's last: with it the folder is whole
        if not (folder / f"{name}.key_secret").exists():
            for file in zmq.auth.create_certificates(folder, name):
                Path(file).chmod(0o600)
            made.append(name)
        if name != SERVER:
            _allow(folder, name)
    return made


def _allow(folder: Path, name: str) -> None:
    key = _public(folder / f"{name}.key_secret")
    if key not in read_allowed(folder):
        entry = f'\n[{name}]\nrole = "{LEARNER if name == LEARNER else ACTOR}"\npublic_key = "{key.decode()}"\n'
        _write_private(folder / ALLOWED, (folder / ALLOWED).read_text() + entry)


def _write_private(file: Path, text: str) -> None:
    temporary = file.with_suffix(".new")
    temporary.touch(0o600)
    temporary.write_text(text)
    temporary.replace(file)


def _certificate(file: Path) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(file)
    except UNREADABLE as error:
        raise ConfigError(f"{file}: {error}: make the key with `leeway keys`, or copy it here") from None
    return _z85(public, str(file)), _z85(secret or b"", f"{file}: secret-key")


def _public(file: Path) -> bytes:
    try:
        return _z85(zmq.auth.load_certificate(file)[0], str(file))
    except UNREADABLE as error:
        raise ConfigError(f"{file}: {error}: copy it from replay's machine") from None


def _z85(text: bytes, where: str) -> bytes:
    """`text` itself, if it is a key of 32 bytes."""
    try:
        good = len(text) == 40 and z85.encode(z85.decode(text)) == text
    except (KeyError, ValueError, struct.error):  # the last: more than 32 bits in 5 characters
        good = False
    if not good:
        raise ConfigError(f"{where}: not a key (40 characters of Z85)")
    return text
