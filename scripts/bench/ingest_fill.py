"""A store with many short trained rollouts in it, written past the daemon: only its size matters."""

import os
from pathlib import Path

import msgspec
import numpy as np

from configs.schema import Config
from replay import rundir
from replay.core import INSERT_GROUP, Core
from replay.orders import order_columns
from replay.put import INSERT_ROLLOUT, INSERT_SPAN
from replay.start import open_core, read_prompts
from scripts.bench.ingest_clients import GROUP, blobs
from tests.support.replay import rollout
from wire.digest import digest
from wire.record import WorkOrder

SHORT, PART = 32, 1000


def fill(config: Config, run_dir: Path, rows: int) -> None:
    """Groups of 16, all trained; their ids are no order of the run's."""
    rundir.create(run_dir)
    rundir.save_config(run_dir, config)
    core = open_core(config, run_dir, read_prompts(config))
    payloads = [(payload, digest(payload)) for payload in blobs(np.random.default_rng(1), SHORT, 256)]
    groups = rows // GROUP
    core.store.db.execute("PRAGMA synchronous = OFF")
    for start in range(0, groups, PART):
        core.store.begin(0.0)
        _write(core, range(start, min(groups, start + PART)), payloads)
        core.store.commit()
    core.store.begin(0.0)
    core.store.count("produced", rows)
    core.store.commit()
    core.store.close()
    os.sync()  # a flush of what is measured must not wait for this


def _write(core: Core, numbers: range, payloads: list[tuple[bytes, str]]) -> None:
    orders = [WorkOrder(f"x{number:07d}", 1, "train", "p", "1", {}, GROUP, core.sampling) for number in numbers]
    core.store.db.executemany(INSERT_GROUP, [(f"{order.order_id}.1", order.order_id, 1, "train", "p", GROUP, "trained", "a0", None, 0, None,
                                              *order_columns(order)) for order in orders])
    rollouts, spans = [], []
    for order in orders:
        for sample in range(GROUP):
            head, _ = rollout(order, sample, 0, tokens=SHORT)
            payload, told = payloads[(len(rollouts) + sample) % len(payloads)]
            rollouts.append((head.rollout_id, f"{order.order_id}.1", sample, "trained", None, "a0", SHORT, 0, 0, 1.0, None,
                             msgspec.json.encode(head).decode(), "", payload, told, 0.0))
            spans.append((head.rollout_id, 0, 0, 0, SHORT, True))
    core.store.db.executemany(INSERT_ROLLOUT, rollouts)
    core.store.db.executemany(INSERT_SPAN, spans)
    core.store.db.execute("UPDATE spans SET source = 'resident', old_digest = '' WHERE source IS NULL")
