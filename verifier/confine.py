"""What a worker does to itself before it runs anybody's code. Limits against accidents; not a security boundary."""

import fcntl
import os
import resource
import signal

from wire.process import set_death_signal

MAX_FILE_BYTES = 16 * 2**20


def end_with_parent(lifeline: int, parent: int) -> None:
    """End this process group when process `parent` dies, however it dies.

    `lifeline` is the read end of a pipe whose only writer is the parent. When that end closes, the kernel sends SIGKILL to the whole
    group (fcntl(2), F_SETSIG): this also reaches what user code has forked. The death signal covers a writer that leaked elsewhere.
    """
    set_death_signal(signal.SIGKILL)
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if os.getppid() != parent:  # it died before the two signals were armed
        os._exit(1)


def limit_resources(memory_mb: int) -> None:
    """Address space, size of any written file, no core dumps. Children inherit them, each with its own address space.

    RLIMIT_NPROC is left alone: it counts every process of the user, so a useful value here would hit the engine.
    """
    for limit, value in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def silence_output() -> None:
    """Send standard output and error to nowhere: a reward that prints 1 GB must not fill the actor's log."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
