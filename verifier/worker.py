"""The child process: confines itself, imports the reward function, then answers requests until its socket closes.

Started by `process.py` as `python -P -m verifier.worker SOCKET LIFELINE PARENT` (two inherited descriptors and a process id).
"""

import asyncio
import os
import socket
import sys
from typing import BinaryIO

import msgspec

from verifier.call import call_reward
from verifier.confine import end_with_parent, limit_resources, silence_output
from verifier.protocol import PREFIX, Ready, Reply, Request, Setup, frame
from verifier.resolve import Reward, SpecError, resolve
from wire.record import Failed


def main(socket_fd: int, lifeline: int, parent: int) -> None:
    end_with_parent(lifeline, parent)
    channel = socket.socket(fileno=socket_fd)
    channel.set_inheritable(False)
    stream = channel.makefile("rb")
    setup = msgspec.msgpack.decode(_read(stream), type=Setup)
    limit_resources(setup.memory_mb)
    silence_output()
    sys.path.insert(0, os.getcwd())
    try:
        reward, name = resolve(setup.spec)
    except SpecError as error:
        channel.sendall(frame(Ready(error=str(error))))
        return
    channel.sendall(frame(Ready(name)))
    serve(channel, stream, reward, setup)


def serve(channel: socket.socket, stream: BinaryIO, reward: Reward, setup: Setup) -> None:
    worker = os.getpid()
    requests = msgspec.msgpack.Decoder(Request)
    runner = asyncio.Runner()  # one loop for all calls, made at the first asynchronous one
    while body := _read(stream):
        request = requests.decode(body)
        outcome = call_reward(reward, request.items, setup.arguments, runner)
        if os.getpid() != worker:  # user code forked and came back: only the worker itself may answer
            os._exit(1)
        if isinstance(outcome, Failed):
            reply = Reply(request.id, failure=outcome)
        else:
            reply = Reply(request.id, verdicts=outcome)
        channel.sendall(frame(reply))


def _read(stream: BinaryIO) -> bytes:
    """The next message's body; empty once the pool has closed its end."""
    prefix = stream.read(PREFIX.size)
    return stream.read(PREFIX.unpack(prefix)[0]) if len(prefix) == PREFIX.size else b""


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
