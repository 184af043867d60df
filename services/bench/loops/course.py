"""`trimtab bench loops`: a burst of 0.5 → 1.5 times what a real engine can do, by four arms, and with --arms ablations by one for each
controller.

One mesh is kept up; between turns only its policy changes: `scheduler.mode` and `loops.*`. Arrivals of a round are the same in every arm.
Objectives are four times what a request alone takes on this machine. An arm begins when nothing is left of the one before: no request, and
no adjustment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from services.bench.arms import MODEL
from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.loops import figures
from services.bench.loops.block import Block, Written, of_json
from services.bench.loops.load import send
from services.bench.loops.plan import FOUR, FULL, QUICK, WITH, WITHOUT, Arm, Arrival, Course, arrivals
from services.bench.mixed.workload import TOKENS, prompt
from services.bench.options import Options
from services.bench.processes import BenchError, Processes
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path, start_vllm_mesh
from services.bench.stats import median
from services.bench.steering import Steering
from trimtab.client import Client
from trimtab.kit.cli import ExitCode
from trimtab.messages import Delta, Request, Sampling, Workload

ROUNDS, QUICK_ROUNDS = 3, 1
FLOOD_S, FLOOD = 40.0, 24
"""What the engine can do is what FLOOD callers get done in so long."""
ALONE = 8
OBJECTIVE = 4
"""Times what a request alone takes (DESIGN §4, the preset)."""
DRAIN_S = 60.0
"""A block takes so much longer than its load, for the forecast only."""
CALM_S = 90.0
"""Adjustments live a minute after the last word of their controller."""
HISTORY = 400


@dataclass(frozen=True, slots=True)
class Found:
    """What this machine can do: tokens a second, and a lone request's times in ms."""

    capacity: float
    ttft_ms: float
    itl_ms: float

    @property
    def objectives(self) -> tuple[int, int]:
        return round(OBJECTIVE * self.ttft_ms), round(OBJECTIVE * self.itl_ms)

    @property
    def policy(self) -> dict[str, str]:
        ttft_ms, itl_ms = self.objectives
        return {
            "paths.hot_below": "1024",
            "prefill.itl_budget_ms": str(max(1, itl_ms // 2)),
            "objectives.ttft_p99_ms": str(ttft_ms),
            "objectives.itl_p99_ms": str(itl_ms),
        }


async def run(options: Options) -> Report:
    """Cancelled, it reports the turns that are whole."""
    if options.scenario == "hang":
        from services.bench.loops import hang

        return await hang.run(options)
    arms = chosen(options.arms, FOUR)
    course = QUICK if options.quick else FULL
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    model = await asyncio.to_thread(model_path, options.model)
    directory = options.resume or new_directory("loops")
    setup = {"model": options.model, "course": asdict(course), "arms": [a.name for a in arms], "seed": options.seed}
    kept = Checkpoint(directory, setup)
    blocks = [of_json(p["block"]) for p in kept.parts if "block" in p]
    found = next((Found(**p["found"]) for p in kept.parts if "found" in p), None)
    facts, whole, expected_s = machine(), True, course.whole_s + DRAIN_S
    try:
        async with Processes(directory / "logs") as processes:
            with progress(rounds * len(arms) * expected_s + 2 * FLOOD_S) as show:
                show.stage("starting a control plane, a worker with vLLM, and a gateway")
                mesh = await start_vllm_mesh(processes, Shape(model, max_num_seqs=32))
                steering = Steering(processes, mesh.control)
                await steering.connected()
                async with Client(mesh.gateway) as client:
                    await steering.steer(FOUR[2].policy)
                    if found is None:
                        found = await _calibrate(client, course, show)
                        kept.add({"found": asdict(found), **now()})
                    show.done(FLOOD_S)
                    await steering.steer(found.policy)
                    for number in range(rounds):
                        # Each arm comes first, second … in turn: what drifts with time falls on all of them.
                        for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                            if any((b.arm, b.round) == (arm.name, number) for b in blocks):
                                show.skip(expected_s)
                                continue
                            block = await _turn(client, steering, arm, number, course, found, options.seed, show)
                            blocks.append(block)
                            kept.add({"block": block.as_json(), **now()})
                            show.done(expected_s)
                processes.check()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        whole = False
    return figures.report(arms, blocks, found, course, facts, command(), directory, whole)


def chosen(names: Sequence[str], usual: tuple[Arm, ...]) -> tuple[Arm, ...]:
    if not names:
        return usual
    known = {a.name: a for a in (*FOUR, *WITHOUT, *WITH)}
    if tuple(names) == ("ablations",):
        return (FOUR[2], FOUR[3], *WITHOUT, *WITH)
    if unknown := [n for n in names if n not in known]:
        text = f"no arm is called {unknown[0]!r}; there are {', '.join(known)}, and ablations for all of the last"
        raise BenchError(text, ExitCode.USAGE)
    return tuple(known[n] for n in names)


async def _calibrate(client: Client, course: Course, show: Progress) -> Found:
    """A few requests alone, then as many callers as there are slots."""
    ttft_ms, itl_ms = await alone(client, show)
    mix = [replace(a, workload=Workload.BATCH) for a in arrivals(replace(course, low=1.0, high=1.0), 2000.0, "flood")]
    return Found(await flood(client, mix, FLOOD, FLOOD_S, show), ttft_ms, itl_ms)


async def alone(client: Client, show: Progress, vocabulary: int = TOKENS) -> tuple[float, float]:
    """Time to the first token, and from one to the next, of a request that has the mesh for itself; medians, in ms."""
    show.stage("what a request alone takes")
    firsts, gaps = [], []
    for i in range(ALONE + 1):
        begun = time.monotonic()
        sampling = Sampling(max_tokens=16, ignore_eos=True, temperature=0.0)
        asked = Request("", MODEL, prompt(f"alone/{i}", 64, vocabulary), sampling)
        async with aclosing(client.generate(asked)) as events:
            times = [time.monotonic() async for event in events if isinstance(event, Delta) and event.token_ids]
        if i:
            firsts.append(times[0] - begun)
            gaps += [b - a for a, b in pairwise(times)]
    return 1000.0 * median(firsts), 1000.0 * median(gaps)


async def flood(
    client: Client, mix: Sequence[Arrival], callers: int, lasts_s: float, show: Progress, vocabulary: int = TOKENS
) -> float:
    """Tokens a second that so many callers get done, who ask for one of the mix after another."""
    show.stage(f"what can be done, by {callers} callers")
    done, begun = 0, time.monotonic()

    async def caller(k: int) -> None:
        nonlocal done
        for i, a in enumerate(mix[k::callers]):
            await _ask(client, a, prompt(f"flood/{k}/{i}", a.prompt, vocabulary))
            done += a.prompt + a.output

    with suppress(TimeoutError):
        async with asyncio.timeout(lasts_s), asyncio.TaskGroup() as group:
            for k in range(callers):
                group.create_task(caller(k))
    return done / (time.monotonic() - begun)


async def _ask(client: Client, a: Arrival, ids: tuple[int, ...]) -> None:
    sampling = Sampling(max_tokens=a.output, ignore_eos=True, temperature=0.0)
    async with aclosing(client.generate(Request("", MODEL, ids, sampling, a.workload))) as events:
        async for _ in events:
            pass


async def _turn(
    client: Client, steering: Steering, arm: Arm, number: int, course: Course, found: Found, seed: int, show: Progress
) -> Block:
    show.stage(f"round {number + 1}: {arm.name}")
    await calm(steering, arm)
    await steering.steer(arm.policy)
    begun_ms = time.time() * 1000.0
    mine = arrivals(course, found.capacity, f"{seed}/{number}")
    load = await send(client, mine, f"{seed}/{number}/{arm.name}", lambda s: None)
    ended_s = time.time() - begun_ms / 1000.0
    entries = await steering.history(HISTORY)
    realtime = tuple(sorted(load.realtime, key=lambda r: r.at_s))
    return Block(
        arm.name,
        number,
        realtime,
        tuple(load.batch_tokens),
        load.batch_failed,
        tuple(written(entries, begun_ms)),
        ended_s,
    )


async def calm(steering: Steering, arm: Arm) -> None:
    """Until no controller holds anything: what one arm's loops did is nothing of the next one's. They let go as they are switched off; those
    that are on may hold on for as long as there is no load to judge by.
    """
    await steering.steer(FOUR[2].policy)
    deadline = time.monotonic() + CALM_S
    while await steering.adjusted():
        if time.monotonic() > deadline:
            raise BenchError(
                f"controllers still hold adjustments {CALM_S:g} s after the load before {arm.name!r} ended"
            )
        await asyncio.sleep(2.0)


def written(entries: Sequence[dict[str, Any]], since_ms: float) -> list[Written]:
    """What controllers wrote since, oldest first; renewals left out."""
    found = []
    for e in reversed(entries):
        if not e["author"].startswith("controller/") or e["written_unix_ms"] < since_ms:
            continue
        for c in e["changes"]:
            if c["before"] != c["after"]:
                what = f"{c['scope'].removeprefix('adjustment/')}: {c['field']}"
                at_s = (e["written_unix_ms"] - since_ms) / 1000.0
                found.append(Written(at_s, e["author"].removeprefix("controller/"), what, _value(c["after"])))
    return found


def _value(text: str | None) -> float | None:
    """Of ×0.8, +1 or -1; a word counts as lower than anything that people have."""
    if text is None:
        return None
    if text.startswith("="):
        return 0.0
    return float(text.removeprefix("×")) if text.startswith("×") else 1.0 + float(text)
