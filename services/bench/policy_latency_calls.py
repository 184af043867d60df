"""An engine and the policies that are put to it, in one process: what `policy-latency` times.

It is the process that a worker is as far as the engine goes: `VllmEngine` embedded, policies by `apply`. What it finds goes out on stdout as
JSON lines: {"ready"}, {"idle_ms": […]}, {"calls": [{…}], "steps_ms": […]}, {"end"}, or {"error"}. Times are of time.monotonic(), the board's
clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop

from services.bench.mixed.workload import prompt
from services.bench.policy_latency_figures import Call, as_json
from services.bench.stats import median
from services.worker.engines import Applied, Job, Output
from services.worker.engines.board import Row
from trimtab.errors import TrimtabError
from trimtab.kit.process import die_with_parent
from trimtab.messages import Sampling, Workload
from trimtab.policy import Policy, with_fields

STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 8, 50, 2000
SETTLED_TOKENS, SETTLED_STEPS = 10, 4
"""What each stream has given, and then the steps that were seen, before anything counts."""
FIELD, LOWEST, HIGHEST = "batch.active", 8, 31
"""The field that changes with each call; no value of it holds a stream back or exceeds the engine."""
WARM_UP_CALLS = 20
IDLE_PAUSE_S = 0.02
"""Pauses are uniform from 0 to this; beside steps, from 0 to the length of one, since an acknowledgement comes as one begins."""
REST_S = 2.0
"""vLLM spins for a second after its last step."""
WATCH_S = 0.003
"""Between two looks at the board; steps are longer."""
CHUNK = 20

Say = Callable[[dict[str, Any]], None]


class Engine(Protocol):
    """What is asked of an engine here; see `services.worker.engines.Engine` and `VllmEngine.row`."""

    async def apply(self, policy: Policy) -> Applied: ...
    def row(self) -> Row: ...
    def generate(self, job: Job) -> AsyncGenerator[Output, None]: ...


def policies() -> Iterator[Policy]:
    """Endless; each differs from the one before it."""
    while True:
        for active in range(LOWEST, HIGHEST + 1):
            yield with_fields(Policy(), {FIELD: active})


@dataclass(slots=True)
class Steps:
    """What the board has said of steps. `begun` by step number; under async scheduling two are in flight, and the older one counts as ended."""

    begun: dict[int, float] = field(default_factory=dict)

    def note(self, row: Row) -> int:
        """How many steps have ended."""
        if row.step_no:
            self.begun.setdefault(row.step_no, row.begun)
        return row.step_no if row.ended else row.step_no - 1

    def end_of(self, step_no: int) -> float | None:
        """Beside a backlog a step ends as the next one begins."""
        return self.begun.get(step_no + 1)

    def lengths_ms(self) -> list[float]:
        """Of each step that was seen to begin and to end; of steps among which some were missed, their mean."""
        seen = itertools.pairwise(sorted(self.begun.items()))
        return [(end - begun) * 1000.0 / (last - first) for (first, begun), (last, end) in seen]

    async def watch(self, engine: Engine) -> None:
        while True:
            self.note(engine.row())
            await asyncio.sleep(WATCH_S)


async def idle(
    engine: Engine, count: int, rng: random.Random, pause_s: float = IDLE_PAUSE_S
) -> AsyncGenerator[float, None]:
    """Milliseconds of each call on an engine that does nothing, after some that don't count."""
    changing = policies()
    for number in range(WARM_UP_CALLS + count):
        await asyncio.sleep(rng.uniform(0.0, pause_s))
        policy = next(changing)
        put = time.monotonic()
        await engine.apply(policy)
        ms = (time.monotonic() - put) * 1000.0
        if number >= WARM_UP_CALLS:
            yield ms


