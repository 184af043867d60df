"""`trimtab drill oom`: engines without memory.

An engine with few KV blocks has requests preempted for memory all the time: nothing may be lost or wrong, and nobody is restarted. With vLLM
(--no-vllm leaves it out) the engine process of one worker may then have no more address space (RLIMIT_AS, of that process alone), so that it
dies at its next large allocation: the worker has to say that it was for want of memory, `oom` halves its running set for a while and tells
people, streams go on elsewhere, and it is started anew.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from dataclasses import dataclass, replace

import psutil

from services.bench.checkpoint import new_directory
from services.bench.progress import Progress
from services.bench.report import Report
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill.loop_figures import Trial, policy_words, present
from services.drill.loops import CALM, LOOP_S, MUCH, STEP_MS, TOKEN_US, Demand, Stand, conducted, simulated, stand
from services.drill.mesh import Shape
from services.drill.options import DrillOptions
from trimtab import measures

WINDOW, BLOCKS = 2048, 128
"""Tokens of the longest request, and KV blocks of 16 tokens: one such request fills the cache."""
FLAGS = (
    "--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", "64",
    "--max-model-len", str(WINDOW), "--kv-blocks", str(BLOCKS),
)  # fmt: skip
FIELD = "batch.active"
DIES_S = 30.0
"""Until an engine without address space has come to an allocation that fails, and its worker has said so."""
LEFT_MB = 8
"""Soon too little for a step of a shape that is new, and enough for last words."""
POLICY = {**CALM, "loops.oom": "on", "loops.heal": "on", "oom.release_after_s": "5"}


@dataclass(frozen=True, slots=True)
class Plan:
    demand: Demand = MUCH
    load_s: float = 20.0
    expected_s: float = 40.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(16, 16), load_s=8.0, expected_s=22.0)
REAL = Plan(Demand(6, 12), load_s=10.0, expected_s=150.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL
    there = importlib.util.find_spec("vllm") is not None
    engine = None
    if there if options.vllm is None else options.vllm:
        model = await asyncio.to_thread(model_path, options.model)
        engine = Engine(model, dtype="float32", max_num_seqs=16, kv_cache_gib=1)

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines with few KV blocks")
        async with stand(new_directory("drill-oom"), simulated(POLICY, flags=FLAGS)) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 2)
            show.stage("more than fits into their KV caches")
            await exhausted(s, wanted, trials)
            show.done(wanted.expected_s / 2)
        if engine is not None:
            show.stage("starting two workers with vLLM")
            await _real(engine, options.seed, trials, show)

    said = [
        policy_words(POLICY),
        f"simulated engines have {BLOCKS} KV blocks of 16 tokens; times count from the moment at which the engine gets no more address space",
    ]
    if engine is None:
        said.append("without vLLM: no engine dies for want of memory")
    return await conducted("oom", wanted.expected_s + (REAL.expected_s if engine else 0.0), course, said)


async def exhausted(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    """More work than the KV caches hold."""
    trial = Trial("kv exhausted", "simulated", None)
    trials.append(trial)
    before = await _preempted(s)
    begun = time.time()
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
    count = await _preempted(s) - before
    trial.figures["requests preempted for memory"] = count
    await s.settle(trial, begun, moves_too=False)
    trial.more += [
        present(trial, "requests_were_preempted", count > 0),
        present(trial, "nobody_was_restarted", not trial.others and not s.supervisor.ends),
    ]


async def _real(engine: Engine, seed: int, trials: list[Trial], show: Progress) -> None:
    shape = Shape(2, 1, engine.worker_flags(), engine.environment(), POLICY, valkey=True)
    async with stand(new_directory("drill-oom-real"), shape) as s:
        show.done(REAL.expected_s / 3)
        show.stage("streams undisturbed on vLLM")
        await s.undisturbed(REAL.demand, seed)
        show.done(REAL.expected_s / 3)
        show.stage("the engine process of w0 gets no more address space")
        trial = Trial("out of memory", "vllm", "oom", DIES_S + LOOP_S)
        trials.append(trial)
        before = await s.incarnation("w0")
        async with s.load(trial):
            await asyncio.sleep(REAL.load_s)
            begun, first = time.time(), time.monotonic()
            _starve(s.mesh.workers["w0"].engine_pid())
            if await s.detected(trial, "oom", f"{FIELD} at node/w0", begun, s.patience_s):
                await _judged(s, trial)
                await s.healed(trial, "w0", before, begun)
                await asyncio.sleep(REAL.load_s)
        if s.supervisor.ends:
            trial.figures["s until its process had ended"] = s.supervisor.ends[0].at - first
        trial.told = '"controller/oom"' in await s.why(FIELD)
        trial.more.append(present(trial, "it_ended_as_an_engine_that_died", [e.code for e in s.supervisor.ends] == [3]))
        await s.settle(trial, begun, moves_too=False, also=["release w0"])
        show.done(REAL.expected_s / 3)


async def _judged(s: Stand, trial: Trial) -> None:
    """Whether what the controller holds is what it should be."""
    mine = [a for a in await s.admin.adjustments() if a.controller == "oom"]
    trial.figures["factor of batch.active at w0"] = mine[0].factor or 0.0 if mine else 1.0
    halved = [a for a in mine if a.field == FIELD and a.factor == 0.5 and a.scope.names == ("w0",)]
    trial.more.append(present(trial, "running_set_of_that_worker_is_halved", bool(halved)))


async def _preempted(s: Stand) -> int:
    nodes = (await s.admin.telemetry()).nodes
    return sum(nodes[w].totals.get(measures.ALLOCATION_FAILURES, 0) for w in s.mesh.workers)


def _starve(pid: int) -> None:
    """What this process has now and LEFT_MB are all that it gets."""
    process = psutil.Process(pid)
    limit = process.memory_info().vms + LEFT_MB * 2**20
    process.rlimit(psutil.RLIMIT_AS, (limit, limit))
