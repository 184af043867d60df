"""`trimtab drill restart`: workers are started anew one after another with other settings, under load, by the verb that people type.

Three trials on one mesh of three simulated engines. Settings that are good: every worker comes back by them, never two away at a time, and no
client notices more than a pause, though a drain is shorter than a stream. Settings that no worker takes: nothing happens. Settings with which
no engine starts: the first worker goes by those of before at its third start, it ends there, and nobody else has gone. With --vllm the first
on two real engines too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.bench.checkpoint import new_directory
from services.bench.processes import BenchError
from services.bench.progress import Progress
from services.bench.report import Report
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill.admin import NodeNow
from services.drill.loop_figures import Trial, counted, present
from services.drill.loops import CALM, COMMON, MUCH, STEP_MS, TOKEN_US, Demand, Stand, conducted, stand
from services.drill.mesh import Shape
from services.drill.options import DrillOptions
from trimtab.kit.process import EXIT_RESTART
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import NodeState

GOOD, BAD, BROKEN = "good settings", "settings that nobody takes", "settings that no engine starts with"
ROWS_BEFORE, ROWS = 64, 48
DEAD_STARTS = 2
"""That a worker makes before it leaves out what it was told."""
VERB_S = 240.0
REAL_VERB_S = 560.0
LOOK_S = 0.1
VERB = ("-m", "trimtab_cli", "rollout", "restart", "--yes")
AUTHOR = "trimtab drill"


@dataclass(frozen=True, slots=True)
class Plan:
    """A worker has `drain_s` to finish and is watched for `bake_s`; `load_s` before and after."""

    demand: Demand = MUCH
    drain_s: float = 0.5
    bake_s: float = 6.0
    load_s: float = 3.0
    expected_s: float = 90.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(12, 12), drain_s=0.1, bake_s=1.0, load_s=1.0, expected_s=45.0)
REAL = replace(FULL, demand=Demand(3, 8), drain_s=2.0, bake_s=5.0, load_s=5.0, expected_s=240.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL
    engine = None
    if options.vllm:
        model = await asyncio.to_thread(model_path, options.model)
        engine = Engine(model, dtype="float32", max_num_seqs=16, kv_cache_gib=1)

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of three simulated engines")
        async with stand(new_directory("drill-restart"), simulated()) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 4)
            await drilled(s, wanted, trials, show)
        if engine is not None:
            show.stage("starting two workers with vLLM")
            shape = Shape(2, 1, engine.worker_flags(), engine.environment(), CALM, valkey=True)
            async with stand(new_directory("drill-restart-real"), shape) as s:
                await s.undisturbed(REAL.demand, options.seed)
                show.stage("two vLLM workers are started anew")
                told = {"worker.max_num_seqs": "8", "worker.block_size": "32"}
                await rolled(s, REAL, trials, Trial(f"{GOOD}, vllm", "vllm", None), told, REAL_VERB_S)
                show.done(REAL.expected_s)

    said = [
        f"a worker has {wanted.drain_s:g} s to finish, and is watched for {wanted.bake_s:g} s",
        f"good settings: max_num_seqs {ROWS} instead of {ROWS_BEFORE}",
    ]
    if options.quick:
        said.append(
            f"--quick: fewer streams, and each worker is watched for {wanted.bake_s:g} s instead of {FULL.bake_s:g}"
        )
    return await conducted(
        "restart",
        wanted.expected_s + (REAL.expected_s if engine else 0.0),
        course,
        said,
        COMMON.replace("two", "three"),
    )


def simulated() -> Shape:
    """Any two of them hold all streams."""
    flags = ["--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", str(ROWS_BEFORE)]
    policy = {**CALM, "batch.active": str(ROWS)}
    return Shape(3, 1, ["--engine", "simulated", *flags], policy=policy, valkey=True)


async def drilled(s: Stand, wanted: Plan, trials: list[Trial], show: Progress) -> None:
    show.stage("three workers are started anew with other settings")
    await rolled_anew(s, wanted, trials)
    show.done(wanted.expected_s / 4)
    show.stage("settings that no worker takes")
    await refused(s, wanted, trials)
    show.done(wanted.expected_s / 4)
    show.stage("settings with which no engine starts")
    await broken(s, wanted, trials)
    show.done(wanted.expected_s / 4)


async def rolled_anew(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial(GOOD, "simulated", None)
    await rolled(s, wanted, trials, trial, {"worker.max_num_seqs": str(ROWS)}, VERB_S)


async def rolled(
    s: Stand, wanted: Plan, trials: list[Trial], trial: Trial, told: dict[str, str], within_s: float
) -> None:
    """All of them, under load."""
    trials.append(trial)
    before, ended = await _incarnations(s), len(s.supervisor.ends)
    away: list[int] = []
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
        looking = asyncio.create_task(_counting_away(s, away))
        try:
            begun = time.monotonic()
            over = await restart(s, wanted, told, within_s)
            trial.figures["seconds"] = time.monotonic() - begun
        finally:
            await cancel_and_wait(looking)
        await _all_back(s)
        await asyncio.sleep(wanted.load_s)
    after, now = await _incarnations(s), await _told(s)
    ends = s.supervisor.ends[ended:]
    trial.did = f"{over['stage']}: {over['verdict']}"
    trial.figures |= {
        "away_at_once": float(max(away, default=0)),
        "away_s": max((e.back - e.at for e in ends), default=0.0),
    }
    trial.more += [
        present(trial, "done", over["stage"] == "done"),
        present(trial, "all_are_other_processes", all(before[w] != after[w] for w in before)),
        present(trial, "all_run_by_what_they_were_told", all(now[w] == told for w in before)),
        present(trial, "all_ended_to_be_started_anew", sorted(e.code for e in ends) == [EXIT_RESTART] * len(before)),
        present(trial, "streams_moved", any(o.moves for o in trial.outcomes)),
        counted(trial, "workers_away_at_once", float(max(away, default=0)), most=1.0),
    ]
    if (rows := told.get("worker.max_num_seqs")) is not None:
        limits = await _rows(s)
        trial.more.append(present(trial, "all_have_the_new_limit", set(limits.values()) == {int(rows)}))


async def refused(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial(BAD, "simulated", None)
    trials.append(trial)
    before = await _incarnations(s)
    async with s.load(trial):
        over = await restart(s, wanted, {"worker.max_num_seqs": "0"}, VERB_S)
    trial.did = f"{over['stage']}: {over['verdict']}"
    trial.more += [
        present(trial, "stopped", over["stage"] == "stopped"),
        present(trial, "says_what_is_wrong", "max_num_seqs must be at least 1" in over["verdict"]),
        present(trial, "nothing_happened", await _incarnations(s) == before),
    ]


async def broken(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    """A block size that is a setting like any other, until the engine sees it."""
    trial = Trial(BROKEN, "simulated", None)
    trials.append(trial)
    before, told = await _incarnations(s), await _told(s)
    s.supervisor.may_fail, failed = DEAD_STARTS, len(s.supervisor.failed)
    async with s.load(trial):
        over = await restart(s, wanted, {"worker.block_size": "20"}, VERB_S)
        await _all_back(s)
    s.supervisor.may_fail = 0
    after, now = await _incarnations(s), await _told(s)
    trial.did = f"{over['stage']}: {over['verdict']}"
    trial.figures["dead_starts"] = float(len(s.supervisor.failed) - failed)
    changed = [w for w in before if before[w] != after[w]]
    trial.more += [
        present(trial, "stopped", over["stage"] == "stopped"),
        present(trial, "says_why", "not by the settings that it was told" in over["verdict"]),
        present(trial, "one_alone_went", len(changed) == 1),
        present(trial, "serves_by_what_it_had_before", all(now[w] == told[w] for w in changed)),
        present(trial, "the_others_are_as_they_were", all(now[w] == told[w] for w in before if w not in changed)),
        counted(trial, "dead_starts", trial.figures["dead_starts"], most=float(DEAD_STARTS)),
    ]


async def restart(s: Stand, wanted: Plan, told: dict[str, str], within_s: float) -> dict[str, Any]:
    """What `trimtab rollout restart --wait` says at its end. BenchError where it says nothing."""
    sets = [word for name, value in told.items() for word in ("--set", f"{name}={value}")]
    times = ["--drain", f"{wanted.drain_s:g}s", "--bake", f"{wanted.bake_s:g}s", "--ready", "4m"]
    argv = [*VERB, *sets, *times, "--wait", "--author", AUTHOR]
    code, out, err = await s.mesh.processes.ask([*argv, "--control", s.mesh.control, "--json"], within_s)
    try:
        said: dict[str, Any] = json.loads(out)
        return {"stage": said["stage"], "verdict": said["verdict"]}
    except (ValueError, KeyError):
        raise BenchError(f"trimtab rollout restart ended with code {code}: {err.strip() or out.strip()}") from None


async def _incarnations(s: Stand) -> dict[str, str]:
    return {name: node["incarnation"] for name, node in (await _nodes(s)).items()}


async def _told(s: Stand) -> dict[str, dict[str, str]]:
    return {name: node["told"] for name, node in (await _nodes(s)).items()}


async def _rows(s: Stand) -> dict[str, int]:
    return {name: node["limits"]["max_num_seqs"] for name, node in (await _nodes(s)).items()}


async def _nodes(s: Stand) -> dict[str, dict[str, Any]]:
    """Workers, as `trimtab fleet` has them."""
    argv = ["-m", "trimtab_cli", "fleet", "--control", s.mesh.control, "--json"]
    code, out, err = await s.mesh.processes.ask(argv, VERB_S)
    if code != 0:
        raise BenchError(f"trimtab fleet ended with code {code}: {err.strip() or out.strip()}")
    return {n["node_id"]: n for n in json.loads(out)["nodes"] if n["node_id"] in s.mesh.workers}


async def _all_back(s: Stand) -> None:
    for name in s.mesh.workers:
        if await s.mesh.back(name, s.patience_s) is None:
            raise BenchError(f"{name} is not back after {s.patience_s:g} s")


async def _counting_away(s: Stand, away: list[int]) -> None:
    """How many workers drain, are gone or start, as the control plane sees it, again and again."""
    while True:
        nodes = (await s.admin.telemetry()).nodes
        away.append(sum(not _there(nodes, name) for name in s.mesh.workers))
        await asyncio.sleep(LOOK_S)


def _there(nodes: Mapping[str, NodeNow], name: str) -> bool:
    """One that is found hung for a moment, on a machine that starts engines, is there."""
    away = (NodeState.STARTING, NodeState.DRAINING)
    return name in nodes and nodes[name].connected and nodes[name].state not in away
