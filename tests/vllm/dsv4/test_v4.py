"""DeepSeek-V4's architecture through the whole mesh: chats, live policy, a long prompt beside short ones, prefix cache, block sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from tokenizers import Tokenizer

from tests.vllm.dsv4.conftest import FIGURES, MAX_SEQS, STEP_TOKENS, WINDOW, Answer, V4Mesh, ask, tokens_of
from tests.vllm.dsv4.tiny_model import BLOCK_TOKENS
from trimtab.client import Client
from trimtab.errors import InvalidRequest
from trimtab.messages import ChatMessage, Workload
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2

LONG = 16_000
SHORT = 24
"""Tokens of a short stream's answer."""
BUDGET_MS = 150
CALM = {"prefill.itl_budget_ms": "100", "batch.active": str(MAX_SEQS)}


@pytest.fixture
def policy(mesh: V4Mesh):
    """Sets fields; what a test left is set back."""

    def set_policy(**fields: str) -> None:
        mesh.set_policy(*(f"{name.replace('__', '.')}={value}" for name, value in fields.items()))

    yield set_policy
    mesh.set_policy(*(f"{name}={value}" for name, value in CALM.items()))


def template(text: str) -> str:
    """V4's own for one message by a user, with thinking off: the thought is closed before it began."""
    return f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜></think>"


async def test_a_short_chat_is_answered_by_v4s_template_and_tokenizer_and_greedy_repeats(mesh: V4Mesh) -> None:
    tokenizer = Tokenizer.from_file(f"{mesh.model}/tokenizer.json")
    text = "Name three colours. 你好，世界 🚢"
    ids = tuple(tokenizer.encode(template(text)).ids)
    async with Client(mesh.address("gateway")) as client:
        chat = await ask(client, (ChatMessage("user", text),), 32)
        again = await ask(client, (ChatMessage("user", text),), 32)
        bare = await ask(client, ids, 32)
    assert chat.accepted is not None and chat.accepted.prompt_tokens == len(ids)
    assert chat.accepted.prompt_digest == bare.accepted.prompt_digest
    assert chat.tokens == again.tokens == bare.tokens
    assert chat.text == again.text == tokenizer.decode(chat.tokens, skip_special_tokens=True)
    # All of it in one message would be no stream.
    assert len(set(chat.times)) > 8
    FIGURES.append(f"chat: TTFT {1e3 * chat.ttft_s:.0f} ms, {31 / (chat.times[-1] - chat.times[0]):.0f} tokens/s alone")


async def test_requests_that_share_steps_do_not_disturb_each_other(mesh: V4Mesh) -> None:
    """Prompts of different lengths, of which some end in the midst of a block, of a window and of a compressed group."""
    prompts = [tokens_of(60 + n, length) for n, length in enumerate((3, 61, 130, 517))]
    async with Client(mesh.address("gateway")) as client:
        alone = [(await ask(client, prompt, 16)).tokens for prompt in prompts]
        together = await asyncio.gather(*(ask(client, prompt, 16) for prompt in prompts))
    assert [answer.tokens for answer in together] == alone


async def test_a_policy_steers_the_running_engine(mesh: V4Mesh, policy: Callable[..., None]) -> None:
    async def overlap() -> bool:
        async with Client(mesh.address("gateway")) as client:
            streams = await asyncio.gather(*(ask(client, tokens_of(n, 20), 48) for n in (1, 2)))
        first, second = sorted(streams, key=lambda s: s.times[0])
        return second.times[0] < first.times[-1]

    worker = mesh.processes["worker"].pid
    policy(batch__active="1")
    assert await overlap() is False
    policy(batch__active="8")
    assert await overlap() is True
    assert mesh.processes["worker"].pid == worker


async def test_a_long_prompt_is_read_in_smaller_steps_while_short_streams_run(
    mesh: V4Mesh, policy: Callable[..., None]
) -> None:
    """With the governor and without it, at the same length. What the streams beside felt is reported and not judged: machines differ."""
    policy(prefill__itl_budget_ms=str(BUDGET_MS))
    # The step-time model of a fresh engine has seen no long prompt yet.
    await _beside(mesh, tokens_of(10, 4000))
    steered, steps, gaps = await _beside(mesh, tokens_of(11, LONG))
    policy(prefill__itl_budget_ms="0")
    free, free_steps, free_gaps = await _beside(mesh, tokens_of(12, LONG))
    for name, long, took, felt in (
        (f"itl_budget_ms={BUDGET_MS}", steered, steps, gaps),
        ("itl_budget_ms=0", free, free_steps, free_gaps),
    ):
        FIGURES.append(
            f"{LONG} tokens, {name}: TTFT {long.ttft_s:.1f} s in {took} steps; beside it {len(felt)} short streams, worst gap "
            f"{1e3 * max(felt):.0f} ms"
        )
    # Without it steps are as large as they may be, but for what is too little for one.
    assert free_steps >= LONG // STEP_TOKENS
    assert steps > 2 * free_steps


