"""Replay says when its memory grows beyond what it does itself, and says it again only when it has doubled."""

import mmap
from pathlib import Path

from replay.memory import MemoryWatch, resident
from tests.support.replay import DaemonThread, make_config, stats

GIB = 1 << 30


def test_marks() -> None:
    found = [GIB]
    watch = MemoryWatch(lambda: found[0])
    for now, says in ((GIB, None), (3 * GIB - 1, None), (3 * GIB, "3.0 GiB"), (4 * GIB, None), (6 * GIB - 1, None), (13 * GIB, "13.0 GiB"),
                      (GIB, None), (26 * GIB, "26.0 GiB")):
        found[0] = now
        line = watch.look()
        assert (line is None) == (says is None)
        assert line is None or f"replay has {says} of memory" in line


def test_the_measure_is_this_process_s_memory() -> None:
    before = resident()
    with mmap.mmap(-1, 64 << 20) as much:  # not from the heap, which may have as much to spare
        much.write(b"x" * (64 << 20))
        assert 60 << 20 < resident() - before < 200 << 20


def test_the_daemon_counts_it(tmp_path: Path) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        daemon.daemon.memory = MemoryWatch(iter([0, *[5 * GIB] * 1000]).__next__)
        while not (count := stats(daemon.endpoint)["counters"].get("memory_warnings")):
            pass
        assert count == 1
