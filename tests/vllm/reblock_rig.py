"""What the tests of a live change of the KV block size share: one engine, streams under way, and functions that run in its process."""

from __future__ import annotations

import asyncio
import gc
import importlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from services.worker.engines import Job
from services.worker.engines.vllm import OWN_BLOCKS, VllmEngine
from trimtab.blocks import LADDER, Reblock, When
from trimtab.errors import ReblockRefused
from trimtab.messages import Sampling, Structure, StructureKind, Workload
from trimtab.policy import Policy, with_fields

T = TypeVar("T")
MODEL_LEN = 2048
START = 128
"""vLLM's own block size for a CPU."""
ACCEPTED = tuple(size for size in LADDER if size % 32 == 0)
"""What CPU attention takes, of the sizes that are asked for."""
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
BARE = {"batch.active": 12, "prefill.step_tokens": 512, "prefill.itl_budget_ms": 0, "paths.realtime_reserve": 0}
"""Nothing but slots and tokens bounds a step, so that all that is begun runs side by side."""
TOKENS = 48
PATIENCE_S = 240.0
LENGTHS = (7, 20, 33, 64, 65, 100, 130, 200)
RSS_SLACK = 16 << 20
"""Bytes. A batch's tensors alone are more than a megabyte, and each change makes a new batch."""


class Runner:
    """One event loop for all tests, as vLLM's front belongs to the loop that it was started in."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._runner = asyncio.Runner()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        async def within() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self._runner.run(within())

    def close(self) -> None:
        self._runner.close()


def running(model_path: str) -> Iterator[Runner]:
    """One engine for all tests of a module; in float32, so that tokens can be compared."""
    found = pytest.MonkeyPatch()
    # So that a test may run a function of its own in the engine's process, to break things there and to look around.
    found.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    found.setenv("HF_HUB_OFFLINE", "1")
    runner = Runner(
        VllmEngine(
            model_path=model_path, model="m", max_num_seqs=12, max_step_tokens=512, max_model_len=MODEL_LEN,
            dtype="float32", kv_cache_gib=1,
        )
    )  # fmt: skip
    try:
        runner(runner.engine.start())
        runner(runner.engine.apply(with_fields(Policy(), BARE)))
        yield runner
    finally:
        runner(runner.engine.stop())
        runner.close()
        found.undo()


@dataclass
class Stream:
    """A request under way. `at(n)` waits for its n-th token."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    over: bool = False

    async def follow(self, engine: VllmEngine) -> list[int]:
        try:
            async for output in engine.generate(self.job):
                self.tokens += output.token_ids
                self.cached = max(self.cached, output.cached_prompt_tokens)
                self.more.set()
        finally:
            self.over = True
            self.more.set()
        return self.tokens

    async def at(self, count: int) -> None:
        while len(self.tokens) < count:
            assert not self.over, f"{self.job.request_id} ended with {len(self.tokens)} tokens"
            self.more.clear()
            await self.more.wait()


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed * 10_000 + length).choices(range(100, 40_000), k=length))


def jobs(name: str, *, tokens: int = TOKENS) -> list[Job]:
    return [Job(f"{name}{i}", prompt(n, i), tokens, GREEDY, Workload.REALTIME) for i, n in enumerate(LENGTHS)]


def odd_jobs(name: str) -> list[Job]:
    """Whose sampling keeps something of what was before: in a generator, in a row of the batch, in a grammar."""
    grammar = Structure(StructureKind.REGEX, "[a-z ]{60,90}")
    odd = [
        Sampling(temperature=1.0, seed=11, min_p=0.02, ignore_eos=True),
        Sampling(temperature=0.0, logit_bias={500: 9.0, 700: 9.0}, presence_penalty=1.5, ignore_eos=True),
        Sampling(temperature=0.0, structure=grammar, ignore_eos=True),
    ]
    return [Job(f"{name}-odd{i}", prompt(40, 90 + i), TOKENS, s, Workload.REALTIME) for i, s in enumerate(odd)]


