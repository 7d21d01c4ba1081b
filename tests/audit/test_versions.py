"""`leeway versions` on a small run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leeway import cli, versions_command


def test_a_line_per_version(run: Path, damage: Callable[..., list[tuple]], capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a fork, and where a response was sampled with two versions: it counts under both, and once under each."""
    for version, digest in enumerate("abcde"):
        damage("UPDATE versions SET weights_digest = ? WHERE version = ?", digest * 64, version)
    damage("UPDATE versions SET state = 'orphaned' WHERE version = 4")
    damage("UPDATE spans SET version = 3 WHERE rollout_id = 't0000000.1.0'")
    for span, start, end in [(7, 90, 95), (8, 95, 97)]:
        damage("""INSERT INTO spans (rollout_id, span, version, start, "end", kv_clean) VALUES ('t0000000.1.0', ?, 0, ?, ?, 1)""",
               span, start, end)
    assert cli.main(["versions", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "version  from  update  state     files    checkpoint  rollouts  tokens  held-out  weights",
        "v0       -     -       live      removed  -           8         33      0.5 / 1   aaaaaaaaaaaaaaaa",
        "v1       v0    1       live      stored   -           13        34      -         bbbbbbbbbbbbbbbb",
        "v2       v1    2       live      stored   removed     13        44      -         cccccccccccccccc",
        "v3       v2    4       live      stored   complete    5         22      -         dddddddddddddddd",
        "v4       v3    5       orphaned  stored   -           0         0       0.5 / 1   eeeeeeeeeeeeeeee"]


def test_as_json_it_is_all_there(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert versions_command.main([str(pristine), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    first = {key: rows[0][key] for key in rows[0] if key not in ("manifest_digest", "weights_digest", "committed_at")}
    assert first == {"version": 0, "parent": None, "update_id": None, "path": "weights/v000000", "state": "live", "retained": False,
                     "checkpoint": None, "heldout": [[0.5, 1.0]], "rollouts": 8, "tokens": 32}
    assert [len(row["weights_digest"]) for row in rows] == [64] * 5
    assert [row["update_id"] for row in rows] == [None, 1, 2, 4, 5]  # update 3 was skipped: no version
