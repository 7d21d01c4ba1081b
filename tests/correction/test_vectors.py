"""Golden vectors, made by an independent loop-by-loop reference in float64. Agreement asked for: 1e-9."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.diagnostics import effective_sample_size, k3
from correction.groupmass import cap_group_mass
from correction.mismatch import icepop, kpop, tis
from correction.ratios import mismatch_log_ratio, ratio, response_log_ratio, total_log_ratio
from learner.advantage import group_advantages
from learner.objective import aggregate, token_losses

SETS = json.loads((Path(__file__).parents[1] / "vectors" / "correction.json").read_text())["sets"]
CASES = [
    pytest.param(s["inputs"], c, id=f"{s['name']}-{i}-{c['function']}") for s in SETS for i, c in enumerate(s["cases"])
]
WIDTH = 16


def padded(rows: list[list[float]], mask: list[list[bool]]) -> Tensor:
    """NaN in padding and in every masked-out slot."""
    table = torch.full((len(rows), WIDTH), math.nan, dtype=torch.float64)
    for i, (row, keep) in enumerate(zip(rows, mask, strict=True)):
        for t, (value, kept) in enumerate(zip(row, keep, strict=True)):
            table[i, t] = value if kept else math.nan
    return table


def agrees(actual: Tensor, expect: list[list[float]], mask: list[list[bool]]) -> bool:
    """Equal to 1e-9 on every listed slot that is masked in, and exactly 0 in all others."""
    for i, row in enumerate(actual.tolist()):
        for t, value in enumerate(row):
            wanted = expect[i][t] if t < len(expect[i]) and mask[i][t] else None
            if (wanted is None and value != 0) or (wanted is not None and not abs(value - wanted) <= 1e-9):
                return False
    return True


@pytest.fixture(name="batch")
def _batch(request: pytest.FixtureRequest) -> dict[str, Any]:
    inputs = request.param
    mask = inputs["mask"]
    mask_RT = torch.zeros(len(mask), WIDTH, dtype=torch.bool)
    for i, row in enumerate(mask):
        mask_RT[i, : len(row)] = torch.tensor(row)
    batch = {role: padded(inputs[role], mask) for role in ("mu", "old", "cur")}
    return batch | {
        "mask": mask_RT,
        "rows": mask,
        "group": torch.tensor(inputs["group"]),
        "rewards": torch.tensor(inputs["rewards"], dtype=torch.float64),
    }


def check_factor(batch: dict[str, Any], function: str, arguments: dict[str, Any], expect: dict[str, Any]) -> None:
    mismatch = mismatch_log_ratio(batch["old"], batch["mu"])
    if function == "tis":
        factor = tis(mismatch, batch["mask"], **arguments)
    elif function == "icepop":
        factor = icepop(mismatch, batch["mask"], **arguments)
    else:
        factor = kpop(batch["old"], batch["mu"], batch["mask"], **arguments)
    assert agrees(factor.weight_RT, expect["weight"], batch["rows"])
    assert agrees(factor.keep_RT.double(), expect["keep"], batch["rows"])


def check_objective(batch: dict[str, Any], arguments: dict[str, Any], expect: dict[str, Any]) -> None:
    hyper = {k: v for k, v in arguments.items() if k != "name"}
    cur = batch["cur"].clone().requires_grad_()
    advantage = group_advantages(batch["rewards"], batch["group"], estimator="grpo")
    loss = token_losses(cur, batch["old"], advantage, batch["mask"], objective=arguments["name"], **hyper)
    assert agrees(loss.detach(), expect["loss"], batch["rows"])
    per_response = arguments["name"] == "gspo"
    (loss.sum(-1) / batch["mask"].sum(-1) if per_response else loss).sum().backward()
    assert cur.grad is not None and agrees(cur.grad, expect["grad"], batch["rows"])


def check_aggregate(batch: dict[str, Any], arguments: dict[str, Any], expect: dict[str, float]) -> None:
    hyper = {k: v for k, v in arguments.items() if k != "objective"}
    advantage = group_advantages(batch["rewards"], batch["group"], estimator="grpo")
    loss = token_losses(batch["cur"], batch["old"], advantage, batch["mask"], objective=arguments["objective"], **hyper)
    for mode, constant in (("token_mean", None), ("sequence_mean", None), ("constant", 64)):
        value = aggregate(loss, batch["mask"], mode=mode, constant=constant)
        assert float(value) == pytest.approx(expect["constant_64" if constant else mode], abs=1e-9)


@pytest.mark.parametrize(("batch", "case"), CASES, indirect=["batch"])
def test_golden_vector(batch: dict[str, Any], case: dict[str, Any]) -> None:
    function, arguments, expect = case["function"], case["arguments"], case["expect"]
    if function in ("tis", "icepop", "kpop"):
        check_factor(batch, function, arguments, expect)
    elif function == "cap_group_mass":
        total = response_log_ratio(total_log_ratio(batch["cur"], batch["mu"]), batch["mask"])
        weight = cap_group_mass(total, batch["group"], **arguments)
        assert weight.tolist() == pytest.approx(expect["weight_R"], abs=1e-9)
    elif function == "group_advantages":
        advantage = group_advantages(batch["rewards"], batch["group"], **arguments)
        assert advantage.tolist() == pytest.approx(expect["advantage_R"], abs=1e-9)
    elif function == "objective":
        check_objective(batch, arguments, expect)
    elif function == "aggregate":
        check_aggregate(batch, arguments, expect)
    else:
        assert function == "diagnostics"
        mismatch = mismatch_log_ratio(batch["old"], batch["mu"])
        weight = ratio(torch.where(batch["mask"], mismatch.value, 0.0))
        ess = effective_sample_size(weight, batch["mask"])
        assert float(ess) == pytest.approx(expect["ess_of_token_mismatch"], abs=1e-9)
        assert float(k3(mismatch, batch["mask"])) == pytest.approx(expect["k3_of_token_mismatch"], abs=1e-9)


def test_the_file_is_whole() -> None:
    assert [len(s["cases"]) for s in SETS] == [30, 30, 30]
