"""`leeway whatif RUN --update U [--json]`: one recorded batch under every corrector and recipe, side by side."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from leeway.tools import one_line, tool_parser
from replay.baselines import baselines_of
from replay.reader import RunReader
from replay.rows import ColumnRow, RolloutRow, UpdateRow
from wire.errors import ConfigError
from wire.manifest import version_path
from wire.messages import UpdateRecord
from wire.record import ANCHOR_SOURCES, F32, RolloutHead, unpack_payload

TYPES: dict[str, np.dtype[Any]] = {"f4": F32, "u1": np.dtype("u1")}


def whatif(run_dir: Path, update: int) -> dict[str, Any]:
    """As plain JSON. Needs torch. ConfigError for an update that is unknown, was skipped, or whose tokens are not retained;
    WeightsError for damaged weights."""
    from transformers.utils.logging import disable_progress_bar

    from learner.model import load_policy, set_determinism
    from learner.publish import read_version
    from learner.whatif import compare
    from leeway.variants import variants

    disable_progress_bar()
    with RunReader(run_dir) as run:
        config, record = run.config(), read_record(run, update)
        logged = read_batch(run, record)
    set_determinism(config.run.seed, "cpu")
    folder, policy = run_dir / version_path(record.version_in), None
    if read_version(run_dir, record.version_in) is not None and (folder / "config.json").is_file():
        policy = load_policy(str(folder), config.model.dtype, config.model.attention)
    found = compare(logged, config, variants(config), policy)
    return {"update": update, "version_in": record.version_in, "rollouts": len(record.rollout_ids), "tokens": sum(record.response_lens),
            **found._asdict()}


def read_record(run: RunReader, update: int) -> UpdateRecord:
    row = next(run.read(UpdateRow, "update_id = ?", update), None)
    if row is None:
        last = run.one("SELECT max(update_id) FROM updates")
        raise ConfigError(f"no update {update} in {run.run_dir}: " + ("there is none yet" if last is None else f"there are 1 to {last}"))
    if row.skipped:
        raise ConfigError(f"update {update} was skipped: no token was trained, so nothing was recorded of it")
    return msgspec.json.decode(row.record, type=UpdateRecord)


def read_batch(run: RunReader, record: UpdateRecord) -> Any:
    """A `learner.whatif.Logged`."""
    import torch

    from learner.batch import Anchor, LeaseRows, to_table
    from learner.whatif import Logged

    columns = {row.name: np.frombuffer(row.data, TYPES[row.dtype]) for row in run.read(ColumnRow, "update_id = ?", record.update)
               if row.data is not None}
    heads, payloads, anchors, at = [], [], {}, 0
    for rollout_id in record.rollout_ids:
        head = msgspec.json.decode(next(run.read(RolloutRow, "rollout_id = ?", rollout_id)).head, type=RolloutHead)
        data = run.payload(rollout_id)
        if data is None or "old" not in columns:
            raise ConfigError(f"the tokens of update {record.update} are not retained{still_there(run)}; a run with "
                              "replay.retain_payloads = true keeps all")
        for index, span in enumerate(head.spans):
            part = slice(at + span.start, at + span.end)
            source = ANCHOR_SOURCES[columns["old_source"][part][0]]
            anchors[rollout_id, index] = Anchor(source, columns["old"][part] if source != "missing" else np.zeros(0, F32))
        heads.append(head)
        payloads.append(unpack_payload(head, data))
        at += head.response_len
    lease = LeaseRows(record.update, record.version_in, record.group_ids, heads, payloads, anchors,
                      baselines_of(run.db, record.group_ids))
    lens_R = torch.tensor(record.response_lens)
    response_RT = torch.arange(int(lens_R.max())) < lens_R[:, None]

    def table(name: str) -> Any:
        return to_table(torch.from_numpy(columns[name].copy()), response_RT) if name in columns else None

    accepted = table("accepted")
    one_step, averaged = len(record.steps) == 1, record.prox_source == "ewma"
    prox = (table("cur") if one_step else None) if averaged else table("prox")  # with one step the training forward is under version_in
    return Logged(lease, prox, table("prox") if averaged else None, table("cur"), table("ref"), table("start_kl"),
                  None if accepted is None else accepted.bool())


def still_there(run: RunReader) -> str:
    """Which updates can be tried instead."""
    first, last = run.sql("SELECT min(update_id), max(update_id) FROM rollouts WHERE state = 'trained' AND payload IS NOT NULL")[0]
    return "" if first is None else f"; those of updates {first} to {last} are"


LEGEND = """ess, entropy: of the weights, 1 is even. kept: share of the tokens; mass: of the sum of their ratios prox/mu.
active: of the tokens with an advantage, those that still have a gradient. KL and entropy terms are left out."""


def text(values: dict[str, Any]) -> str:
    """The same for people: a line per variant."""
    buckets = [f"{low}-{high}" if low < high else str(low) for low, high in values["buckets"]]
    head = ["", "ess", "entropy", "kept", "mass", "active", "cosine", "norm", *(f"masked {bucket}" for bucket in buckets)]
    rows = [head, *([row["name"], *(_cell(row.get(key)) for key in ("ess", "weight_entropy", "kept", "kept_mass", "active", "cosine",
                                                                   "norm_ratio")), *map(_cell, row["masked_by_length"])]
                    for row in values["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in rows]
    title = (f"update {values['update']} from version {values['version_in']}: {values['rollouts']} rollouts, {values['tokens']} tokens; "
             f"masked shares by response length")
    exact = values["exact_ess"]
    notes = [LEGEND] + ([] if exact is None else [
        "cosine, norm: against the score function, with the line's own advantages and aggregation, under exact whole-response ratios "
        f"prox/mu (scaled to mean 1), whose effective sample size is {exact:.3f}"])
    notes += [values["note"]] if values["note"] else []
    refused = [f"  {name}: {reason}" for name, reason in values["refused"]]
    return "\n".join([title, "", *lines, "", *notes, *(["not possible here:", *refused] if refused else [])])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(arguments: list[str]) -> int:
    parser = tool_parser("leeway whatif", __doc__)
    parser.add_argument("--update", metavar="U", type=int, required=True, help="the update whose batch is tried")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def body() -> int:
        values = whatif(options.run, options.update)
        print(json.dumps(values, indent=1) if options.json else text(values))
        return 0

    return one_line(body)
