"""Why an engine is gone: what is a lack of memory and what is not, and that requests and the control plane are told."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.worker.engines.death import KILLED, death_of, described, wants_memory
from tests.worker.conftest import a_request
from trimtab import measures


@pytest.mark.parametrize(
    "words",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
        "torch.OutOfMemoryError: HIP out of memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
        "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.",
        "RuntimeError: could not create a primitive",
        "MemoryError: ",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: Worker failed with error 'CUDA error: out of memory', please check the stack trace above",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
)
def test_a_lack_of_memory_is_known_by_its_words(words):
    assert wants_memory(words)
    assert death_of(words, killed=False).out_of_memory


@pytest.mark.parametrize(
    "words",
    [
        "",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "AssertionError: ",
        "KeyError: 'memory'",
        "TimeoutError: RPC call to execute_model timed out.",
    ],
)
def test_other_faults_are_not_taken_for_it(words):
    assert not wants_memory(words)
    assert not death_of(words, killed=False).out_of_memory


def test_one_that_was_killed_without_a_word_ran_out_of_memory_and_one_that_said_why_did_not():
    assert (death_of("", killed=True).words, death_of("", killed=True).out_of_memory) == (KILLED, True)
    assert not death_of("AssertionError: x", killed=True).out_of_memory


def test_an_error_is_described_with_what_caused_it():
    def fail():
        try:
            raise MemoryError("no pages")
        except MemoryError as e:
            raise RuntimeError("the step failed") from e

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert described(caught.value) == "RuntimeError: the step failed; because of MemoryError: no pages"


def test_a_cause_that_was_put_aside_is_not_told():
    def fail():
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("x") from None

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert described(caught.value) == "RuntimeError: x"


async def to_its_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_every_request_that_ends_with_an_engine_that_ran_out_of_memory_is_counted(rig):
    calls = [rig.stub.Generate(a_request(max_tokens=4000)) for _ in range(3)]
    for call in calls:
        for _ in range(3):
            await call.read()

    def out_of_memory(*_):
        raise MemoryError("no pages left")

    rig.engine._value.planner.victims = out_of_memory
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_its_end(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with asyncio.timeout(20):
        while rig.serving.unfinished:
            await asyncio.sleep(0.005)
    counters = rig.measuring.counters
    assert (counters[measures.OUT_OF_MEMORY], counters[measures.ERRORS]) == (3, 3)
    death = rig.engine.death()
    assert (death.words, death.out_of_memory) == ("the engine process is gone: MemoryError: no pages left", True)


async def test_an_engine_that_breaks_otherwise_is_no_lack_of_memory(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000))
    await call.read()
    await call.read()

    def broken(*_):
        raise AssertionError("blocks do not balance")

    rig.engine._value.planner.victims = broken
    with pytest.raises(grpc.aio.AioRpcError):
        await to_its_end(call)
    assert rig.measuring.counters[measures.OUT_OF_MEMORY] == 0
    assert not rig.engine.death().out_of_memory
