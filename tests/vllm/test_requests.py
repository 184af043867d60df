"""What clients do to a request: leave, run out of time, ask for structure; each frees or shapes the engine's work."""

import asyncio
import json
import re

import grpc
import pytest

from tests.vllm.client import LONG, Client, a_request, follow
from trimtab.kit import rpc


@pytest.fixture(autouse=True)
def roomy(mesh):
    mesh.set_policy("batch.active=8")


TOKENS = 400
# Patience with a machine that is busy. What a request lived on is said by steps, since seconds say nothing of it there.
FREED_S = 30
# The step in flight when the news arrives, the one that may begin while it is on its way, and one for a step that is short.
STEPS = 3
# Where some steps more are not the question: a part of TOKENS.
SOON_STEPS = 100


async def lived_on(mesh, before):
    """Steps. The request was alone: they end with it, so the engine's counter says how long it lived on."""
    await mesh.idle(FREED_S)
    return mesh.steps() - before


async def freed_within_a_step(mesh, begin_and_end):
    """`begin_and_end` answers with the engine's steps at the end.

    Now and then a machine that is busy brings the news late; a product that is late is so each time.
    """
    lived = []
    for _ in range(3):
        lived.append(await lived_on(mesh, await begin_and_end()))
        if lived[-1] <= STEPS:
            return
    raise AssertionError(f"lived on for {lived} of {TOKENS} steps")


async def test_client_cancel_frees_the_engine(mesh):
    async with Client(mesh.address("gateway")) as client:

        async def begin_and_cancel():
            call, _ = await client.begin(a_request(max_tokens=TOKENS))
            assert mesh.running()[0] == 1
            before = mesh.steps()
            call.cancel()
            return before

        await freed_within_a_step(mesh, begin_and_cancel)


async def test_the_deadline_frees_the_engine(mesh):
    async with Client(mesh.address("gateway")) as client:

        async def run_out_of_time():
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await client.run(a_request(max_tokens=TOKENS), timeout_s=1.5)
            before = mesh.steps()
            assert e.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return before

        await freed_within_a_step(mesh, run_out_of_time)


async def test_a_lost_connection_frees_the_engine(mesh):
    async def begin_and_lose():
        client = Client(mesh.address("gateway"))
        await client.begin(a_request(max_tokens=TOKENS))
        before = mesh.steps()
        await client._channel.close()
        return before

    await freed_within_a_step(mesh, begin_and_lose)


async def test_an_http_client_that_leaves_frees_the_engine(mesh):
    facts = {"model": "smollm2-135m-instruct", "prompt": "One, two,", "max_tokens": TOKENS}
    body = json.dumps({**facts, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def begin_and_leave():
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.ports["http"])
        writer.write((head + body).encode())
        async with asyncio.timeout(60):
            await reader.readuntil(b"data: ")
            await reader.readuntil(b"data: ")
        before = mesh.steps()
        writer.transport.abort()
        return before

    await freed_within_a_step(mesh, begin_and_leave)


async def test_cancel_while_waiting_and_while_prefilling_leaves_nothing(mesh):
    mesh.set_policy("batch.active=1")
    async with Client(mesh.address("gateway")) as client:
        first, _ = await client.begin(a_request(max_tokens=TOKENS))
        waiting = [client.stub.Generate(a_request(f"{i} " * 800, max_tokens=TOKENS)) for i in range(3)]
        for call in waiting:
            await call.read()
        before = mesh.steps()
        for call in (*waiting, first):
            call.cancel()
        assert await lived_on(mesh, before) <= SOON_STEPS
    mesh.set_policy("batch.active=8")


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (lambda r: setattr(r, "text", ""), "INVALID_ARGUMENT", "prompt"),
        (lambda r: setattr(r, "text", "word " * 9000), "INVALID_ARGUMENT", "8192"),
        (lambda r: setattr(r, "model", "nobody/knows"), "NOT_FOUND", "nobody/knows"),
        (lambda r: setattr(r.sampling, "temperature", 9), "INVALID_ARGUMENT", "temperature"),
        (lambda r: setattr(r.sampling, "regex", "("), "INVALID_ARGUMENT", "regex"),
    ],
)
async def test_bad_input_is_refused_with_its_reason(mesh, change, code, word):
    request = a_request()
    change(request)
    async with Client(mesh.address("gateway")) as client:
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await client.run(request)
    assert e.value.code().name == code
    assert word in rpc.from_call(e.value).message
    await mesh.idle(FREED_S)


