"""The unmodified OpenAI client against the HTTP door."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.gateway.builders import read, until
from tests.gateway.fake_worker import Running, hang
from trimtab import messages as m
from trimtab.errors import EngineDead, QueueFull
from trimtab.v1 import inference_pb2

if TYPE_CHECKING:
    import openai

SAY = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module", autouse=True)
def _client_library() -> None:
    """Takes most of a second: not in every process that only collects tests."""
    global openai
    import openai


@pytest.fixture
async def world(start_worker, start_gateway):
    """(client, worker, gateway)."""
    worker = await start_worker()
    gateway = await start_gateway(worker)
    async with client_for(gateway) as client:
        yield client, worker, gateway


def client_for(gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.http.port}/v1", api_key="none", max_retries=0)


async def test_chat(world):
    client, worker, _ = world
    answer = await client.chat.completions.create(model="m", messages=SAY, max_completion_tokens=9, temperature=0)
    assert answer.choices[0].message.content == "Hello world!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.object) == ("m", "chat.completion")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    pb = (await worker.hears("start")).generate_request
    assert [(c.role, c.content) for c in pb.chat.messages] == [("user", "Say hello")]
    assert (pb.sampling.max_tokens, pb.sampling.temperature) == (9, 0)


async def test_chat_streamed(world):
    client, _, _ = world
    stream = await client.chat.completions.create(
        model="m", messages=SAY, stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_prompt_cache_key_names_the_session(world):
    client, worker, _ = world
    await client.chat.completions.create(model="m", messages=SAY, prompt_cache_key="talk-7")
    assert (await worker.hears("start")).generate_request.session_id == "talk-7"


async def test_completion(world):
    client, worker, _ = world
    answer = await client.completions.create(model="m", prompt="Say", stop=["a", "b"], seed=7, user="somebody")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello world!", "stop")
    assert answer.object == "text_completion"
    pb = (await worker.hears("start")).generate_request
    assert (pb.text, pb.sampling.max_tokens, pb.sampling.seed) == ("Say", 16, 7)
    assert list(pb.sampling.stop) == ["a", "b"]


async def test_completion_streamed_from_token_ids(world):
    client, worker, _ = world
    stream = await client.completions.create(model="m", prompt=[1, 2, 3], stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hello world!"
    assert list((await worker.hears("start")).generate_request.token_ids.ids) == [1, 2, 3]


def with_logprobs(r: Running) -> None:
    top = (m.TopLogprob(1, -0.5, "é".encode()), m.TopLogprob(2, -2.0, b"e"))
    r.token("é", (m.TokenLogprobs(-0.5, "é".encode(), top),))
    r.token("!", (m.TokenLogprobs(-0.25, b"!", ()),))


async def logprobs_script(r: Running) -> None:
    r.accept()
    with_logprobs(r)
    r.finish()


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_logprobs(world, stream):
    client, worker, _ = world
    worker.script = logprobs_script
    answer = await client.chat.completions.create(model="m", messages=SAY, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [t async for c in answer if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert [(t.token, t.logprob, t.bytes) for t in content] == [("é", -0.5, [0xC3, 0xA9]), ("!", -0.25, [0x21])]
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("é", -0.5), ("e", -2.0)]
    assert (await worker.hears("start")).generate_request.sampling.logprobs == 2


async def test_completion_logprobs(world):
    client, worker, _ = world
    worker.script = logprobs_script
    answer = await client.completions.create(model="m", prompt="x", logprobs=2)
    got = answer.choices[0].logprobs
    assert (got.tokens, got.token_logprobs, got.text_offset) == (["é", "!"], [-0.5, -0.25], [0, 1])
    assert got.top_logprobs == [{"é": -0.5, "e": -2.0}, {}]


async def test_response_format_reaches_the_worker(world):
    client, worker, _ = world
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for times, (form, kind) in enumerate(
        [
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, "json_schema"),
            ({"type": "json_object"}, "json_object"),
            ({"type": "text"}, None),
        ],
        start=1,
    ):
        await client.chat.completions.create(model="m", messages=SAY, response_format=form)
        sampling = (await worker.hears("start", times=times)).generate_request.sampling
        assert sampling.WhichOneof("structure") == kind
        if kind == "json_schema":
            assert json.loads(sampling.json_schema) == schema


async def test_vllms_extras_are_taken(world):
    client, worker, _ = world
    extra = {
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5],
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    await client.chat.completions.create(model="m", messages=SAY, logit_bias={"7": -5}, extra_body=extra)
    s = (await worker.hears("start")).generate_request.sampling
    assert (s.HasField("top_k"), s.top_k, s.min_tokens, s.ignore_eos, s.include_stop) == (True, 0, 2, True, True)
    assert (s.skip_special_tokens, list(s.stop_token_ids), dict(s.logit_bias)) == (False, [5], {7: -5.0})


@pytest.mark.parametrize(
    ("extra", "headers", "workload"),
    [
        ({}, {}, inference_pb2.WORKLOAD_REALTIME),
        ({}, {"x-workload": "batch"}, inference_pb2.WORKLOAD_BATCH),
        ({"service_tier": "flex"}, {}, inference_pb2.WORKLOAD_BATCH),
        ({"service_tier": "flex"}, {"x-workload": "realtime"}, inference_pb2.WORKLOAD_REALTIME),
        ({"service_tier": "priority"}, {}, inference_pb2.WORKLOAD_REALTIME),
        ({"priority": 1}, {}, inference_pb2.WORKLOAD_BATCH),
        ({"priority": 0}, {}, inference_pb2.WORKLOAD_REALTIME),
    ],
)
async def test_workload(world, extra, headers, workload):
    client, worker, _ = world
    await client.chat.completions.create(model="m", messages=SAY, extra_body=extra, extra_headers=headers)
    assert (await worker.hears("start")).generate_request.workload == workload


async def test_a_conversation_that_holds_the_servers_own_answer_is_taken(world):
    client, worker, _ = world
    first = await client.chat.completions.create(model="m", messages=SAY)
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "you?"}]
    await client.chat.completions.create(
        model="m",
        messages=[
            {"role": "developer", "content": "Be kind"},
            *SAY,
            first.choices[0].message,
            {"role": "user", "content": parts},
        ],
    )
    heard = (await worker.hears("start", times=2)).generate_request.chat.messages
    assert [(c.role, c.content) for c in heard] == [
        ("system", "Be kind"),
        ("user", "Say hello"),
        ("assistant", "Hello world!"),
        ("user", "And you?"),
    ]


async def test_models(world):
    client, _, _ = world
    assert [x.id async for x in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "trimtab"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_ids_and_traces_come_back_in_headers(world):
    client, worker, _ = world
    trace = "0af7651916cd43dd8448eb211c80319c"
    raw = await client.chat.completions.with_raw_response.create(
        model="m",
        messages=SAY,
        extra_headers={"x-request-id": "mine", "traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    )
    assert (raw.headers["x-request-id"], raw.headers["x-trace-id"]) == ("mine", trace)
    assert raw.parse().id == "chatcmpl-mine"
    assert (await worker.hears("start")).request_id == "mine"


async def test_leaving_a_stream_cancels_it(world):
    client, worker, gateway = world
    worker.script = hang
    async with await client.chat.completions.create(model="m", messages=SAY, stream=True) as stream:
        async for _ in stream:
            break
    await worker.hears("cancel")
    await until(lambda: not gateway.admission.live)


async def test_errors_are_the_clients_own_classes(world):
    client, worker, _ = world
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=SAY, temperature=9)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature", "invalid_request", "invalid_request_error"
    )  # fmt: skip
    assert "temperature must be at least 0 and at most 2, not 9" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=SAY)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")

    async def full(r: Running) -> None:
        r.fail(QueueFull("the queue is full", retry_after_ms=1500))

    worker.script = full
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model="m", messages=SAY, stream=True)
    assert (limited.value.code, limited.value.type) == ("queue_full", "rate_limit_error")
    assert limited.value.response.headers["retry-after"] == "2"


async def test_an_error_after_the_stream_began_is_its_last_event(world, policy):
    client, worker, gateway = world
    policy(gateway, {"resume.wait_ms": 50})

    async def breaking(r: Running) -> None:
        r.accept()
        r.token("Hel")
        await asyncio.sleep(0.05)
        r.fail(EngineDead("gone"))

    worker.script = breaking
    chunks = []
    stream = await client.chat.completions.create(model="m", messages=SAY, stream=True)
    with pytest.raises(openai.APIError) as caught:
        await read(aiter(stream), chunks)
    assert "".join(c.choices[0].delta.content for c in chunks) == "Hel"
    assert caught.value.code == "stream_cut"
    assert "after 1 tokens" in caught.value.message


@pytest.mark.slow
async def test_the_client_retries_by_itself_when_told_to(start_worker, start_gateway):
    """Its default is two retries on 429 and 5xx, after Retry-After."""
    worker = await start_worker()
    gateway = await start_gateway(worker)
    tries = 0

    async def once_full(r: Running) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            r.fail(QueueFull("full", retry_after_ms=1))
            return
        r.accept()
        r.token("ok")
        r.finish()

    worker.script = once_full
    async with client_for(gateway).with_options(max_retries=2) as client:
        answer = await client.chat.completions.create(model="m", messages=SAY)
    assert (answer.choices[0].message.content, tries) == ("ok", 2)
