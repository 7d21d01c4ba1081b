"""A name for an actor that was given none: the same in its next life, so that it finds its outbox, and no other process of this host's."""

import errno
import itertools
import os
import re
import socket

from wire.digest import digest


def free_name(endpoint: str) -> tuple[str, socket.socket]:
    """`HOST-N`, N the first number from 0 that no actor of this user on this host has towards the replay at `endpoint`, and what holds it:
    a socket without a file, which the kernel takes back the moment the process ends, however it ends. Keep it."""
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].lstrip(".") or "host"
    for number in itertools.count():
        holder = socket.socket(socket.AF_UNIX)  # not inherited by what the process starts
        try:
            holder.bind(f"\0leeway-{os.getuid()}-{digest(endpoint.encode())[:32]}-{number}")
            return f"{host}-{number}", holder
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise AssertionError
