"""Two hosts in one kernel: network namespaces joined by a veth pair. Sockets made `inside` one stay there, their threads too."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
NOT_HERE = "network namespaces cannot be made here"


class TwoHosts:
    """Hosts `a` (10.231.0.1) and `b` (10.231.0.2). Raises OSError or CalledProcessError where the machine does not allow it."""

    def __init__(self) -> None:
        self.names = {host: f"leeway-{os.getpid()}-{host}" for host in "ab"}

    def __enter__(self) -> Self:
        try:
            for name in self.names.values():
                _ip("netns", "add", name)
            _ip("-n", self.names["a"], "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", self.names["b"])
            for host, address in (("a", "10.231.0.1/24"), ("b", "10.231.0.2/24")):
                _ip("-n", self.names[host], "addr", "add", address, "dev", "veth")
                for link in ("lo", "veth"):
                    _ip("-n", self.names[host], "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self.names.values():
            with suppress(subprocess.CalledProcessError, OSError):
                _ip("netns", "del", name)

    def link(self, state: str) -> None:
        """`up` or `down`."""
        _ip("-n", self.names["b"], "link", "set", "veth", state)

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread is on `host` for as long."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / self.names[host], os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(home)
            os.close(there)


def _enter(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
