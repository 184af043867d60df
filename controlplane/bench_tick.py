"""`trimtab simulate tick`: what a tick of all controllers costs the leader, by simulated nodes that report each 0.8 s. No engines run.

Two meshes: a healthy one, in which nobody has anything to decide, and one in which every worker misses its objective. What nodes say is
drawn beforehand, so that only the fold and the tick are timed. The clock is handed in (seconds of processor
time: others on the machine are not measured).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.bench_loops import Goal
from controlplane.controllers.decision import Controller
from controlplane.rehearsal import Rehearsal
from trimtab import measures
from trimtab.messages import Hello, Load, NodeState, Report, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Document, Limits, Node

NODES, SIZES = 1000, (500, 1000, 2000)
SECONDS, QUICK_SECONDS = 90, 30
WARM_S = 10
"""Ticks before the first windows are closed, which cost less."""
REPORT_S, PHASES = 0.8, 8
BEGIN = 7
"""Nodes begin within so many reports of each other, as those of a mesh do: their windows do not close all at one tick."""
SHAPES = 16
"""So many different reports are drawn; nodes take turns with them."""
GOAL_MS = 50.0
LINEAR = 1.5
"""A node may cost so many times in the largest mesh what it costs in the smallest."""
LIMITS = Limits(64, 2048, 131_072, 16, 65_536, "simulated")
POOLS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a tick's decisions, and of what they make of the policy's document on top of them; microseconds of a report's fold."""

    mesh: str
    nodes: int
    ticks: int
    median_ms: float
    p99_ms: float
    max_ms: float
    write_p99_ms: float
    report_us: float
    adjustments: int

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def reports(rng: random.Random, *, healthy: bool) -> list[Report]:
    """What one interval of 0.8 s looks like: 4 REALTIME first tokens, 60 gaps, 2 BATCH."""
    found = []
    for _ in range(SHAPES):
        slow = 1.0 if healthy else 20.0
        drawn = {
            measures.ttft(Workload.REALTIME, measures.HOT): [slow * rng.uniform(20, 200) for _ in range(4)],
            measures.ttft(Workload.BATCH, measures.COLD): [rng.uniform(100, 900) for _ in range(2)],
            measures.itl(Workload.REALTIME): [rng.uniform(10, 60) for _ in range(60)],
            measures.itl(Workload.BATCH): [rng.uniform(10, 60) for _ in range(60)],
            measures.e2e(Workload.REALTIME): [rng.uniform(1e3, 9e3) for _ in range(4)],
            measures.e2e(Workload.BATCH): [rng.uniform(5e3, 2e4) for _ in range(2)],
            measures.PROMPT: [rng.lognormvariate(7.5, 1.0) for _ in range(6)],
            measures.TOTAL: [rng.lognormvariate(7.7, 1.0) for _ in range(6)],
        }
        gauges = {
            measures.REALTIME_RUNNING: 12.0, measures.BATCH_RUNNING: 14.0, measures.REALTIME_WAITING: 0.0 if healthy else 14.0,
            measures.BATCH_WAITING: 6.0, measures.COLD_WAITING: 3.0, measures.KV_USED: rng.uniform(0.3, 0.5),
            measures.STORED_TOKENS: 400_000.0, measures.KV_BYTES_PER_TOKEN: 131_072.0, measures.RSS_BYTES: 4e9,
            measures.BUSY: 0.9, measures.HUNG_S: 0.0,
        }  # fmt: skip
        sketches = {}
        for name, values in drawn.items():
            sketch = Sketch()
            for v in values:
                sketch.add(v)
            sketches[name] = sketch.to_bytes()
        found.append(Report(0, NodeState.SERVING, Load(26, 6, 9_000, 40_000, 65_536), 0, {}, sketches, 800, gauges))
    return found


def measure(
    nodes: int, controllers: Sequence[Controller], clock: Callable[[], float], *, healthy: bool, seconds: int
) -> Iterator[float | Cost]:
    """Now and then the share that is over, at last the cost. `clock` gives seconds of processor time."""
    document = Document()
    rehearsal = Rehearsal(controllers, document)
    shapes = reports(random.Random("tick"), healthy=healthy)
    hellos = []
    for i in range(nodes):
        hello = Hello(Node(f"w{i}", f"pool-{i % POOLS}", limits=LIMITS), f"w{i}/1", Role.WORKER, "m")
        rehearsal.joined(hello, 0.0)
        hellos.append(hello)
    took: list[float] = []
    wrote: list[float] = []
    folded, fold_s = 0, 0.0
    sequence = [0] * nodes
    at = 0.0
    for second in range(1, seconds + 1):
        while at < second:
            phase = round(at / (REPORT_S / PHASES))
            due = [i for i in range(nodes) if i % PHASES == phase % PHASES and phase >= PHASES * (i // PHASES % BEGIN)]
            made = []
            for i in due:
                sequence[i] += 1
                n = sequence[i]
                counters = {
                    measures.REQUESTS: 6 * n, measures.requests_of(Workload.REALTIME): 4 * n, measures.ERRORS: 0,
                    measures.over(Workload.REALTIME): 0 if healthy else 2 * n, measures.OUTPUT_TOKENS: 120 * n,
                    measures.PROMPT_TOKENS: 12_000 * n, measures.COMPUTED_TOKENS: 12_100 * n,
                    measures.REALTIME_WAITS: 4 * n, measures.REALTIME_WAIT_MS: 40 * n, measures.BATCH_WAITS: 2 * n,
                    measures.BATCH_WAIT_MS: 400 * n,
                }  # fmt: skip
                s = shapes[(i + n) % SHAPES]
                made.append(Report(n, s.state, s.load, 50 * n, counters, s.sketches, s.interval_ms, s.gauges))
            begun = clock()
            for i, report in zip(due, made, strict=True):
                rehearsal.reported(hellos[i].node.node_id, report, at)
            fold_s += clock() - begun
            folded += len(due)
            at += REPORT_S / PHASES
        begun = clock()
        planned = rehearsal.decide(float(second))
        decided = clock()
        rehearsal.carry_out(planned, float(second))
        if second > WARM_S:
            took.append(1000.0 * (decided - begun))
            wrote.append(1000.0 * (clock() - decided))
        yield second / seconds
    took.sort()
    wrote.sort()
    yield Cost(
        "healthy" if healthy else "in trouble",
        nodes,
        len(took),
        took[len(took) // 2],
        took[min(len(took) - 1, int(0.99 * len(took)))],
        took[-1],
        wrote[min(len(wrote) - 1, int(0.99 * len(wrote)))],
        1e6 * fold_s / max(1, folded),
        len(rehearsal.document.adjustments),
    )


def goals(costs: Sequence[Cost]) -> list[Goal]:
    healthy = {c.nodes: c for c in costs if c.mesh == "healthy"}
    found = []
    for c in costs:
        if c.nodes == NODES:
            found.append(Goal(f"tick at {c.nodes} nodes, {c.mesh}: median, ms", GOAL_MS, True, c.median_ms))
            found.append(Goal(f"tick at {c.nodes} nodes, {c.mesh}: P99, ms", GOAL_MS, True, c.p99_ms))
    small, large = healthy.get(SIZES[0]), healthy.get(SIZES[-1])
    if small and large:
        ratio = (large.median_ms / large.nodes) / (small.median_ms / small.nodes)
        found.append(Goal(f"a node's cost at {large.nodes} nodes, of that at {small.nodes}", LINEAR, True, ratio))
    return found
