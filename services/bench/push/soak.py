"""`trimtab bench soak`: ten minutes of ten puts a second to 200 nodes, five more before them, and what every process's memory does meanwhile.

Everything that is bounded is filled first (the store's log, nodes' answers, the two minutes of telemetry that a control plane keeps of each
node), so that a slope says that something grows without a bound.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from services.bench.checkpoint import new_directory
from services.bench.goals import Goal
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.push.course import Plane, herd, plane
from services.bench.push.store import used_kb
from services.bench.report import Report, command, machine
from services.bench.stats import Bound, Estimate, quantile
from trimtab.kit.cli import ExitCode, table

NODES, REPLICAS, PUTS_PER_S = 200, 2, 10.0
FULL_S, QUICK_S = 600.0, 60.0
SETTLE_S = 300.0
"""Of the same load before anything is counted: windows of telemetry fill for three minutes, allocators find their size."""
FILL_PUTS = 8600
"""The store's log holds some 8,192 puts."""
SAMPLE_S = 2.0
USED = "used_memory"
"""What the store has allocated by its own count: what it holds grows where this does, and its allocator's gaps where the process alone does."""
BATCHES = 8
"""The run is cut into so many stretches; the slope's interval is from theirs, since neighbouring samples share their noise."""
GOAL_KB_PER_MINUTE = 20.0
"""Below this a process of 200 MB doubles in a week: what is called zero. Pages come in fours of KB, arenas of allocators in MB."""


@dataclass(slots=True)
class Watched:
    """One process's resident memory, or USED, in KB at seconds."""

    name: str
    samples: list[tuple[float, float]] = field(default_factory=list)

    def slope(self) -> Estimate | None:
        """KB a minute: the median of the slopes between stretches' medians, and their quartiles' spread as an interval (Theil and Sen)."""
        size = len(self.samples) // BATCHES
        if size < 2:
            return None
        stretches = [self.samples[i * size : (i + 1) * size] for i in range(BATCHES)]
        points = [(quantile([t for t, _ in s], 0.5), quantile([kb for _, kb in s], 0.5)) for s in stretches]
        slopes = [
            60.0 * (b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]
        ]
        return Estimate(quantile(slopes, 0.5), quantile(slopes, 0.25), quantile(slopes, 0.75), len(slopes))


async def run(options: Options) -> Report:
    """The whole soak. Cancelled, it ends what it started and reports what it has."""
    if options.resume:
        raise BenchError("bench soak runs in one piece; it keeps nothing that could be resumed", ExitCode.USAGE)
    length_s, settle_s, fill = (QUICK_S, 0.0, 500) if options.quick else (FULL_S, SETTLE_S, FILL_PUTS)
    facts, notes, whole = machine(), [], True
    watched: dict[str, Watched] = {}
    puts = 0
    with progress(length_s + settle_s + 90) as show:
        try:
            async with plane(new_directory("soak"), REPLICAS) as at:
                show.stage(f"{NODES} nodes")
                nodes = await herd(at, NODES)
                show.stage(f"{fill} puts, to fill what is bounded")
                for _ in range(fill):
                    await at.put()
                show.done(90)
                if settle_s:
                    show.stage(f"{PUTS_PER_S:g} puts a second for {settle_s:g} s that do not count")
                    async for _ in _put(at, settle_s, show):
                        pass
                show.stage(f"{PUTS_PER_S:g} puts a second for {length_s:g} s")
                sampler = asyncio.create_task(_sample(at, watched))
                try:
                    last = None
                    async for identity in _put(at, length_s, show):
                        last = identity
                        puts += 1
                    saw = await nodes.until(last, 30.0)
                    held = f"{NODES - saw['missing']} of {NODES} nodes held the last of {puts} versions"
                    notes.append(f"at its end {held}; steps back: {saw['backwards']}")
                    at.processes.check()
                    if sampler.done():
                        sampler.result()
                finally:
                    sampler.cancel()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    rows = [_row(w) for w in watched.values()]
    return Report(
        "soak", rows, _goals(watched, whole and not options.quick), _sections(rows), notes, whole, facts, command(),
        setup={"nodes": NODES, "replicas": REPLICAS, "puts_per_s": PUTS_PER_S, "settle_s": settle_s, "seconds": length_s,
               "puts": puts},
    )  # fmt: skip


async def _put(at: Plane, length_s: float, show: Progress) -> AsyncIterator[Any]:
    """PUTS_PER_S for so long; yields what each wrote."""
    begun, puts = time.monotonic(), 0
    while time.monotonic() - begun < length_s:
        yield (await at.put()).identity
        puts += 1
        await asyncio.sleep(max(0.0, begun + puts / PUTS_PER_S - time.monotonic()))
        if puts % 100 == 0:
            show.done(100 / PUTS_PER_S)


async def _sample(at: Plane, watched: dict[str, Watched]) -> None:
    begun = time.monotonic()

    def add(name: str, kb: float) -> None:
        watched.setdefault(name, Watched(name)).samples.append((time.monotonic() - begun, kb))

    while True:
        for name, child in at.processes.children.items():
            add(name, psutil.Process(child.process.pid).memory_info().rss / 1024)
            if name == "store":
                add(USED, await used_kb(at.store_port))
        add("this client", psutil.Process(os.getpid()).memory_info().rss / 1024)
        await asyncio.sleep(SAMPLE_S)


def _row(w: Watched) -> dict[str, Any]:
    slope, values = w.slope(), [kb for _, kb in w.samples]
    return {
        "arm": w.name,
        "samples": len(values),
        "first_kb": values[0],
        "last_kb": values[-1],
        "highest_kb": max(values),
        "slope_kb_per_minute": slope.value if slope else None,
        "slope_interval": [slope.low, slope.high] if slope else None,
    }


def _goals(watched: Mapping[str, Watched], decisive: bool) -> list[Goal]:
    made = []
    for w in watched.values():
        if w.name == "this client":
            continue
        slope = w.slope()
        met = None if slope is None or not decisive else slope.value <= GOAL_KB_PER_MINUTE
        value = slope.value if slope else None
        made.append(Goal(f"memory_slope_kb_per_minute_of_{w.name}", GOAL_KB_PER_MINUTE, Bound.AT_MOST, value, met))
    return made


def _sections(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    head = ("PROCESS", "FIRST MB", "LAST MB", "HIGHEST MB", "KB/MIN", "QUARTILES")
    lines = []
    for r in rows:
        slope = "-" if r["slope_kb_per_minute"] is None else f"{r['slope_kb_per_minute']:.1f}"
        quartiles = "-" if r["slope_interval"] is None else ", ".join(f"{x:.1f}" for x in r["slope_interval"])
        lines.append(
            (r["arm"], *(f"{r[k] / 1024:.1f}" for k in ("first_kb", "last_kb", "highest_kb")), slope, quartiles)
        )
    return (
        [
            (
                f"Resident memory; {USED}: what the store has allocated of its own, by its count",
                table(head, lines, right=(1, 2, 3, 4)),
            )
        ]
        if rows
        else []
    )
