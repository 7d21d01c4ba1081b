"""What SGLang may answer, and what becomes of it: against a small HTTP server that answers as told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from actor.engine import GenerateRequest
from actor.sglang_http import SGLangEngine
from actor.swap import swap
from wire.errors import EngineError
from wire.record import Span

INFO = {
    "version": "0.5.23", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch", "quantization": None,
    "tp_size": 1, "max_req_input_len": 26, "max_total_num_tokens": 4096, "device": "cpu", "enable_deterministic_inference": False,
    "model_path": "/m", "kv_cache_dtype": "auto", "host": "127.0.0.1", "api_key": "key", "trust_remote_code": False}
REQUEST = GenerateRequest([[1, 2]], {"temperature": 1.0, "max_new_tokens": 4})

Answer = tuple[int, Any] | Callable[[web.Request], Awaitable[web.StreamResponse]]


def row(**meta: Any) -> dict[str, Any]:
    """A clean row of two tokens for a prompt of two."""
    return {"output_ids": [5, 2], "meta_info": {
        "prompt_tokens": 2, "finish_reason": {"type": "stop", "matched": 2}, "e2e_latency": 0.25,
        "output_token_logprobs": [[-0.5, 5, None], [-0.10000000149011612, 2, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}]} | meta}


class Server:
    """`answers[path]` is (status, JSON or bytes), or a coroutine that answers. `got` keeps what was sent."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            "/server_info": (200, INFO), "/model_info": (200, {"weight_version": "3"}), "/ready": (200, b""), "/generate": (200, [row()]),
            "/pause_generation": (200, {}), "/continue_generation": (200, {}), "/update_weights_from_disk": (200, {"success": True}),
            "/flush_cache": (200, b"Cache flushed"), "/abort_request": (200, b""), "/health_generate": (200, b"")}
        self.got: list[tuple[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.got.append((request.path, await request.json() if request.can_read_body else None))
        if request.headers.get("Authorization") != "Bearer key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer = self.answers[request.path]
        if callable(answer):
            return await answer(request)
        status, body = answer
        return web.Response(status=status, body=body) if isinstance(body, bytes) else web.json_response(body, status=status)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[Server, SGLangEngine]]:
    fake, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    engine = SGLangEngine(f"http://127.0.0.1:{port}", "key", 8, generate_timeout_s=0.3, control_timeout_s=0.3)
    yield fake, engine
    await engine.close()
    await runner.cleanup()


async def test_a_clean_row(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    [made] = await engine.generate(REQUEST)
    assert made.output_ids.tolist() == [5, 2]
    assert made.output_ids.dtype == np.int32
    assert made.logprobs.dtype == np.float32
    assert made.logprobs.tolist() == [-0.5, float(np.float32(-0.1))]
    assert made.spans == (Span(3, 0, 2),)
    assert made.finish_reason == "stop"
    assert made.seconds == 0.25
    assert made.top_ids is None
    path, body = fake.got[-1]
    assert path == "/generate"
    assert body["input_ids"] == [[1, 2]]
    assert body["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 4, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
                                       "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


async def test_the_behaviour_top_k(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(output_top_logprobs=[[[-0.5, 5, None], [-1.5, 4, None]], [[-0.1, 2, None], [-2.5, 0, None]]])])
    [made] = await engine.generate(GenerateRequest([[1, 2]], REQUEST.sampling, top_logprobs=2))
    assert made.top_ids is not None
    assert made.top_logprobs is not None
    assert made.top_ids.tolist() == [[5, 4], [2, 0]]
    assert made.top_logprobs.tolist() == [[-0.5, -1.5], [float(np.float32(-0.1)), -2.5]]


async def test_two_versions_in_one_response(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    fake.answers["/generate"] = (200, [row(weight_versions=spans)])
    [made] = await engine.generate(REQUEST)
    assert made.spans == (Span(3, 0, 1), Span(4, 1, 2))


ABORTED = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "e2e_latency": 0.25}


@pytest.mark.parametrize(("ids", "meta"), [
    ([], ABORTED),  # it waited, or had been retracted: SGLang says no more
    ([29, 32], ABORTED),  # tokens without log-probs are none
    ([], row(output_token_logprobs=[], weight_versions=[{"version": "3", "start": 0, "end": 0}])["meta_info"] | ABORTED),
])
async def test_an_abort_without_a_token(server: tuple[Server, SGLangEngine], ids: list[int], meta: dict[str, Any]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [{"output_ids": ids, "meta_info": meta}])
    [made] = await engine.generate(REQUEST)
    assert (len(made.output_ids), len(made.logprobs), made.spans, made.finish_reason) == (0, 0, (), "abort")


async def test_an_abort_of_a_retracted_row_has_what_it_had_made(server: tuple[Server, SGLangEngine]) -> None:
    """Seen: it waits again, and comes back whole but for the length of its prompt."""
    fake, engine = server
    meta = {key: value for key, value in row()["meta_info"].items() if key != "prompt_tokens"} | ABORTED
    fake.answers["/generate"] = (200, [row() | {"meta_info": meta}])
    [made] = await engine.generate(REQUEST)
    assert (len(made.output_ids), made.finish_reason, made.spans) == (2, "abort", (Span(3, 0, 2),))
    whole = row()
    del whole["meta_info"]["prompt_tokens"]
    fake.answers["/generate"] = (200, [whole])
    with pytest.raises(EngineError, match="prompt_tokens"):
        await engine.generate(REQUEST)


@pytest.mark.parametrize("pairs", [
    [[None, 5, None], [-0.1, 2, None]],  # SGLang's JSON writes NaN as null
    [[-0.5, 7, None], [-0.1, 2, None]],  # the log-prob of another token
])
async def test_a_logprob_that_is_none_becomes_nan(server: tuple[Server, SGLangEngine], pairs: list[Any]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(output_token_logprobs=pairs)])
    [made] = await engine.generate(REQUEST)
    assert np.isnan(made.logprobs).tolist() == [True, False]


async def test_an_end_token_put_in_place_of_nan_logits(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(finish_reason={"type": "stop", "matched": "NaN happened"})])
    [made] = await engine.generate(REQUEST)
    assert np.isnan(made.logprobs).tolist() == [False, True]


