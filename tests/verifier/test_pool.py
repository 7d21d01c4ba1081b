"""The pool with well-behaved functions: TRL's signature, names, parallel slots, recycling, a clean environment."""

import asyncio
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.verifier.helpers import item
from verifier import SpecError, VerifierPool, VerifyItem, check_spec
from verifier.resolve import target_of
from wire.record import Failed, Scored, Verdict

pytestmark = pytest.mark.usefixtures("wait_for_none")


async def verdicts_of(spec: str, *items: VerifyItem, **options: object) -> list[Verdict]:
    pool = VerifierPool(spec, **{"deadline_s": 30.0, **options})  # type: ignore[arg-type]
    await pool.start()
    try:
        return await pool.verify(list(items))
    finally:
        await pool.close()


def rewards(verdicts: list[Verdict]) -> list[object]:
    return [verdict.reward if isinstance(verdict, Scored) else verdict.reason for verdict in verdicts]


@pytest.mark.asyncio
async def test_trl_signature_asynchronous_with_ids_columns_and_arguments() -> None:
    items = [item("5", "2+3=", answer="5"), item("66", "1=", answer="7")]
    verdicts = await verdicts_of("hostile:asynchronous", *items, arguments={"bonus": 0.5})
    assert rewards(verdicts) == [4 + 10 + 100 + 0.5, 2 + 20 + 0 + 0.5]


@pytest.mark.asyncio
async def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text()
    blocks = dict(re.findall(r"^```(json|python|toml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    row, task = json.loads(blocks["json"]), tomllib.loads(blocks["toml"])["task"]
    (tmp_path / "my_rewards.py").write_text(blocks["python"])
    monkeypatch.chdir(tmp_path)
    prompt = row.pop("prompt")
    items = [item(text, prompt, **row) for text in ("42 apples", "It is 42", "24 apples", "no idea")]
    verdicts = await verdicts_of(task["verifier"], *items, arguments=task["verifier_arguments"])
    assert rewards(verdicts) == [1.2, 1.0, 0.0, 0.0]


@pytest.mark.asyncio
async def test_a_chat_prompt_gets_chat_completions() -> None:
    chat = [{"role": "user", "content": "1+1="}]
    verdicts = await verdicts_of("hostile:chat", VerifyItem(chat, "2", [2], {}), VerifyItem(chat, "3", [3], {}))
    assert rewards(verdicts) == [1.0, 0.0]


@pytest.mark.asyncio
async def test_verdicts_name_the_verifier_and_its_version() -> None:
    [verdict] = await verdicts_of("exact", item("5", answer="5"))
    assert (verdict.verifier, verdict.seconds > 0) == ("exact@1", True)


@pytest.mark.asyncio
async def test_the_worker_gets_the_columns_but_not_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "key")
    items = [item("1", answer="5"), item("2", level=3), item("3", answer="6")]
    secret, columns, pid = rewards(await verdicts_of("hostile:seen", *items))
    assert (secret, columns) == (0.0, 1.0)
    assert pid != os.getpid()


@pytest.mark.asyncio
async def test_a_worker_leads_its_own_session() -> None:
    assert rewards(await verdicts_of("hostile:alone_in_its_group", item("1"))) == [1.0]


@pytest.mark.asyncio
async def test_a_column_with_a_reserved_name_is_a_clear_failure() -> None:
    [verdict] = await verdicts_of("hostile:act", item("1", prompts="x"))
    assert isinstance(verdict, Failed)
    assert verdict.detail.startswith("rename the dataset column 'prompts'")


@pytest.mark.asyncio
async def test_recycling_replaces_the_worker_and_keeps_the_verdicts() -> None:
    pool = VerifierPool("hostile:seen", deadline_s=30, recycle_after=2)
    await pool.start()
    items = [item("1", answer=1, level=1)] * 3
    pids = [rewards(await pool.verify(items))[2] for _ in range(5)]
    await pool.close()
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


@pytest.mark.asyncio
async def test_slots_judge_in_parallel_and_no_call_is_confused_with_another() -> None:
    pool = VerifierPool("hostile:act", deadline_s=30, slots=3)
    await pool.start()
    calls = [pool.verify([item(str(10 * call + row)) for row in range(4)]) for call in range(50)]
    answers = await asyncio.gather(*calls)
    await pool.close()
    assert [rewards(answer) for answer in answers] == [[10.0 * call + row for row in range(4)] for call in range(50)]


@pytest.mark.asyncio
async def test_no_items_no_verdicts() -> None:
    assert await verdicts_of("exact") == []


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("exat", "verifier 'exat' is not a built-in (exact, reasoning_gym, math, json_schema, code); did you mean 'exact'?"),
        ("maths", "did you mean 'math'?"),
        ("zzz", "did you mean "),
        (":f", "is not a built-in"),
        ("no_such_module:f", "importing 'no_such_module' failed with ModuleNotFoundError: No module named 'no_such_module'"),
        ("hostile:no_such", "module 'hostile' has no 'no_such'"),
        ("hostile:not_callable", "'not_callable' is a int, not a function"),
        ("broken:f", "importing 'broken' failed with SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("deadly:f", "its process did not survive the import (crash: exit 5)"),
    ],
)
def test_a_bad_spec_is_one_clear_line(spec: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("f = (\n")
    (tmp_path / "deadly.py").write_text("import os; os._exit(5)")
    (tmp_path / "hostile.py").write_text((Path(__file__).parent / "hostile.py").read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        check_spec(spec)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SpecError)
    assert caught.value.exit_code == 2


def test_a_good_spec_passes_and_the_caller_imports_nothing() -> None:
    check_spec("hostile:act")
    check_spec("exact")
    assert "hostile" not in sys.modules
    assert target_of("math") == "verifier.builtin.maths:equivalent"
