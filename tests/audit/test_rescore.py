"""Re-scoring: the stored old log-probs against the stored weights, computed again."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from leeway.rescoring import compare, rescore_sample
from replay.rows import SpanRow
from tests.support.run_builder import RunBuilder
from tests.support.tiny_model import forward_logprobs, make_tiny_model
from wire.digest import digest
from wire.record import F32


def span(old: list[float], trainer: str = "here", start: int = 1) -> SpanRow:
    data = np.array(old, F32).tobytes()
    return SpanRow("r", 0, 3, start, start + len(old), 1, "resident", "w", trainer, 4, 64, 0, data, digest(data), None)


def test_the_same_trainer_must_agree_bit_for_bit() -> None:
    scored = np.array([-9.0, -1.0, -2.0, -9.0], F32)
    assert compare([span([-1.0, -2.0])], [scored], "here", 1e-4)[:5] == ([], [], 1, 0, 0.0)
    found = compare([span([-1.0, np.nextafter(np.float32(-2.0), np.float32(0))])], [scored], "here", 1e-4).findings
    assert [(f.kind, f.ids) for f in found] == [("re-score", ["r", "v3"])]
    assert "bit for bit: token 2 differs by" in found[0].text


def test_another_trainer_may_differ_within_the_tolerance() -> None:
    scored = np.array([-9.0, -1.00005, -2.0], F32)
    found = compare([span([-1.0, -2.0], "there")], [scored], "here", 1e-4)
    assert (found.findings, found.exact, found.close) == ([], 0, 1)
    assert found.largest == pytest.approx(5e-5, rel=0.01)
    assert "within 1e-05: token 1" in compare([span([-1.0, -2.0], "there")], [scored], "here", 1e-5).findings[0].text


@pytest.mark.parametrize("values", [[-1.0, np.nan], [-1.0]])
def test_nan_or_too_few_never_agree(values: list[float]) -> None:
    assert compare([span([-1.0, -2.0], "there")], [np.array([-9.0, *values], F32)], "here", 1e-4).findings


def test_what_is_gone_is_a_note() -> None:
    assert compare([span([-1.0])], [None], "here", 1e-4) == ([], ["not retained: the weights of 1 sampled spans"], 0, 0, 0.0)


class ModelRun(RunBuilder):
    """Versions are real tiny models, anchors transformers' own forward, one response at a time: another computation than ours."""

    def write_weights(self, folder: Path, version: int) -> None:
        make_tiny_model(folder, version, hidden=32, layers=1)

    def old_logprobs(self, rollout: str, version: int, start: int, end: int) -> np.ndarray:
        ids = np.frombuffer(self.core.store.one("SELECT payload FROM rollouts WHERE rollout_id = ?", rollout), "<i4")[:9].tolist()
        return forward_logprobs(self.run_dir / f"weights/v{version:06d}", ids[:3], ids[3:])[start:end]


def test_a_forged_anchor_is_found_with_the_model(tmp_path: Path) -> None:
    build = ModelRun(tmp_path / "model", updates=2)
    build.update()
    build.update()
    run_dir = build.finish()
    found = rescore_sample(run_dir)
    assert (found.findings, found.notes, found.exact) == ([], [], 0)
    assert found.close == 12
    assert found.largest < 1e-5
    db = sqlite3.connect(run_dir / "replay.sqlite")
    rollout, old = db.execute("SELECT rollout_id, old FROM spans WHERE span = 1 ORDER BY 1").fetchone()
    forged = (np.frombuffer(old, F32) - np.float32(0.001)).tobytes()
    db.execute("UPDATE spans SET old = ?, old_digest = ? WHERE rollout_id = ? AND span = 1", (forged, digest(forged), rollout))
    db.commit()
    db.close()
    assert [f.ids for f in rescore_sample(run_dir).findings] == [[rollout, "v1"]]
