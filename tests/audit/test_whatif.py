"""`leeway whatif`: on a run with real tiny models, and what it says when it cannot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.recipes import RECIPES
from leeway import whatif
from leeway.variants import CORRECTORS, variants
from tests.audit.test_rescore import ModelRun


@pytest.fixture(scope="module")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = ModelRun(tmp_path_factory.mktemp("whatif") / "model", updates=2)
    build.update()
    build.update()
    return build.finish()


def test_every_corrector_and_recipe_side_by_side(model_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.main([str(model_run), "--update", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in found["rows"]} | {name for name, _ in found["refused"]}
    assert names == {"as run", *(f"as run, {name}" for name in CORRECTORS), *RECIPES}
    assert len(names) == len(found["rows"]) + len(found["refused"])
    assert {"as run", "grpo", "dapo_tis", "tis", "icepop", "gmc_grpo", "gspo", "cispo"} <= {row["name"] for row in found["rows"]}
    assert (found["version_in"], found["rollouts"], found["tokens"], found["note"]) == (1, 4, 24, None)
    for row in found["rows"]:
        assert 0 < row["ess"] <= 1 + 1e-6 or row["kept"] == 0
        assert row["cosine"] is None or -1 <= row["cosine"] <= 1 + 1e-6
        assert len(row["masked_by_length"]) == len(found["buckets"])
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["as run"]["cosine"] != by_name["gmc_grpo"]["cosine"]  # mu is far from old in this run


def test_for_people_a_line_each(model_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.main([str(model_run), "--update", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("update 1 from version 0: 4 rollouts, 24 tokens")
    assert sum(line.startswith("as run") for line in out.splitlines()) >= 10
    assert "whose effective sample size is" in out
    assert "  ewma_ppo: needs a running average of the weights, which this run did not keep" in out


@pytest.mark.parametrize(("update", "text"), [
    (99, "there are 1 to "), (3, "update 3 was skipped"), (1, "tokens of update 1 are not retained; those of updates ")])
def test_one_line_when_it_cannot(pristine: Path, update: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.main([str(pristine), "--update", str(update)]) == 2
    assert text in capsys.readouterr().err


def test_without_weights_there_are_no_gradients(run: Path, damage: Callable[..., object]) -> None:
    last = damage("SELECT max(update_id) FROM updates WHERE NOT skipped")[0][0]  # type: ignore[index]
    found = whatif.whatif(run, last)
    assert "weights that the update began from are not retained" in found["note"]
    assert "cosine" not in found["rows"][0]


def test_variants_have_names_of_their_own(pristine: Path) -> None:
    from replay.reader import RunReader

    with RunReader(pristine) as reader:
        found = variants(reader.config())
    assert len({one.name for one in found}) == len(found)
