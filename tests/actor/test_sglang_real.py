"""A real SGLang server: log-probs equal transformers' forward, version spans are exact, and every way of swapping does what it says."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from actor.engine import Generated, GenerateRequest
from actor.sglang_http import SGLangEngine
from actor.swap import SwapMode, swap
from tests.support.engine import RealEngine, real_engine  # noqa: F401
from tests.support.tiny_model import VOCAB, forward_logprobs
from wire.errors import EngineError
from wire.record import Span

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

LONG = {"temperature": 1.0, "max_new_tokens": 500}
PROMPTS = [[3, 4, 5, 6], [7, 8], [3, 4, 5, 9]]


@pytest.fixture(name="real")
def shorter_name(real_engine: RealEngine) -> Iterator[RealEngine]:  # noqa: F811
    return real_engine


async def nothing_in_flight() -> None:
    pass


async def load(real: RealEngine, version: int, mode: SwapMode = "drain") -> None:
    await swap(real.engine, mode, str(real.folders[version]), version, nothing_in_flight)


def error_of(real: RealEngine, prompt: list[int], made: Generated, temperature: float = 1.0) -> float:
    """Largest difference from transformers over all spans, each under its own version."""
    response = made.output_ids.tolist()
    errors = []
    for span in made.spans:
        expected = forward_logprobs(real.folders[span.version], prompt, response, temperature)
        errors.append(np.abs(made.logprobs - expected)[span.start:span.end].max())
    return float(max(errors))


async def swapped_in_mid_response(real: RealEngine, mode: SwapMode) -> list[Generated]:
    """Version 0 answers PROMPTS at length; version 1 arrives meanwhile."""
    await load(real, 0)
    answers = asyncio.create_task(real.engine.generate(GenerateRequest(PROMPTS, LONG)))
    await asyncio.sleep(0.3)

    async def idle() -> None:
        await answers

    await swap(real.engine, mode, str(real.folders[1]), 1, idle)
    return await answers


async def test_info_and_health(real: RealEngine) -> None:
    info = await real.engine.info()
    assert (info.engine_version, info.dtype, info.attention, info.device, info.vocab_size, info.context_length) == (
        "sglang 0.5.23", "float32", "torch_native", "cpu", VOCAB, 1022)
    assert info.unsafe == ()
    assert await real.engine.health()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_transformers(real: RealEngine, temperature: float) -> None:
    await load(real, 0)
    made = await real.engine.generate(GenerateRequest(PROMPTS, {"temperature": temperature, "max_new_tokens": 40}, top_logprobs=3))
    for prompt, answer in zip(PROMPTS, made, strict=True):
        assert answer.finish_reason == "length"
        assert len(answer.output_ids) == 40
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(0, 0, 40)]
        assert error_of(real, prompt, answer, temperature) < 1e-4
        assert answer.top_ids is not None
        assert answer.top_ids.shape == (40, 3)


async def test_the_end_token_and_its_logprob_are_in_the_response(real: RealEngine) -> None:
    await load(real, 0)
    stops = [2, 9, 11, 30]
    for answer in await real.engine.generate(GenerateRequest([[5, 6]] * 8, LONG | {"stop_token_ids": stops})):
        assert answer.finish_reason == "stop"
        assert answer.output_ids[-1] in stops
        assert not set(answer.output_ids[:-1].tolist()) & set(stops)
        assert len(answer.logprobs) == len(answer.output_ids) == answer.spans[-1].end
        assert error_of(real, [5, 6], answer) < 1e-4


async def test_the_whole_context_is_given(real: RealEngine) -> None:
    await load(real, 0)
    room = (await real.engine.info()).context_length
    [answer] = await real.engine.generate(GenerateRequest([[5] * (room - 12)], LONG | {"max_new_tokens": 12}))
    assert len(answer.output_ids) == 12
    [answer] = await real.engine.generate(GenerateRequest([[5] * (room - 5)], LONG | {"max_new_tokens": 1}))
    assert len(answer.output_ids) == 1


async def test_score(real: RealEngine) -> None:
    tokens = [*np.random.default_rng(0).integers(3, VOCAB, 63).tolist(), VOCAB - 1]
    for version in (1, 0):
        await load(real, version)
        expected = forward_logprobs(real.folders[version], tokens[:1], tokens[1:])
        for _ in range(2):  # the second time from a warm prefix cache
            assert np.abs(await real.engine.score(tokens) - expected).max() < 1e-4


async def test_retract_in_mid_response(real: RealEngine) -> None:
    for prompt, answer in zip(PROMPTS, await swapped_in_mid_response(real, "retract"), strict=True):
        assert [span.version for span in answer.spans] == [0, 1]
        assert answer.spans[0].end == answer.spans[1].start > 0
        assert answer.spans[1].end == len(answer.output_ids) == len(answer.logprobs) == 500
        assert error_of(real, prompt, answer) < 1e-4


async def test_drain(real: RealEngine) -> None:
    for prompt, answer in zip(PROMPTS, await swapped_in_mid_response(real, "drain"), strict=True):
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(0, 0, 500)]
        assert error_of(real, prompt, answer) < 1e-4
    [answer] = await real.engine.generate(GenerateRequest([[5]], LONG | {"max_new_tokens": 3}))
    assert [span.version for span in answer.spans] == [1]


async def test_abort(real: RealEngine) -> None:
    for prompt, answer in zip(PROMPTS, await swapped_in_mid_response(real, "abort"), strict=True):
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.output_ids) < 500
        assert [span.version for span in answer.spans] == [0]
        assert error_of(real, prompt, answer) < 1e-4
    assert await real.engine.weight_version() == 1


async def test_in_place_matches_neither_version(real: RealEngine) -> None:
    [answer, *_] = await swapped_in_mid_response(real, "in_place")
    assert [span.version for span in answer.spans] == [0, 1]
    assert error_of(real, PROMPTS[0], answer) > 0.1
    await load(real, 1)


async def test_a_label_that_is_not_ours(real: RealEngine) -> None:
    """Somebody else relabels the weights: reading the version back says so, and a clean swap mends it."""
    await real.engine._json("POST", "/update_weight_version", {"new_version": "v0", "abort_all_requests": False})
    with pytest.raises(EngineError) as caught:
        await real.engine.weight_version()
    assert caught.value.suspect
    await load(real, 1)
    assert await real.engine.weight_version() == 1


async def test_abort_all_while_paused_returns_what_was_made_or_nothing(real: RealEngine) -> None:
    await load(real, 0)
    await real.engine.pause("retract")
    answers = asyncio.create_task(real.engine.generate(GenerateRequest([[5, 6]], LONG)))
    await asyncio.sleep(0.2)
    await real.engine.resume()
    await asyncio.sleep(0.2)
    await real.engine.pause("retract")
    await real.engine.abort_all()
    [answer] = await answers
    made = len(answer.output_ids)  # SGLang gives back the tokens of a retracted row only if it had sent some of them on
    assert (answer.finish_reason, len(answer.logprobs)) == ("abort", made)
    assert answer.spans == ((Span(0, 0, made),) if made else ())
    assert np.isfinite(answer.logprobs).all()
    await real.engine.resume()
    await real.engine.flush_cache()


async def test_strangers_cannot_drive_it(real: RealEngine) -> None:
    stranger = SGLangEngine(real.process.url, None, VOCAB)
    for call in (stranger.info(), stranger.score([3, 4]), stranger.load_weights(str(real.folders[1]), 1), stranger.pause("abort")):
        with pytest.raises(EngineError, match="401"):
            await call
    await stranger.close()