async def test_a_prompt_that_was_read_before_is_found_in_the_prefix_cache(mesh: V4Mesh) -> None:
    prompt = tokens_of(20, LONG)
    async with Client(mesh.address("gateway")) as client:
        first = await ask(client, prompt, 8, Workload.BATCH)
        again = await ask(client, prompt, 8, Workload.BATCH)
    assert first.finish is not None and again.finish is not None
    assert first.finish.usage.cached_prompt_tokens == 0
    assert LONG - 2 * BLOCK_TOKENS < again.finish.usage.cached_prompt_tokens < LONG
    assert again.tokens == first.tokens
    FIGURES.append(f"{LONG} tokens alone: TTFT {first.ttft_s:.1f} s; again {again.ttft_s:.2f} s")


async def test_a_prompt_beyond_the_window_is_refused_and_one_within_is_not(mesh: V4Mesh) -> None:
    async with Client(mesh.address("gateway")) as client:
        with pytest.raises(InvalidRequest):
            await ask(client, tokens_of(30, WINDOW), 1)
        assert (await ask(client, tokens_of(31, 300), 1)).finish is not None


async def test_what_the_worker_says_of_its_cache_is_right_for_layers_that_forget(mesh: V4Mesh) -> None:
    """Blocks hold 256 tokens, 64, 8 or 4: slots can't be counted by them, and bytes must add up to the cache that was asked for."""
    limits = _node(mesh)["limits"]
    assert (limits["block_size"], limits["max_model_len"]) == (BLOCK_TOKENS, WINDOW)
    assert limits.get("live_blocks", False) is False
    per_token = mesh.gauges()["trimtab_worker_kv_bytes_per_token"]
    assert per_token * limits["block_size"] * limits["total_blocks"] == pytest.approx(1 << 30, rel=0.01)
    shares: list[float] = []
    fragmentation: list[float] = []
    async with _running(mesh, tokens_of(40, 4000)) as long:
        while not long.done():
            seen = mesh.gauges()
            shares += [seen["trimtab_worker_kv_used"], seen["vllm:kv_cache_usage_perc"]]
            fragmentation += [v for k, v in seen.items() if "fragmentation" in k]
            await asyncio.sleep(0.1)
    assert max(shares) > 0.0 and all(0.0 <= x <= 1.0 for x in shares)
    assert fragmentation == []
    await mesh.idle(60)
    assert mesh.gauges()["trimtab_worker_kv_used"] == 0.0


async def test_a_change_of_the_block_size_is_refused_and_the_engine_serves_on(mesh: V4Mesh) -> None:
    prompt = tokens_of(50, 40)
    async with Client(mesh.address("gateway")) as client:
        before = await ask(client, prompt, 48)
        running = asyncio.create_task(ask(client, prompt, 48))
        for size in (128, 512):
            answer = await _reblock(mesh, size)
            assert [(n.node_id, n.done, n.reason) for n in answer.nodes] == [("w0", False, "NOT_LIVE")]
            assert "several kinds" in answer.nodes[0].message
        during = await running
        after = await ask(client, prompt, 48)
    assert before.tokens == during.tokens == after.tokens
    assert _node(mesh)["limits"]["block_size"] == BLOCK_TOKENS


async def _beside(mesh: V4Mesh, prompt: tuple[int, ...]) -> tuple[Answer, int, list[float]]:
    """The prompt as BATCH with one short REALTIME stream after another beside it: its answer, the steps until then, each stream's worst gap."""
    gaps: list[float] = []
    async with _running(mesh, prompt) as long, Client(mesh.address("gateway")) as client:
        before, number = mesh.steps(), 0
        while not long.done():
            number += 1
            gaps.append((await ask(client, tokens_of(len(prompt) + number, 30), SHORT)).gap_s)
        return await long, mesh.steps() - before, gaps


@asynccontextmanager
async def _running(mesh: V4Mesh, prompt: tuple[int, ...]):
    """The task of a BATCH prompt of which one token is wanted; it is at the engine."""
    async with Client(mesh.address("gateway")) as client:
        task = asyncio.create_task(ask(client, prompt, 1, Workload.BATCH))
        try:
            async with asyncio.timeout(60):
                while mesh.running() == (0, 0) and not task.done():
                    await asyncio.sleep(0.01)
            yield task
            await task
        finally:
            task.cancel()


async def _reblock(mesh: V4Mesh, size: int) -> admin_pb2.ReblockNodesResponse:
    async with grpc.aio.insecure_channel(mesh.address("control")) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.ReblockNodesRequest(
            node_ids=["w0"], block_size=size, when=control_pb2.REBLOCK_WHEN_NOW, author="test", reason="test"
        )
        return await stub.ReblockNodes(request, timeout=60)


def _node(mesh: V4Mesh) -> dict:
    code, fleet = mesh.trimtab("fleet")
    assert code == 0
    return next(node for node in fleet["nodes"] if node["node_id"] == "w0")
