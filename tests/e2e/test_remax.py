"""A short run of the demo under ReMax, with every part real: each group has its greedy reward, no greedy token is trained."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from replay.reader import RunReader
from tests.support.whole_run import WholeRun, books_balance
from wire.manifest import version_path
from wire.record import RolloutHead, unpack_payload

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.deepspeed, pytest.mark.timeout(600)]

UPDATES, GROUPS = 6, 8


@pytest.fixture(scope="module")
def run(make_run: Callable[..., WholeRun]) -> WholeRun:
    run = make_run("remax", "recipe.name=remax", f"learner.updates={UPDATES}", f"learner.groups_per_update={GROUPS}", "sampling.n=4",
                   "eval.prompts=32", "eval.samples=1")
    run.start()
    code, out = run.finish(270)
    assert code == 0, out
    return run


def test_each_update_subtracted_the_greedy_rewards_of_its_groups(run: WholeRun) -> None:
    with RunReader(run.dir) as reader:
        records = [record for _, record in reader.records()]
        assert len(records) == UPDATES
        for record in records:
            stored = [reader.one("SELECT reward FROM eval_rollouts WHERE rollout_id = ?", f"{group}.4") for group in record["group_ids"]]
            assert record["greedy_rewards"] == stored
            assert len(stored) == GROUPS
            assert all(rollout.endswith((".0", ".1", ".2", ".3")) for rollout in record["rollout_ids"])


def test_a_greedy_response_is_the_likeliest_token_at_every_step(run: WholeRun) -> None:
    """Straight from transformers, under the stored weights of each span's version; ties within 1e-4 pass."""
    models, seen = {}, 0
    with RunReader(run.dir) as reader:
        kept = {version for version, in reader.sql("SELECT version FROM versions WHERE retained")}
        rows = reader.sql("SELECT head, payload FROM eval_rollouts WHERE eval_id = 0 AND payload IS NOT NULL")
    for text, data in rows:
        head = msgspec.json.decode(text, type=RolloutHead)
        payload = unpack_payload(head, data)
        ids = torch.from_numpy(np.concatenate([payload.prompt_ids, payload.response_ids]).astype(np.int64))
        for span in head.spans:
            if span.version not in kept:
                continue
            if span.version not in models:
                models[span.version] = AutoModelForCausalLM.from_pretrained(run.dir / version_path(span.version), dtype=torch.float32)
            with torch.no_grad():
                logits = models[span.version](ids[None]).logits[0]
            for at in range(head.prompt_len + span.start, head.prompt_len + span.end):
                assert logits[at - 1, ids[at]] >= logits[at - 1].max() - 1e-4
                seen += 1
    assert len(models) > 1
    assert seen > 50


def test_the_books_balance_without_them(run: WholeRun) -> None:
    rollouts = run.summary()["rollouts"]
    assert books_balance(rollouts)
    assert rollouts["trained"] == UPDATES * GROUPS * 4
    assert all(line["greedy_reward"] in [count / GROUPS for count in range(GROUPS + 1)] for line in run.metrics())


def test_the_audit_is_clean(run: WholeRun) -> None:
    audit = run.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_an_update_can_be_run_again(run: WholeRun) -> None:
    again = run.tool("audit", "--update", str(UPDATES))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "clean" in again.stdout