async def test_the_openai_client_works_unmodified(mesh):
    import openai

    client = openai.AsyncOpenAI(base_url=f"http://{mesh.address('http')}/v1", api_key="none", max_retries=0)
    models = [m.id async for m in client.models.list()]
    assert models == ["smollm2-135m-instruct"]
    answer = await client.chat.completions.create(
        model=models[0],
        messages=[{"role": "user", "content": "Say hello."}],
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert choice.message.content
    assert answer.usage.completion_tokens == len(choice.logprobs.content) <= 12
    assert choice.logprobs.content[0].logprob <= 0
    assert len(choice.logprobs.content[0].top_logprobs) >= 2
    streamed, usage = "", None
    async for chunk in await client.chat.completions.create(
        model=models[0],
        messages=[{"role": "user", "content": "Say hello."}],
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert streamed == choice.message.content
    assert usage.completion_tokens == answer.usage.completion_tokens
    await client.close()


async def test_a_json_schema_shapes_the_answer(mesh):
    import openai

    # A bare integer leaves the model no room for white space, which small ones use without end.
    schema = {"type": "integer", "minimum": 10, "maximum": 99}
    client = openai.AsyncOpenAI(base_url=f"http://{mesh.address('http')}/v1", api_key="none", max_retries=0)
    answer = await client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": "Answer in JSON."}],
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert 10 <= int(answer.choices[0].message.content) <= 99
    assert answer.choices[0].finish_reason == "stop"
    await client.close()


async def test_a_regular_expression_shapes_the_answer(mesh):
    request = a_request("The code is", max_tokens=30, ignore_eos=False)
    request.sampling.regex = "[A-F]{4}-小[0-9]{2}"
    async with Client(mesh.address("gateway")) as client:
        stream = await client.run(request)
    assert re.fullmatch("[A-F]{4}-小[0-9]{2}", stream.text)
    assert stream.accepted.resumable is False


async def test_what_vllm_would_refuse_is_refused_before_a_client_hears_anything(mesh):
    steps = mesh.steps()
    async with Client(mesh.address("gateway")) as client:
        for sampling in (
            {"regex": "(never closed"},
            {"json_schema": '{"type": "no such type"}'},
            {"grammar": "root ::= ("},
        ):
            request = a_request("The code is", max_tokens=30)
            for name, value in sampling.items():
                setattr(request.sampling, name, value)
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await client.stub.Generate(request).read()
            assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (sampling, e.value)
    assert mesh.steps() == steps


async def test_a_stream_over_http_with_a_schema_that_is_none_is_a_plain_400(mesh):
    import openai

    client = openai.AsyncOpenAI(base_url=f"http://{mesh.address('http')}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as e:
        await client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "Answer in JSON."}],
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
        )
    assert e.value.status_code == 400
    await client.close()


async def test_one_trace_covers_gateway_worker_queue_prefill_and_decode(mesh):
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with Client(mesh.address("gateway")) as client:
        call = client.stub.Generate(
            a_request(max_tokens=4), metadata=(("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
        )
        async for _ in call:
            pass
    wanted = {"queue", "prefill", "decode", "worker.generate"}
    names, services = [], set()
    async with asyncio.timeout(60):
        # Each process writes its own spans, in its own time.
        while not (wanted <= set(names) and services == {"gateway", "worker"}):
            await asyncio.sleep(0.3)
            files = (mesh.directory / "state" / "test" / "traces").glob("*.jsonl")
            spans = [json.loads(line) for f in files for line in f.read_text().splitlines()]
            spans = [s for s in spans if s["trace_id"] == trace]
            names = [s["name"] for s in spans]
            services = {s["service"].split("-")[0] for s in spans}
    by_name = {s["name"]: s for s in spans}
    worker = by_name["worker.generate"]
    assert {by_name[n]["parent_id"] for n in ("queue", "prefill", "decode")} == {worker["span_id"]}
    assert by_name["queue"]["end_ns"] == pytest.approx(by_name["prefill"]["start_ns"], abs=1e6)
    assert by_name["prefill"]["end_ns"] == pytest.approx(by_name["decode"]["start_ns"], abs=1e6)


async def test_a_released_request_ends_with_its_reason_and_leaves_the_engine(mesh):
    async with Client(mesh.address("gateway")) as client:
        call, stream = await client.begin(a_request(max_tokens=LONG))
        code, answer = await asyncio.to_thread(
            mesh.trimtab, "requests", "release", "--id", stream.accepted.request_id, "--reason", "test"
        )
        assert code == 0, answer
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await follow(call, stream)
        assert e.value.code() is grpc.StatusCode.ABORTED
        assert rpc.from_call(e.value).reason == "RELEASED"
        assert await lived_on(mesh, mesh.steps()) <= SOON_STEPS
    assert mesh.counter("trimtab_scheduler_aborted_tokens_total")[0] > 0


async def test_a_waiting_request_is_moved_before_one_that_came_earlier(mesh):
    mesh.set_policy("batch.active=1", "preemption.mode=none")
    try:
        async with Client(mesh.address("gateway")) as client:
            blocker, _ = await client.begin(a_request(max_tokens=LONG))
            waiting = []
            for name in ("first", "second"):
                waiting.append(asyncio.create_task(client.run(a_request(max_tokens=16, request_id=name))))
                await mesh.queued(len(waiting))
            code, answer = await asyncio.to_thread(
                mesh.trimtab, "requests", "reprioritise", "--id", "second", "--delta", "2", "--reason", "test"
            )
            assert code == 0, answer
            blocker.cancel()
            first, second = await asyncio.gather(*waiting)
        assert second.first < first.first
    finally:
        mesh.set_policy("batch.active=8", "preemption.mode=default")
