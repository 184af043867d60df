"""A policy change steers the running engine, and a refused one changes nothing."""

import asyncio

from tests.vllm.client import LONG, Client, a_request, follow
from trimtab.v1 import inference_pb2 as pb


async def overlap(mesh):
    """Of two requests begun together: whether the second's first token came before the first one was halfway through."""
    async with Client(mesh.address("gateway")) as client:
        streams = await asyncio.gather(*(client.run(a_request(max_tokens=48)) for _ in range(2)))
    first, second = sorted(streams, key=lambda s: s.first)
    return second.first - first.first < (first.last - first.first) / 2


async def test_batch_active_is_obeyed_by_the_running_engine(mesh):
    before = mesh.processes["worker"].pid
    mesh.set_policy("batch.active=1")
    assert await overlap(mesh) is False
    answer = mesh.set_policy("batch.active=8")
    assert await overlap(mesh) is True
    assert mesh.processes["worker"].pid == before
    assert answer["changes"][0] == {"field": "batch.active", "scope": "", "before": 1, "after": 8}


async def test_workload_alone_decides_who_goes_first_in_the_engine(mesh):
    """The same request twice, behind one that holds the only slot: with equal workloads the first come goes first, else REALTIME does."""

    async def first_come_goes_first(*workloads):
        async with Client(mesh.address("gateway")) as client:
            blocker, _ = await client.begin(a_request(max_tokens=LONG, workload=pb.WORKLOAD_REALTIME))
            waiting = []
            for workload in workloads:
                waiting.append(asyncio.create_task(client.run(a_request(max_tokens=16, workload=workload))))
                await mesh.queued(len(waiting))
            blocker.cancel()
            first, second = await asyncio.gather(*waiting)
        return first.first < second.first

    mesh.set_policy("batch.active=1", "preemption.mode=none")
    try:
        assert await first_come_goes_first(pb.WORKLOAD_BATCH, pb.WORKLOAD_BATCH) is True
        assert await first_come_goes_first(pb.WORKLOAD_BATCH, pb.WORKLOAD_REALTIME) is False
    finally:
        mesh.set_policy("batch.active=8", "preemption.mode=default")


async def test_a_waiting_realtime_request_takes_a_running_batch_requests_slot(mesh):
    mesh.set_policy("batch.active=1")
    before = mesh.counter("trimtab_scheduler_preemptions_total")[0]
    async with Client(mesh.address("gateway")) as client:
        story = a_request("Once upon a time", max_tokens=200, workload=pb.WORKLOAD_BATCH)
        batch = asyncio.create_task(follow(*await client.begin(story, 3)))
        urgent = await client.run(a_request(max_tokens=4, workload=pb.WORKLOAD_REALTIME))
        victim = await batch
        again = await client.run(story)
    mesh.set_policy("batch.active=8")
    assert urgent.last < victim.last
    assert mesh.counter("trimtab_scheduler_preemptions_total")[0] == before + 1
    assert victim.finish.timings.preemptions == 1
    assert victim.tokens == again.tokens, "a preempted stream is the stream that it would have been"


async def test_step_tokens_bound_what_a_step_computes(mesh):
    """A prompt of some 300 tokens takes one step of 512, or many of 32: seen on the engine's step counter."""

    async def steps_for(text):
        await mesh.idle(60)
        before = mesh.steps()
        async with Client(mesh.address("gateway")) as client:
            await client.run(a_request(text, max_tokens=1))
        return mesh.steps() - before

    mesh.set_policy("batch.active=8", "prefill.step_tokens=512", "prefill.itl_budget_ms=0")
    wide = await steps_for("alpha beta gamma delta " * 75)
    mesh.set_policy("prefill.step_tokens=32")
    narrow = await steps_for("omega psi chi phi upsilon " * 75)
    mesh.set_policy("prefill.step_tokens=512", "prefill.itl_budget_ms=default")
    assert wide <= 4
    assert narrow >= 8


async def test_a_refused_value_changes_nothing_and_says_why(mesh):
    mesh.set_policy("batch.active=8")
    _, before = mesh.trimtab("policy", "get")
    for value, words in (
        ("0", "between 1"),
        ("-1", "between 1"),
        ("many", "whole number"),
        ("17", "max_num_seqs = 16"),
    ):
        code, answer = mesh.trimtab("policy", "set", f"batch.active={value}", "--reason", "test")
        assert code == 4, answer
        assert words in answer["error"]["message"], answer
        assert "batch.active" in answer["error"]["message"]
    _, after = mesh.trimtab("policy", "get")
    assert after["identity"] == before["identity"]
    _, fleet = mesh.trimtab("fleet")
    worker = next(n for n in fleet["nodes"] if n["role"] == "worker")
    assert worker["policy"]["applied"] == after["identity"]
    assert "max_num_seqs = 16" in fleet["last_refused"]["refused_because"]
    _, history = mesh.trimtab("policy", "history", "-n", "4")
    assert all("batch.active" in e["refused_because"] for e in history)


async def test_policy_reaches_a_busy_engine_within_steps(mesh):
    mesh.set_policy("batch.active=8")
    async with Client(mesh.address("gateway")) as client:
        calls = [await client.begin(a_request(max_tokens=LONG)) for _ in range(4)]
        answer = mesh.set_policy("batch.active=7")
        # Some steps, however long they are; the requests themselves take longer by far.
        assert answer["nodes"][0]["apply_ms"] < 20_000
        for call, _ in calls:
            call.cancel()
    await mesh.idle(30)
