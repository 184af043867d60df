"""`trimtab drill giants --v4`: one prompt of 100,000 tokens to a model of DeepSeek-V4's architecture, with short realtime streams beside it.

A mesh of real processes with vLLM inside. First the short streams alone, then the giant as BATCH with the same streams beside it: what they felt
is reported next to the budget that the policy gives a step. How far the giant is read is told on the way, with the time that is left.

The engine is vLLM as it is. Where it can't run V4 as it comes, as on a CPU, `--plugin-path` brings stand-ins of the user's into the engine's
processes, as plug-ins of vLLM; none are part of this product.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.processes import ROOT, BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill import giants_v4_figures as figures
from services.drill.endpoint import Door
from services.drill.giants_v4_figures import Found, Short
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.options import DrillOptions
from services.drill.witness import Seen, faults
from trimtab.kit.cli import ExitCode
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import Request, Sampling, Workload
from trimtab.policy import Policy

MODEL_TYPE = "deepseek_v4"
PLUGINS = "vllm.general_plugins"
TOKENS, QUICK_TOKENS, WINDOW = 100_000, 8000, 131_072
SHORT_PROMPT, SHORT_TOKENS, GIANT_TOKENS = 40, 24, 8
OPEN = 2
"""Short streams at a time."""
CALM_S = 8.0
"""Of short streams alone."""
LOOK_S, SAID_EVERY = 0.5, 0.05
"""The worker is asked each LOOK_S how much of the giant it has still to read; each share of it is told once."""
START_S = 45.0
PATIENCE = 4.0
"""Times what is expected; a stream that takes longer is lost."""
PREFILL = "trimtab_worker_queued_prefill_tokens"
STEPS = "trimtab_worker_engine_steps"
HINT = (
    "As it comes, vLLM runs DeepSeek-V4 on GPUs; on a CPU it needs stand-ins for V4's Triton kernels, as a plug-in: "
    "--plugin-path DIRECTORY (docs/deepseek-v4.md)"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """`environment` is what brings plug-ins into the worker; `budget_ms` is the default policy's for a step."""

    model: Path
    tokens: int
    budget_ms: int
    seed: int
    environment: dict[str, str] = field(default_factory=dict)
    vocabulary: int = 0

    @property
    def expected_s(self) -> float:
        """Of reading the giant, on two cores; what the engine shows itself corrects it soon."""
        return figures.REASONABLE.seconds(self.tokens)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = await asyncio.to_thread(planned, options)
    found, facts, whole = Found(wanted.tokens, wanted.budget_ms), machine(), True
    with progress(START_S + CALM_S + wanted.expected_s) as show:
        try:
            await _course(wanted, found, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    said = [
        "one worker with vLLM, a gateway, a control plane; clients and mesh share the machine's cores",
        f"prefill.itl_budget_ms={wanted.budget_ms}, as the policy has it by default",
        f"short streams are REALTIME, {OPEN} at a time, {SHORT_PROMPT} tokens in and {SHORT_TOKENS} out; the giant is BATCH",
        f"model {wanted.model}" + (f"; plug-ins {wanted.environment['VLLM_PLUGINS']}" if wanted.environment else ""),
    ]
    return Report(
        "giants --v4",
        figures.arms(found),
        figures.goals(found),
        figures.sections(found),
        [*said, *figures.notes(found)],
        whole,
        facts,
        command(),
        kind="drill",
    )


def planned(options: DrillOptions) -> Plan:
    """BenchError says what is missing."""
    if options.model == "default":
        raise BenchError(
            "--v4 needs a model of DeepSeek-V4's architecture: --model DIRECTORY (docs/deepseek-v4.md)", ExitCode.USAGE
        )
    model = Path(model_path(options.model))
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise BenchError(f"--v4 needs a model's directory, and {model} is none: {e}", ExitCode.USAGE) from e
    if config.get("model_type") != MODEL_TYPE:
        raise BenchError(f"{model} is of type {config.get('model_type')!r}, not {MODEL_TYPE!r}", ExitCode.USAGE)
    environment = plugins(options.plugin_path) if options.plugin_path is not None else {}
    tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    return Plan(model, tokens, Policy().prefill.itl_budget_ms, options.seed, environment, int(config["vocab_size"]))


def plugins(directory: Path) -> dict[str, str]:
    """What a worker's environment must have for vLLM to load all plug-ins that lie in the directory. BenchError where there are none."""
    names = [
        point.name for each in distributions(path=[str(directory)]) for point in each.entry_points.select(group=PLUGINS)
    ]
    if not names:
        raise BenchError(f"--plugin-path: {directory} has no entry point of {PLUGINS}", ExitCode.USAGE)
    kept = [os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)]
    path = os.pathsep.join([str(ROOT), str(directory.absolute()), *kept])
    return {"PYTHONPATH": path, "VLLM_PLUGINS": ",".join(sorted(names))}


