"""Keys for tests: a folder as `leeway keys` makes it, and what a stranger might bring."""

from pathlib import Path

import zmq

from configs.schema import Security
from wire.keys import ClientKeys, ServerKeys, client_keys, make_keys, server_keys


class KeyRing:
    """Replay's keys, and clients' by name."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        make_keys(folder, list(names))
        self.security = Security(keys=str(folder))

    @property
    def server(self) -> ServerKeys:
        found = server_keys(self.security)
        assert found is not None
        return found

    def client(self, name: str) -> ClientKeys:
        found = client_keys(self.security, name)
        assert found is not None
        return found


def unlisted(ring: KeyRing) -> ClientKeys:
    """A good key pair that nobody put on the list."""
    return ClientKeys(*zmq.curve_keypair(), ring.server.public)


def for_another_server(ring: KeyRing) -> ClientKeys:
    """A listed client that was given the public key of some other replay."""
    return ring.client("actor")._replace(server=zmq.curve_keypair()[0])
