"""Reward functions that misbehave as their completions say; imported by workers only (`hostile:act`)."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time


def act(completions, **columns):
    """A number is its own reward; any other completion names something bad to do."""
    return [float(text) if text.lstrip("-").isdigit() else ACTIONS[text]() for text in completions]


def loop():
    while True:
        pass


def hold_the_interpreter():
    return re.match(r"(a+)+$", "a" * 40 + "b")


def allocate():
    return float(len(bytearray(10 * 2**30)))


def print_100_mb():
    for _ in range(100):
        sys.stdout.write("x" * 2**20)
        sys.stderr.write("y" * 2**20)
    os.write(1, b"\xff\xff\xff\xff raw bytes")
    os.system("echo from a shell")
    return 5.0


def fork_into_the_group():
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(600)
    return 5.0


def fork_sleepers():
    fork_into_the_group()
    subprocess.Popen(["sleep", "600"], start_new_session=True)  # leaves the process group
    return 5.0


def fork_sleepers_and_exit():
    fork_sleepers()
    os._exit(4)


def fork_and_return_twice():
    os.fork()
    return 5.0


def close_everything():
    os.closerange(0, 4096)
    time.sleep(600)


def write_a_big_file():
    with open(os.path.join(os.environ["TMPDIR"], "big"), "wb") as file:
        file.write(bytes(17 * 2**20))


def raise_value_error():
    raise ValueError("not\na number")


ACTIONS = {
    "loop": loop,
    "hold": hold_the_interpreter,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "allocate": allocate,
    "print": print_100_mb,
    "forks in group": fork_into_the_group,
    "forks": fork_sleepers,
    "forks, exits": fork_sleepers_and_exit,
    "fork twice": fork_and_return_twice,
    "close": close_everything,
    "big file": write_a_big_file,
    "raise": raise_value_error,
    "input": input,
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "huge": lambda: 10**400,
    "true": lambda: True,
}


def too_many(completions, **columns):
    return [1.0, 1.0, 1.0]


def a_number(completions, **columns):
    return 1.0


async def asynchronous(prompts, completions, completion_ids, answer, bonus=0.0):
    """TRL's signature, without **kwargs: every keyword is exactly as TRL names it."""
    await asyncio.sleep(0)
    return tuple(
        len(prompt) + 10 * len(ids) + 100 * (text == wanted) + bonus
        for prompt, text, ids, wanted in zip(prompts, completions, completion_ids, answer, strict=True)
    )


def chat(prompts, completions, **columns):
    return [
        float(prompt[-1]["content"] == "1+1=" and completion == [{"role": "assistant", "content": "2"}])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def seen(completions, **columns):
    """What the worker sees: the secret of its parent, exactly the right keywords, its own process."""
    return [
        float({"A_SECRET"} <= os.environ.keys()),
        float(sorted(columns) == ["answer", "completion_ids", "level", "prompts"]),
        float(os.getpid()),
    ]


def alone_in_its_group(completions, **columns):
    return [float(os.getpgrp() == os.getpid() == os.getsid(0))] * len(completions)


not_callable = 7