def shape(wanted: Plan) -> Shape:
    engine = Engine(str(wanted.model), max_num_seqs=16, max_step_tokens=1024, kv_cache_gib=2)
    window = max(WINDOW, wanted.tokens + GIANT_TOKENS)
    return Shape(
        workers=1,
        gateways=1,
        flags=[*engine.worker_flags(), "--max-model-len", str(window)],
        environment={**engine.environment(), **wanted.environment},
        policy={"prefill.itl_budget_ms": str(wanted.budget_ms)},
    )


async def _course(wanted: Plan, found: Found, show: Progress) -> None:
    show.stage("starting a mesh with vLLM")
    async with _started(wanted) as running:
        show.done(START_S)
        show.stage(f"short streams alone, {CALM_S:g} s")
        # What they see first is compiled and read from the disk then.
        async with _short(running, wanted, "first", []):
            await asyncio.sleep(CALM_S / 2)
        async with _short(running, wanted, "alone", found.alone):
            await asyncio.sleep(CALM_S)
        show.done(CALM_S)
        show.stage(f"a prompt of {wanted.tokens:,} tokens, with short streams beside it")
        before = await _gauge(running, STEPS)
        async with _short(running, wanted, "beside", found.beside):
            await _giant(running, wanted, found, show)
        found.steps = int(await _gauge(running, STEPS) - before)
        running.check()


@asynccontextmanager
async def _started(wanted: Plan) -> AsyncIterator[Mesh]:
    """BenchError of a start that failed says what a CPU needs."""
    up = False
    try:
        async with mesh(new_directory("drill-giants-v4"), shape(wanted)) as running:
            up = True
            yield running
    except BenchError as e:
        if up or wanted.environment:
            raise
        raise BenchError(f"{e}\n{HINT}", e.code) from e


async def _giant(running: Mesh, wanted: Plan, found: Found, show: Progress) -> None:
    """Until it has its answer; what is known of it on the way is kept."""
    door = Door(running.gateways[0])
    begun = time.monotonic()
    patience_s = 120.0 + PATIENCE * wanted.expected_s
    asking = asyncio.create_task(door.ask(_request(wanted, "giant", wanted.tokens, GIANT_TOKENS), patience_s))
    try:
        told = 0.0
        while not asking.done():
            await asyncio.wait([asking], timeout=LOOK_S)
            left = min(wanted.tokens, await _gauge(running, PREFILL))
            found.read.append((time.monotonic() - begun, int(wanted.tokens - left)))
            if found.share - told >= SAID_EVERY and not asking.done():
                show.done((found.share - told) * wanted.expected_s)
                told = found.share
                show.line(figures.so_far(found))
        show.done((1.0 - told) * wanted.expected_s)
        found.giant = _short_of(asking.result(), begun)
    finally:
        await cancel_and_wait(asking)
        await door.close()


@asynccontextmanager
async def _short(running: Mesh, wanted: Plan, phase: str, into: list[Short]) -> AsyncIterator[None]:
    """Short streams within the block, without a pause; on leaving it, all of them have ended."""
    door, numbers, going = Door(running.gateways[0]), itertools.count(), True

    async def one_after_another() -> None:
        while going:
            request = _request(wanted, f"{phase}/{next(numbers)}", SHORT_PROMPT, SHORT_TOKENS, Workload.REALTIME)
            asked = time.monotonic()
            into.append(_short_of(await door.ask(request, 120.0), asked))

    callers = [asyncio.create_task(one_after_another()) for _ in range(OPEN)]
    try:
        yield
        going = False
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            await cancel_and_wait(caller)
        await door.close()


def _short_of(seen: Seen, asked: float) -> Short:
    first = None if seen.first is None else seen.first - asked
    return Short(first, seen.gap_s, seen.lost, tuple(faults(seen, None)), len(seen.token_ids), seen.message)


def _request(wanted: Plan, name: str, prompt: int, tokens: int, workload: Workload = Workload.BATCH) -> Request:
    """Token ids, the same for the same seed and name; no two prompts have a prefix in common."""
    chance = random.Random(f"{wanted.seed}/{name}")
    ids = tuple(chance.randrange(100, wanted.vocabulary - 1000) for _ in range(prompt))
    return Request("", MODEL, ids, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True), workload)


async def _gauge(running: Mesh, name: str) -> float:
    gauges = await running.gauges(running.workers["w0"].metrics)
    return gauges[name, ""]
