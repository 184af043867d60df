"""Greedy output in float32 through gateway and worker is plain vLLM's: token by token, and the text byte by byte."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from tests.vllm.client import Client
from tests.vllm.conftest import ROOT
from tests.vllm.prompts import cases
from trimtab.v1 import inference_pb2 as pb

CASES = {c["id"]: c for c in cases()}


@pytest.fixture(scope="session")
def reference(model_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.reference", model_path],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    rows = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS ")]
    assert rows, done.stderr[-4000:]
    return json.loads(rows[0][len("ANSWERS ") :])


def as_request(case):
    request = pb.GenerateRequest(text=case["text"]) if "text" in case else pb.GenerateRequest()
    if "chat" in case:
        request.chat.messages.add(role="user", content=case["chat"])
    request.sampling.temperature = 0
    request.sampling.max_tokens = case["max_tokens"]
    request.sampling.stop.extend(case["stop"])
    return request


def check(case, stream, expected):
    assert stream.accepted.prompt_tokens == len(expected["prompt"]), case["id"]
    assert stream.tokens == expected["tokens"], case["id"]
    assert stream.text.encode() == expected["text"].encode(), case["id"]
    reason = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}[expected["finish"]]
    assert stream.finish.reason == reason, case["id"]
    assert stream.finish.usage.completion_tokens == len(expected["tokens"])


async def test_one_at_a_time(mesh, reference):
    mesh.set_policy("batch.active=8")
    async with Client(mesh.address("gateway")) as client:
        for name, case in CASES.items():
            check(case, await client.run(as_request(case)), reference[name])


async def test_eight_at_once(mesh, reference):
    mesh.set_policy("batch.active=8")
    places = asyncio.Semaphore(8)
    async with Client(mesh.address("gateway")) as client:

        async def one(name, case):
            async with places:
                check(case, await client.run(as_request(case)), reference[name])

        await asyncio.gather(*(one(n, c) for n, c in CASES.items()))


async def test_token_ids_in_give_the_same_tokens_out(mesh, reference):
    expected = reference["text0"]
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(expected["prompt"])
    request.sampling.temperature = 0
    request.sampling.max_tokens = 28
    async with Client(mesh.address("gateway")) as client:
        check(CASES["text0"], await client.run(request), expected)


@pytest.mark.parametrize("name", ["text7", "text5", "chat1"])
async def test_a_stream_resumed_anywhere_gives_the_same_tokens_and_bytes(mesh, reference, name):
    """As a gateway would do it after a worker's death; straight to the worker, which is where resuming happens."""
    expected = reference[name]
    async with Client(mesh.address("worker")) as client:
        whole = await client.run(as_request(CASES[name]))
        check(CASES[name], whole, expected)
        # What text each cut had delivered is what the first attempt sent by then.
        for cut in (1, 4, 9):
            if cut >= len(expected["tokens"]):
                continue
            # A reader that lags gets several tokens at once, so that the cut may come later.
            call, part = await client.begin(as_request(CASES[name]), cut)
            call.cancel()
            request = as_request(CASES[name])
            request.resume.CopyFrom(
                pb.Resume(
                    token_ids=part.tokens,
                    text_bytes=len(part.text.encode()),
                    attempt=2,
                    prompt_digest=whole.accepted.prompt_digest,
                )
            )
            text, tokens = part.text, list(part.tokens)
            async for r in client.stub.Generate(request, timeout=60):
                if r.WhichOneof("event") == "delta":
                    text += r.delta.text
                    tokens += r.delta.token_ids
            assert tokens == expected["tokens"], (name, len(part.tokens))
            assert text == expected["text"], (name, len(part.tokens))
