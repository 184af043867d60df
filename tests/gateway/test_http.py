"""Errors of the HTTP door in OpenAI's shape, whatever goes wrong, and the pages beside the API."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from services.gateway import openai
from services.gateway.settings import GatewaySettings
from tests.gateway.builders import until
from tests.gateway.fake_worker import Running
from trimtab.kit import rpc

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def call(start_worker, start_gateway):
    """call(path, body or None, …) → (status, parsed body, headers)."""
    worker = await start_worker()
    gateway = await start_gateway(worker, max_body_bytes=10_000)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.http.port}") as session:

        async def call(path: str, body: Any = None, *, method: str = "", data: bytes | None = None, headers=None):
            method = method or ("GET" if body is None and data is None else "POST")
            data = json.dumps(body).encode() if body is not None else data
            async with session.request(method, path, data=data, headers=headers) as answer:
                return answer.status, await answer.json(), answer.headers

        call.gateway, call.worker = gateway, worker
        yield call


def chat(**more: Any) -> dict[str, Any]:
    return CHAT | more


@pytest.mark.parametrize(
    ("path", "body", "param", "code", "words"),
    [
        ("/v1/chat/completions", chat(tools=[{"type": "function"}]), "tools", "unsupported_parameter", "no tool calling"),
        ("/v1/chat/completions", chat(tool_choice="auto"), "tool_choice", "unsupported_parameter", "no tool calling"),
        ("/v1/chat/completions", chat(frobnicate=1, zap=2), "frobnicate", "unsupported_parameter", "nor are zap"),
        ("/v1/chat/completions", chat(reasoning_effort="low"), "reasoning_effort", "unsupported_parameter", ""),
        ("/v1/chat/completions", chat(n=2), "n", "unsupported_value", "must be 1"),
        ("/v1/chat/completions", chat(store=True), "store", "unsupported_value", "must be false"),
        ("/v1/chat/completions", chat(max_tokens="9"), "max_tokens", "invalid_type", "must be an integer"),
        ("/v1/chat/completions", chat(max_tokens=True), "max_tokens", "invalid_type", "must be an integer"),
        ("/v1/chat/completions", chat(max_tokens=1 << 40), "max_tokens", "invalid_value", "between 0 and"),
        ("/v1/chat/completions", chat(max_tokens=0), "max_tokens", "invalid_request", "at least 1"),
        ("/v1/chat/completions", chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "invalid_value", ""),
        ("/v1/chat/completions", chat(temperature="hot"), "temperature", "invalid_type", "must be a number"),
        ("/v1/chat/completions", chat(seed=-1), "seed", "invalid_value", "between 0 and"),
        ("/v1/chat/completions", chat(stream=1), "stream", "invalid_type", "true or false"),
        ("/v1/chat/completions", chat(stop=[1]), "stop", "invalid_type", ""),
        ("/v1/chat/completions", chat(stop=["x"] * 17), "stop", "invalid_request", "at most 16"),
        ("/v1/chat/completions", chat(top_logprobs=2), "top_logprobs", "invalid_value", "needs logprobs"),
        ("/v1/chat/completions", chat(logit_bias={"a": 1}), "logit_bias", "invalid_value", ""),
        ("/v1/chat/completions", chat(stream_options={}), "stream_options", "invalid_value", "needs stream"),
        (
            "/v1/chat/completions", chat(stream=True, stream_options={"x": 1}),
            "stream_options.x", "unsupported_parameter", "",
        ),
        ("/v1/chat/completions", chat(service_tier="gold"), "service_tier", "unsupported_value", ""),
        ("/v1/chat/completions", chat(response_format={"type": "xml"}), "response_format.type", "unsupported_value", ""),
        (
            "/v1/chat/completions", chat(response_format={"type": "json_schema"}),
            "response_format.json_schema.schema", "missing_required_parameter", "",
        ),
        ("/v1/chat/completions", {"model": "m"}, "messages", "missing_required_parameter", ""),
        ("/v1/chat/completions", {"messages": []}, "model", "missing_required_parameter", ""),
        ("/v1/chat/completions", chat(messages=[]), "messages", "invalid_type", "at least one"),
        ("/v1/chat/completions", chat(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter", ""),
        (
            "/v1/chat/completions", chat(messages=[{"role": "tool", "content": "x"}]),
            "messages[0].role", "invalid_request", "must be one of system, user, assistant",
        ),
        (
            "/v1/chat/completions",
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type", "unsupported_value", "'image_url' is not supported",
        ),
        (
            "/v1/chat/completions", chat(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]),
            "messages[0].tool_calls", "unsupported_parameter", "",
        ),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, "prompt", "invalid_value", "one prompt, not 2"),
        ("/v1/completions", {"model": "m", "prompt": ""}, "prompt", "invalid_request", "must not be empty"),
        ("/v1/completions", {"model": "m", "prompt": [-1]}, "prompt", "invalid_value", ""),
        ("/v1/completions", {"model": "m", "prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter", ""),
        ("/v1/completions", {"model": "m", "prompt": "x", "echo": True}, "echo", "unsupported_value", ""),
    ],
)  # fmt: skip
async def test_a_parameter_that_cant_be_taken_is_named(call, path, body, param, code, words):
    status, answer, _ = await call(path, body)
    error = answer["error"]
    assert (status, error["param"], error["code"], error["type"]) == (400, param, code, "invalid_request_error")
    assert error["message"].startswith(param)
    assert words in error["message"]


async def test_null_counts_as_absent(call):
    status, _, _ = await call(
        "/v1/chat/completions", chat(tools=None, frobnicate=None, stop=None, n=None, temperature=None)
    )
    assert status == 200


@pytest.mark.parametrize(
    ("path", "facts", "status", "code"),
    [
        ("/v1/nothing", {}, 404, "unknown_url"),
        ("/v1/embeddings", {"body": {}}, 404, "unknown_url"),
        ("/v1/chat/completions", {}, 405, "method_not_allowed"),
        ("/v1/models", {"body": {}}, 405, "method_not_allowed"),
        ("/v1/chat/completions", {"data": b"{nonsense"}, 400, "invalid_json"),
        ("/v1/chat/completions", {"data": b"[]"}, 400, "invalid_json"),
        ("/v1/chat/completions", {"data": b"\xff"}, 400, "invalid_json"),
        ("/v1/chat/completions", {"data": b"[" * 9000}, 400, "invalid_json"),
        ("/v1/chat/completions", {"body": chat(messages=[{"role": "user", "content": "\ud800"}])}, 400, "invalid_json"),
        ("/v1/chat/completions", {"data": b"x" * 10_001}, 413, "body_too_large"),
        ("/v1/models/other", {}, 404, "model_not_found"),
        ("/v1/chat/completions", {"body": CHAT, "headers": {"x-workload": "some"}}, 400, "invalid_value"),
        ("/health", {"headers": {"x-long": "y" * 9000}}, 431, "header_too_large"),
    ],
)
async def test_every_error_has_openais_shape(call, path, facts, status, code):
    got, answer, _ = await call(path, **facts)
    assert (got, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]


async def test_limits_are_stated(call):
    _, answer, _ = await call("/v1/completions", data=b"x" * 20_000)
    assert "10000 bytes" in answer["error"]["message"]
    _, answer, _ = await call("/health", headers={"x-long": "y" * 9000})
    assert "8190" in answer["error"]["message"]


async def test_a_chunked_body_above_the_limit_is_refused_too(call):
    async def parts():
        for _ in range(20):
            yield b"x" * 1000

    status, answer, _ = await call("/v1/completions", data=parts(), method="POST")
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_a_wrong_method_says_which_is_right(call):
    _, _, headers = await call("/v1/models", method="DELETE", data=b"")
    assert headers["Allow"] == "GET"


async def test_a_long_prefill_is_no_dead_connection(call, monkeypatch):
    monkeypatch.setattr(openai, "KEEP_ALIVE_S", 0.02)
    worker = call.worker
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await go_on.wait()
        r.token("Hello")
        r.finish()

    worker.script = script
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{call.gateway.http.port}/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            while (line := await answer.content.readline()) != b": keep-alive\n":
                assert line
            go_on.set()
            rest = await answer.text()
    assert rest.endswith("data: [DONE]\n\n")


async def test_health_follows_the_workers(call, start_worker):
    status, body, _ = await call("/health")
    assert (status, body["status"]) == (200, "ok")
    member = next(iter(call.gateway.endpoints._members.values()))
    call.gateway.admission.draining = True
    status, body, headers = await call("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
    status, body, _ = await call("/health")
    assert (status, body["reason"]) == (503, "this gateway is draining")
    call.gateway.admission.draining = False
    member.retiring = True
    status, body, _ = await call("/health")
    assert (status, body["reason"]) == (503, "no worker can take requests")


async def test_metrics_count_requests_with_bounded_labels(call):
    await call("/v1/chat/completions", CHAT)
    await call("/v1/chat/completions", chat(model="other"))
    await until(lambda: not call.gateway.admission.live)
    text = call.gateway.metrics.text().decode()
    assert 'trimtab_gateway_requests_total{outcome="ok",reason="stop",workload="realtime"} 1.0' in text
    assert (
        'trimtab_gateway_requests_total{outcome="client_fault",reason="MODEL_NOT_FOUND",workload="realtime"} 1.0'
        in text
    )
    assert 'trimtab_gateway_ttft_seconds_count{workload="realtime"} 1.0' in text
    assert "trimtab_gateway_output_tokens_total 5.0" in text
    assert 'trimtab_gateway_in_flight{workload="realtime"} 0.0' in text
    assert "trimtab_gateway_links_up 1.0" in text
    async with aiohttp.ClientSession() as session:
        page = await session.get(f"http://127.0.0.1:{call.gateway.http.port}/metrics")
        assert page.status == 200
        assert "trimtab_gateway_requests_total" in await page.text()


async def test_metrics_may_have_an_address_of_their_own(start_worker, start_gateway):
    gateway = await start_gateway(await start_worker(), metrics="127.0.0.1:0")
    public, own = (f"http://127.0.0.1:{server.port}" for server in (gateway.http, gateway.scraped))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{own}/metrics") as answer:
            assert answer.status == 200
            assert "trimtab_gateway_links_up 1.0" in await answer.text()
        async with session.get(f"{public}/metrics") as answer:
            assert answer.status == 404
            assert "trimtab_gateway" not in await answer.text()
        async with session.get(f"{public}/health") as answer:
            assert answer.status == 200
        async with session.get(f"{own}/v1/models") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_url")
        async with session.post(f"{own}/metrics") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET")


async def test_a_taken_metrics_address_leaves_nothing_behind(start_worker, start_gateway):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rpc.PortTaken, match=address):
            await start_gateway(await start_worker(), metrics=address)


def test_a_metrics_address_is_checked_like_the_others() -> None:
    with pytest.raises(ValueError, match="gateway metrics"):
        GatewaySettings(metrics="nowhere")