async def test_a_row_with_too_few_logprobs_passes_for_quarantine_to_see(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(output_token_logprobs=[[-0.5, 5, None]])])
    [made] = await engine.generate(REQUEST)
    assert (len(made.output_ids), len(made.logprobs)) == (2, 1)


@pytest.mark.parametrize("answer", [
    (400, {"error": {"message": "too long"}}),
    (500, b"boom"),
    (200, b"<html>"),
    (200, {"output_ids": []}),
    (200, []),
    (200, [row(), row()]),
    (200, [{"output_ids": [5, 2]}]),
    (200, [row(finish_reason=None)]),
    (200, [row(prompt_tokens=1)]),
    (200, [row(weight_versions=None)]),
    (200, [row() | {"output_ids": [5.5, 2]}]),
    (200, [row() | {"output_ids": [1 << 40, 2]}]),
    (200, [row(output_token_logprobs=[["much", 5, None], [-0.1, 2, None]])]),
])
async def test_what_is_no_answer_raises(server: tuple[Server, SGLangEngine], answer: Answer) -> None:
    fake, engine = server
    fake.answers["/generate"] = answer
    with pytest.raises(EngineError) as caught:
        await engine.generate(REQUEST)
    assert not caught.value.suspect


@pytest.mark.parametrize("label", ["v0", "", None, 3, "-1"])
async def test_a_label_that_is_no_version_of_ours_is_suspect(server: tuple[Server, SGLangEngine], label: Any) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(weight_versions=[{"version": label, "start": 0, "end": 2}])])
    fake.answers["/model_info"] = (200, {"weight_version": label})
    for call in (engine.generate(REQUEST), engine.weight_version()):
        with pytest.raises(EngineError) as caught:
            await call
        assert caught.value.suspect


async def hang(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError


async def break_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("answer", [hang, break_off])
async def test_no_answer_raises(server: tuple[Server, SGLangEngine], answer: Answer) -> None:
    fake, engine = server
    fake.answers["/generate"] = answer
    with pytest.raises(EngineError):
        await engine.generate(REQUEST)


@pytest.mark.parametrize("prompt", [[], [8], [-1], [1] * 27, [1] * 26])
async def test_what_would_harm_the_engine_is_never_sent(server: tuple[Server, SGLangEngine], prompt: list[int]) -> None:
    fake, engine = server
    with pytest.raises(ValueError):
        await engine.generate(GenerateRequest([[1], prompt], {"temperature": 1.0, "max_new_tokens": 5}))
    assert "/generate" not in [path for path, _ in fake.got]
    fake.answers["/generate"] = (200, [row(prompt_tokens=25)])
    await engine.generate(GenerateRequest([[1] * 25], {"temperature": 1.0, "max_new_tokens": 5}))


async def test_score(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.25, 2, None], [None, 3, None]]}})
    scored = await engine.score([1, 2, 3])
    assert scored.dtype == np.float32
    assert scored[0] == -0.25
    assert np.isnan(scored[1])
    assert fake.got[-1][1]["logprob_start_len"] == 0
    for others in ([1, 2, 4], [1, 2]):
        with pytest.raises(EngineError, match="other tokens"):
            await engine.score(others)