@asynccontextmanager
async def under_way(
    engine: VllmEngine, wanted: list[Job]
) -> AsyncIterator[tuple[list[Stream], Awaitable[list[list[int]]]]]:
    """The streams, each with its first token, and all their tokens in the end. What is left of them when this ends is aborted."""
    streams = [Stream(job) for job in wanted]
    tasks = [asyncio.create_task(stream.follow(engine)) for stream in streams]
    await asyncio.gather(*(stream.at(1) for stream in streams))
    try:
        yield streams, asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(engine: VllmEngine, wanted: list[Job]) -> list[list[int]]:
    return await asyncio.gather(*(Stream(job).follow(engine) for job in wanted))


async def at_rest(engine: VllmEngine) -> None:
    """Until nobody has a request here, and every block is free."""
    while (load := engine.load()).running or load.waiting or load.free_blocks != load.total_blocks - OWN_BLOCKS:
        await asyncio.sleep(0.01)


async def resize(engine: VllmEngine, size: int, *, carry: bool = True) -> Reblock:
    done = await engine.reblock(size, when=When.NOW, carry=carry)
    assert carry or not done.carried_tokens
    assert done.after.block_size == engine.limits.block_size == size
    assert done.after.total_blocks == engine.limits.total_blocks == engine.load().total_blocks
    return done


# In the engine's process.


def fail_once(_: Any, module: str, path: str) -> None:
    """Its next call fails; those after it do not."""
    *owners, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    real: Callable[..., Any] = getattr(holder, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        setattr(holder, name, real)
        raise RuntimeError(f"{name} was made to fail")

    setattr(holder, name, fail)


def fail_always(_: Any, module: str, name: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} was made to fail")

    setattr(importlib.import_module(module), name, fail)


def seen(worker: Any) -> dict[str, Any]:
    """How the model's side has cut its cache, and what the batch and those who change logits remember."""
    runner = worker.worker.model_runner
    cache = runner.kv_caches[0]
    return {
        "blocks": cache.shape[0],
        "where": cache.untyped_storage().data_ptr(),
        "bytes": cache.untyped_storage().nbytes(),
        "block_size": runner.input_batch.block_table.block_tables[0].block_size,
        "rows": len(runner.input_batch.req_id_to_index),
        "biased": sum(len(getattr(p, "biases", ())) for p in runner.input_batch.logitsprocs.all),
    }


def layouts(worker: Any) -> set[str]:
    """Whatever was found out about where KV lies."""
    return set(worker.worker._trimtab_layouts.values())


def unlearn_layouts(worker: Any) -> None:
    known = worker.worker._trimtab_layouts
    sizes = [128, 64]
    known.update({(*pair, *key[2:]): "" for key in list(known) for pair in (sizes, sizes[::-1])})


def learn_layouts(worker: Any) -> None:
    """What is not known is tried out when it is asked for."""
    worker.worker._trimtab_layouts.clear()


def note_pulse(_: Any) -> None:
    """What the board says at the moment when KV is moved next."""
    from services.worker.engines import vllm_carry

    real = vllm_carry.place

    def noting(scheduler: Any, source: Any) -> Any:
        vllm_carry.place = real
        vllm_carry.noted = (scheduler._row.ended, scheduler._row.predicted_ms)  # type: ignore[attr-defined]
        return real(scheduler, source)

    vllm_carry.place = noting


def noted_pulse(_: Any) -> Any:
    from services.worker.engines import vllm_carry

    return vllm_carry.noted  # type: ignore[attr-defined]


def alive(_: Any) -> dict[str, int]:
    """How many there are of what is made anew with each change."""
    gc.collect()
    names = ("InputBatch", "KVCacheManager", "BlockPool")
    found = [type(thing).__name__ for thing in gc.get_objects()]
    return {name: found.count(name) for name in names}


def touch(worker: Any) -> None:
    """Write all of the cache, whose pages else become resident one by one. What was cached in it is gone."""
    worker.worker.model_runner.kv_caches[0].untyped_storage().fill_(0)


async def there(engine: VllmEngine, what: Callable[..., Any], *args: str) -> Any:
    (answer,) = await engine._llm.collective_rpc(what, args=args)
    return answer


async def refused(engine: VllmEngine, size: int, **how: Any) -> ReblockRefused:
    with pytest.raises(ReblockRefused) as caught:
        await engine.reblock(size, **{"when": When.NOW, **how})
    return caught.value
