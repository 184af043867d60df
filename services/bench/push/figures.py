"""The figures of `push`: from puts to goals and tables. Pure.

A put's times are counted from just before `SetPolicy` is called, in the same clock as the nodes'. Samples of one put share its noise, so
intervals resample whole puts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, Estimate, bootstrap, quantile
from trimtab.kit.cli import table

GOAL_100_MS, GOAL_1000_MS, GOAL_NODE_KB = 10.0, 100.0, 200.0
RESAMPLES = 300
ENOUGH_PUTS = 20
"""Below this a P99 over puts decides nothing."""


@dataclass(frozen=True, slots=True)
class Put:
    """One change. Milliseconds from its call: `written_ms` until it was acknowledged; for each node, until its bytes were there and checked,
    and until it was applied."""

    written_ms: float
    here_ms: tuple[float, ...]
    applied_ms: tuple[float, ...]
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured with so many nodes and replicas. CPU in seconds for all puts; `memory_kb` is for each node, of all replicas."""

    nodes: int
    replicas: int
    puts: tuple[Put, ...]
    control_cpu_s: float
    nodes_cpu_s: float
    wall_s: float
    memory_kb: float | None = None
    idle_control_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Storm:
    """Many puts at once. `held` nodes ended on the last version, `backwards` counts steps back; pushes taken tell what was skipped."""

    nodes: int
    replicas: int
    puts: int
    took_s: float
    held: int
    backwards: int
    taken: int
    settled_ms: float


@dataclass(frozen=True, slots=True)
class Engine:
    """A real engine among the nodes: milliseconds from the call until the control plane had its answer, and the engine's own share."""

    state: str
    answered_ms: tuple[float, ...]
    apply_ms: tuple[float, ...]


@dataclass(slots=True)
class Found:
    """Raw results so far."""

    cells: list[Cell] = field(default_factory=list)
    storms: list[Storm] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)


def pooled(cells: Sequence[Cell]) -> list[Put]:
    return [put for cell in cells for put in cell.puts]


def p99(puts: Sequence[Put], what: str, seed: int) -> Estimate:
    def statistic(drawn: Sequence[Put]) -> float:
        return quantile([ms for put in drawn for ms in getattr(put, what)], 0.99)

    return bootstrap(puts, statistic, seed=seed, resamples=RESAMPLES)


def arms(found: Found, seed: int) -> list[dict[str, Any]]:
    """One object for each (nodes, replicas), storm and engine."""
    rows: list[dict[str, Any]] = []
    for nodes, replicas in sorted({(c.nodes, c.replicas) for c in found.cells}):
        cells = [c for c in found.cells if (c.nodes, c.replicas) == (nodes, replicas)]
        puts = pooled(cells)
        row: dict[str, Any] = {
            "arm": f"{nodes} nodes, {replicas} replicas",
            "nodes": nodes,
            "replicas": replicas,
            "puts": len(puts),
        }
        row["missing"] = sum(p.missing for p in puts)
        row["written_p50_ms"] = quantile([p.written_ms for p in puts], 0.5)
        for what in ("here", "applied"):
            values = [ms for put in puts for ms in getattr(put, f"{what}_ms")]
            tail = p99(puts, f"{what}_ms", seed)
            row |= {
                f"{what}_p50_ms": quantile(values, 0.5),
                f"{what}_p99_ms": tail.value,
                f"{what}_p99_interval_ms": [tail.low, tail.high],
            }
        row["last_applied_p50_ms"] = quantile([max(p.applied_ms, default=0.0) for p in puts], 0.5)
        row["control_cpu_ms_per_put"] = 1000 * sum(c.control_cpu_s for c in cells) / len(puts)
        row["nodes_cpu_ms_per_put"] = 1000 * sum(c.nodes_cpu_s for c in cells) / len(puts)
        memory = [c.memory_kb for c in cells if c.memory_kb is not None]
        row["memory_kb_per_node"] = quantile(memory, 0.5) if memory else None
        idle = [c.idle_control_cores for c in cells if c.idle_control_cores is not None]
        row["idle_control_cores"] = quantile(idle, 0.5) if idle else None
        rows.append(row)
    rows += [{"arm": f"storm, {s.nodes} nodes, {s.replicas} replicas", **asdict(s)} for s in found.storms]
    rows += [
        {
            "arm": f"real engine, {e.state}",
            "puts": len(e.answered_ms),
            "answered_p50_ms": quantile(e.answered_ms, 0.5),
            "answered_p99_ms": quantile(e.answered_ms, 0.99),
            "apply_p50_ms": quantile(e.apply_ms, 0.5),
            "apply_p99_ms": quantile(e.apply_ms, 0.99),
        }
        for e in found.engines
        if e.answered_ms
    ]
    return rows