async def busy(engine: Engine, steps: Steps, count: int, rng: random.Random) -> AsyncGenerator[Call, None]:
    """Each call at a random moment of running steps."""
    changing = policies()
    for _ in range(count):
        lengths = steps.lengths_ms()
        await asyncio.sleep(rng.uniform(0.0, median(lengths) / 1000.0 if lengths else IDLE_PAUSE_S))
        policy = next(changing)
        before = steps.note(engine.row())
        put = time.monotonic()
        applied = await engine.apply(policy)
        ack = time.monotonic()
        after = steps.note(engine.row())
        end = steps.end_of(before + 1)
        yield Call((ack - put) * 1000.0, before, after, applied.step_no, None if end is None else (end - put) * 1000.0)


@asynccontextmanager
async def decoding(engine: Engine, seed: str, vocabulary: int) -> AsyncGenerator[Steps, None]:
    """STREAMS that decode for as long as this lasts, each past its first tokens, and the steps that they make."""
    given, steps = [0] * STREAMS, Steps()

    async def stream(i: int) -> None:
        for again in range(1 << 30):
            name = f"{seed}/{i}/{again}"
            job = Job(
                name, prompt(name, STREAM_PROMPT, vocabulary), STREAM_OUTPUT, Sampling(temperature=0.0, ignore_eos=True),
                Workload.REALTIME, arrival_ms=time.monotonic() * 1000.0,
            )  # fmt: skip
            async with aclosing(engine.generate(job)) as outputs:
                async for output in outputs:
                    given[i] += len(output.token_ids)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(i)) for i in range(STREAMS)]
        while min(given) < SETTLED_TOKENS:
            await asyncio.sleep(WATCH_S)
        tasks.append(group.create_task(steps.watch(engine)))
        while len(steps.begun) < SETTLED_STEPS:
            await asyncio.sleep(WATCH_S)
        yield steps
        for task in tasks:
            task.cancel()


async def measure(engine: Engine, idle_calls: int, busy_calls: int, seed: int, vocabulary: int, say: Say) -> None:
    """Both, told as they come."""
    rng = random.Random(f"{seed}/policy-latency")
    await asyncio.sleep(REST_S)
    say({"ready": True})
    found: list[Any] = []
    async with aclosing(idle(engine, idle_calls, rng)) as times:
        async for ms in times:
            found.append(ms)
            if len(found) == CHUNK:
                say({"idle_ms": found})
                found = []
    say({"idle_ms": found})
    async with decoding(engine, f"{seed}/stream", vocabulary) as steps:
        found = []
        async with aclosing(busy(engine, steps, busy_calls, rng)) as calls:
            async for call in calls:
                found.append(as_json(call))
                if len(found) == CHUNK:
                    say({"calls": found, "steps_ms": steps.lengths_ms()})
                    found = []
        say({"calls": found, "steps_ms": steps.lengths_ms()})
    say({"end": True})


async def run(args: argparse.Namespace, say: Say) -> None:
    from services.worker.engines.vllm import VllmEngine

    engine = VllmEngine(
        model_path=args.model,
        model="bench",
        max_num_seqs=args.max_num_seqs,
        max_step_tokens=args.max_num_batched_tokens,
        max_model_len=None,
        dtype=args.dtype,
        kv_cache_gib=args.kv_cache_gib,
    )
    try:
        await engine.start()
        work = measure(engine, args.idle_calls, args.busy_calls, args.seed, engine.tokenizer.vocab_size, say)
        measuring = asyncio.create_task(work)
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, measuring.cancel)
        with suppress(asyncio.CancelledError):
            await measuring
    except ExceptionGroup as failures:
        e = failures.exceptions[0]
        if not isinstance(e, TrimtabError):
            raise
        say({"error": str(e)})
    except TrimtabError as e:
        say({"error": str(e)})
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times policies that are put to an engine; for `trimtab bench policy-latency`."
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    for name in (
        "max-num-seqs",
        "max-num-batched-tokens",
        "kv-cache-gib",
        "idle-calls",
        "busy-calls",
        "seed",
        "parent-pid",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent_pid, signal.SIGTERM)
    # Whatever else writes to stdout, vLLM and its children included, must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    uvloop.run(run(args, say))


# vLLM starts its processes by importing this module anew.
if __name__ == "__main__":
    main()