async def test_info(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    info = await engine.info()
    assert (info.engine_version, info.dtype, info.quantisation, info.context_length) == ("sglang 0.5.23", "float32", "none", 30)
    assert info.unsafe == ()
    fake.answers["/server_info"] = (200, INFO | {"host": "0.0.0.0", "api_key": None, "trust_remote_code": True})
    assert (await engine.info()).unsafe == ("trust_remote_code", "host 0.0.0.0", "no api_key")
    fake.answers["/server_info"] = (200, {"version": "0.5.23"})
    with pytest.raises(EngineError):
        await engine.info()


async def test_ready_after_a_while_and_resumed(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    answers = iter([503, 503, 200])

    async def ready(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=next(answers))

    fake.answers["/ready"] = ready
    await engine.wait_ready(5)
    assert [path for path, _ in fake.got] == ["/model_info", "/continue_generation", "/ready", "/ready", "/ready"]


async def test_never_ready(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/ready"] = (503, b"")
    with pytest.raises(EngineError, match="not ready within"):
        await engine.wait_ready(0.3)
    nobody = SGLangEngine("http://127.0.0.1:1", "key", 8)
    with pytest.raises(EngineError, match="not ready within"):
        await nobody.wait_ready(0.3)
    await nobody.close()


async def test_a_refused_key_is_final(server: tuple[Server, SGLangEngine]) -> None:
    stranger = SGLangEngine(server[1]._url, "other", 8)
    with pytest.raises(EngineError, match="refuses our API key"):
        await stranger.wait_ready(30)
    with pytest.raises(EngineError, match="401"):
        await stranger.generate(REQUEST)
    await stranger.close()


async def never() -> None:
    raise AssertionError("only drain waits")


async def test_swap(server: tuple[Server, SGLangEngine], tmp_path: Path) -> None:
    fake, engine = server
    await swap(engine, "retract", str(tmp_path), 3, never)
    assert fake.got == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "3", "flush_cache": True,
                                       "load_format": "safetensors"}),
        ("/model_info", None), ("/continue_generation", {})]


@pytest.mark.parametrize(("path", "answer"), [
    ("/pause_generation", (500, b"")),
    ("/update_weights_from_disk", (400, {"success": False, "message": "Weights were updated, but the cache was not flushed"})),
    ("/update_weights_from_disk", (200, {"success": False})),
    ("/update_weights_from_disk", (200, b"[]")),
    ("/update_weights_from_disk", (200, b"...")),
    ("/update_weights_from_disk", hang),
    ("/update_weights_from_disk", break_off),
    ("/model_info", (200, {"weight_version": "2"})),
    ("/model_info", (200, {})),
    ("/continue_generation", (500, b"")),
])
async def test_a_swap_without_clear_success_is_suspect_and_stays_paused(server: tuple[Server, SGLangEngine], tmp_path: Path, path: str,
                                                                         answer: Answer) -> None:
    fake, engine = server
    fake.answers[path] = answer
    with pytest.raises(EngineError, match="swap to version 3") as caught:
        await swap(engine, "retract", str(tmp_path), 3, never)
    assert caught.value.suspect
    assert "/continue_generation" not in [got for got, _ in fake.got] or path == "/continue_generation"


@pytest.mark.parametrize("path", ["relative", "/does/not/exist"])
async def test_a_folder_that_is_none_is_not_sent(server: tuple[Server, SGLangEngine], path: str) -> None:
    fake, engine = server
    with pytest.raises(EngineError, match="existing folder"):
        await engine.load_weights(path, 3)
    assert fake.got == []


async def test_the_other_calls(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    assert await engine.health()
    await engine.flush_cache()
    await engine.abort_all()
    assert fake.got[-1] == ("/abort_request", {"abort_all": True})
    fake.answers |= {"/health_generate": (503, b""), "/flush_cache": (400, b"pending requests")}
    assert not await engine.health()
    with pytest.raises(EngineError, match="pending"):
        await engine.flush_cache()


async def test_a_row_may_have_a_sampling_of_its_own(server: tuple[Server, SGLangEngine]) -> None:
    fake, engine = server
    fake.answers["/generate"] = (200, [row(), row()])
    await engine.generate(GenerateRequest([[1, 2], [1, 2]], REQUEST.sampling, own={1: {"temperature": 0.0, "max_new_tokens": 3}}))
    sent = fake.got[-1][1]["sampling_params"]
    assert [(one["temperature"], one["max_new_tokens"], one["top_k"]) for one in sent] == [(1.0, 4, -1), (0.0, 3, -1)]