def goals(found: Found, seed: int) -> list[Goal]:
    made = []
    for replicas in (1, 2):
        for nodes, what, goal in ((100, "applied_ms", GOAL_100_MS), (1000, "here_ms", GOAL_1000_MS)):
            puts = pooled([c for c in found.cells if (c.nodes, c.replicas) == (nodes, replicas)])
            name = f"put_to_{what.removesuffix('_ms')}_p99_ms_at_{nodes}_with_{replicas}"
            tail = p99(puts, what, seed) if puts and not any(p.missing for p in puts) else None
            judged = Goal.judged(name, goal, Bound.AT_MOST, tail)
            if len(puts) < ENOUGH_PUTS:
                judged = Goal(name, goal, Bound.AT_MOST, judged.value, None, judged.estimate)
            made.append(judged)
    memory = [c.memory_kb for c in found.cells if c.memory_kb is not None]
    worst = max(memory) if memory else None
    met = None if worst is None else worst <= GOAL_NODE_KB
    made.append(Goal("control_memory_kb_per_node", GOAL_NODE_KB, Bound.AT_MOST, worst, met))
    if found.storms:
        wrong = float(sum(s.nodes - s.held + s.backwards for s in found.storms))
        made.append(Goal("nodes_not_on_the_last_version_or_ever_back", 0, Bound.AT_MOST, wrong, wrong == 0))
    else:
        made.append(Goal("nodes_not_on_the_last_version_or_ever_back", 0, Bound.AT_MOST))
    return made


def sections(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each. From the objects that the JSON has too."""
    found = []
    cells = [r for r in rows if "here_p50_ms" in r]
    if cells:
        head = ("NODES", "REPLICAS", "PUTS", "WRITTEN P50", "HERE P50", "P99", "APPLIED P50", "P99 [95 %]", "LAST P50")
        lines = [
            (
                str(r["nodes"]), str(r["replicas"]), str(r["puts"]), f"{r['written_p50_ms']:.1f}", f"{r['here_p50_ms']:.1f}",
                f"{r['here_p99_ms']:.1f}", f"{r['applied_p50_ms']:.1f}",
                f"{r['applied_p99_ms']:.1f} [{', '.join(f'{x:.1f}' for x in r['applied_p99_interval_ms'])}]",
                f"{r['last_applied_p50_ms']:.1f}",
            )
            for r in cells
        ]  # fmt: skip
        title = "From a put's call, ms: written; bytes there and checked; applied; applied by the last"
        found.append((title, table(head, lines, right=tuple(range(8)))))
        costs_head = ("NODES", "REPLICAS", "CONTROL CPU MS/PUT", "NODES CPU MS/PUT", "IDLE CONTROL CORES", "KB/NODE")
        costs = [
            (
                str(r["nodes"]), str(r["replicas"]), f"{r['control_cpu_ms_per_put']:.1f}", f"{r['nodes_cpu_ms_per_put']:.1f}",
                _or_dash(r["idle_control_cores"], ".3f"), _or_dash(r["memory_kb_per_node"], ".0f"),
            )
            for r in cells
        ]  # fmt: skip
        found.append(("What it costs, all replicas together", table(costs_head, costs, right=tuple(range(5)))))
    for r in rows:
        if "took_s" in r:
            text = (
                f"{r['puts']} puts in {r['took_s']:.1f} s; {r['held']} of {r['nodes']} nodes on the last version "
                f"{r['settled_ms']:.0f} ms after it; steps back: {r['backwards']}; "
                f"{r['taken'] / r['nodes']:.0f} of the versions taken by a node, the others skipped"
            )
            found.append((r["arm"].capitalize(), text))
    engines = [r for r in rows if "answered_p50_ms" in r]
    if engines:
        engine_head = ("ENGINE", "PUTS", "ANSWERED P50", "P99", "OF THAT, IN THE WORKER P50", "P99")
        engine_rows = [
            (r["arm"], str(r["puts"]), *(f"{r[k]:.1f}" for k in ("answered_p50_ms", "answered_p99_ms", "apply_p50_ms", "apply_p99_ms")))
            for r in engines
        ]  # fmt: skip
        found.append(
            (
                "A real engine among 99 light nodes, ms; busy, the rest of the running step is in it",
                table(engine_head, engine_rows, right=(1, 2, 3, 4)),
            )
        )
    return found


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
