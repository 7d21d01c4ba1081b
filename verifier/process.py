"""One worker, seen from the pool: start it, exchange one message, end it with everything it started."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from verifier.protocol import MAX_REPLY_BYTES, PREFIX, Ready, Reply, Request, Setup, VerifyItem, frame
from verifier.resolve import SpecError
from wire.process import signal_group

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
"""For the import of the user's module, which a deadline per verdict should not have to cover."""
EXIT_S = 1.0
"""How long a worker whose socket closed may take to become a dead process with a status."""
REAP_S = 10.0
MARK = "LEEWAY_VERIFIER"
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")


class WorkerDied(Exception):
    """The worker is of no use any more (`timeout`, `crash: signal 9`, ...). It still has to be killed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Worker:
    """A child process in a session of its own. Whoever starts one awaits `kill` in the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, child: socket.socket) -> None:
        self.name, self.calls = "", 0
        self._reader, self._writer = reader, writer
        self._process, self._lifeline, self._mark = _spawn(child)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(cls, spec: str, arguments: dict[str, Any], memory_mb: int) -> "Worker":
        """A worker that has imported `spec`. Raises SpecError with one line if it cannot."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker = cls(*await asyncio.open_connection(sock=ours), theirs)
        try:
            ready = msgspec.msgpack.decode(await worker._exchange(Setup(spec, arguments, memory_mb), START_S), type=Ready)
            if ready.error:
                raise SpecError(ready.error)
        except WorkerDied as death:
            await worker.kill()
            raise SpecError(f"verifier {spec!r}: its process did not survive the import ({death.reason})") from death
        except BaseException:
            await worker.kill()
            raise
        worker.name = ready.name
        return worker

    async def call(self, items: list[VerifyItem], deadline_s: float) -> Reply:
        """One reply within the deadline. Raises WorkerDied."""
        self.calls += 1
        body = await self._exchange(Request(self.calls, items), deadline_s)
        try:
            reply = msgspec.msgpack.decode(body, type=Reply)
        except msgspec.DecodeError as error:
            raise WorkerDied("crash: bad reply") from error
        if reply.id != self.calls or (reply.failure is None and len(reply.verdicts) != len(items)):
            raise WorkerDied("crash: bad reply")
        return reply

    async def kill(self) -> None:
        """End the process, its group, and whatever left the group but still carries the worker's mark in its environment."""
        signal_group(self._process.pid, signal.SIGKILL)  # safe: the process is not reaped yet, so its number is still its own
        _kill_marked(self._mark)
        try:
            await asyncio.wait({self._exited}, timeout=REAP_S)
        finally:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            os.close(self._lifeline)
            self._writer.transport.abort()
            self._process.poll()

    async def _exchange(self, message: msgspec.Struct, deadline_s: float) -> bytes:
        answer = asyncio.ensure_future(self._write_and_read(frame(message)))
        try:
            either: set[asyncio.Future[Any]] = {answer, self._exited}
            await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise WorkerDied(self._exited.result() if self._exited.done() else "timeout")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await asyncio.wait({self._exited}, timeout=EXIT_S)
            raise WorkerDied(self._exited.result() if self._exited.done() else "crash: closed its socket") from error
        finally:
            answer.cancel()  # the worker is killed after this, so no message can be lost

    async def _write_and_read(self, data: bytes) -> bytes:
        self._writer.write(data)
        await self._writer.drain()
        (length,) = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
        if length > MAX_REPLY_BYTES:
            raise WorkerDied("crash: bad reply")
        return await self._reader.readexactly(length)

    def _on_exit(self) -> None:
        """Note how the process ended, and leave it unreaped: `kill` still needs its number."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None  # only with WNOHANG
        self._exited.set_result(f"crash: {'exit' if status.si_code == os.CLD_EXITED else 'signal'} {status.si_status}")


def _spawn(child: socket.socket) -> tuple[subprocess.Popen[bytes], int, bytes]:
    """The process, the write end of its lifeline, and its mark."""
    lifeline, write_end = os.pipe()
    mark = secrets.token_hex(16)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "verifier.worker", str(child.fileno()), str(lifeline), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(child.fileno(), lifeline),
            env=_environment(mark),
        )
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(lifeline)
    return process, write_end, f"{MARK}={mark}".encode()


def _environment(mark: str) -> dict[str, str]:
    """Little, and the same everywhere: no keys, no GPU, one thread, one hash seed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    fixed = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {MARK: mark, "PYTHONPATH": path, **fixed, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}}


def _kill_marked(mark: bytes) -> None:
    """SIGKILL every process whose environment holds `mark`, until a look round finds no further one."""
    killed: set[int] = set()
    while new := _marked(mark) - killed:
        for pid in new:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended by itself
        killed |= new


def _marked(mark: bytes) -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path("/proc", name, "environ").read_bytes()
        except OSError:  # gone, or another user's: not ours to kill
            continue
        if mark in environment.split(b"\0"):
            found.add(int(name))
    return found
