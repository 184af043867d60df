"""`trimtab simulate loops|tick`: the controllers on meshes in virtual time. Nothing is connected to, and one seed gives one course."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from trimtab.kit.cli import ExitCode, echo_json, json_option, table

if TYPE_CHECKING:
    from controlplane.bench_loops import Goal, Row
    from controlplane.bench_tick import Cost

SEEDS, QUICK_SEEDS = 3, 1
HEAD = (
    "SCENARIO",
    "ARM",
    "P99 ms",
    "OVER %",
    "BATCH tok/s",
    "AGAIN %",
    "REFUSED",
    "MOVES",
    "COMMANDS",
    "WANTS",
    "TURNS/min",
)
RIGHT = tuple(range(2, len(HEAD)))
GOALS = ("GOAL", "WANTED", "VALUE", "MET")
COSTS = ("MESH", "NODES", "TICKS", "MEDIAN ms", "P99 ms", "MAX ms", "WRITE P99 ms", "REPORT us", "ADJUSTMENTS")


@click.group()
def simulate() -> None:
    """Try the controllers on a simulated mesh, in virtual time: real schedulers and queues, made-up step costs."""


@simulate.command("loops")
@click.option("--quick", is_flag=True, help="Fewer scenarios, shorter, one seed.")
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="Only this one. May be repeated.")
@click.option("--seeds", type=click.IntRange(1, 100), default=None, metavar="N", help="Courses of each arm.")
@click.option("--check", is_flag=True, help="Exit 1 if a goal is missed.")
@json_option
def loops(quick: bool, only: tuple[str, ...], seeds: int | None, check: bool, as_json: bool) -> None:
    """What the controllers are worth: scheduler mode fcfs and trimtab, loops off and on, and the mesh without each controller that acted.

    P99 and what is OVER its objective are REALTIME's, AGAIN is the share of tokens computed twice, TURNS the most changes of direction of
    any one adjustment within a minute.
    """
    from controlplane import bench_loops, scenarios
    from controlplane.controllers.roster import CONTROLLERS

    chosen = [s for s in scenarios.all_of(quick=quick) if not only or s.name in only]
    if not chosen:
        names = ", ".join(s.name for s in scenarios.all_of(quick=quick))
        raise click.UsageError(f"no scenario is called {', '.join(only)}; there are {names}")
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    result = bench_loops.Result()
    with _Shown() as shown:
        for step in bench_loops.run(chosen, range(1, count + 1), CONTROLLERS):
            if isinstance(step, bench_loops.Result):
                result = step
            else:
                shown.at(*step)
    if as_json:
        arms = [{**_row_json(r)} for r in result.rows]
        echo_json({"simulate": "loops", "seeds": count, "arms": arms, "goals": [g.as_json() for g in result.goals]})
    else:
        for s in chosen:
            click.echo(f"{s.name}: {s.says}; {s.until_s:g} s of virtual time, {count} seeds")
        click.echo("\n" + table(HEAD, [_row(r) for r in result.rows], right=RIGHT))
        click.echo("\n" + table(GOALS, [_goal(g) for g in result.goals], right=(2,)))
    _end(result.goals, check)


@simulate.command("tick")
@click.option("--quick", is_flag=True, help="Only 1,000 nodes, and for less time.")
@click.option("--check", is_flag=True, help="Exit 1 if a goal is missed.")
@json_option
def tick(quick: bool, check: bool, as_json: bool) -> None:
    """What a tick of all controllers costs the leader, by the number of nodes, each reporting every 0.8 s."""
    import gc
    import time

    from controlplane import bench_tick
    from controlplane.controllers.roster import CONTROLLERS
    from trimtab.kit.process import spare_collections

    seconds = bench_tick.QUICK_SECONDS if quick else bench_tick.SECONDS
    sizes = (bench_tick.NODES,) if quick else bench_tick.SIZES
    costs = []
    # As the control plane does.
    spare_collections()
    with _Shown() as shown:
        for nodes, healthy in [*((n, True) for n in sizes), (bench_tick.NODES, False)]:
            # What the mesh before left behind is not this one's to clear away.
            gc.collect()
            what = f"{nodes} nodes, {'healthy' if healthy else 'in trouble'}"
            for step in bench_tick.measure(nodes, CONTROLLERS, time.process_time, healthy=healthy, seconds=seconds):
                if isinstance(step, bench_tick.Cost):
                    costs.append(step)
                else:
                    shown.at(what, step)
    goals = bench_tick.goals(costs)
    if as_json:
        echo_json({"simulate": "tick", "arms": [c.as_json() for c in costs], "goals": [g.as_json() for g in goals]})
    else:
        click.echo(table(COSTS, [_cost(c) for c in costs], right=tuple(range(1, len(COSTS)))))
        click.echo("\n" + table(GOALS, [_goal(g) for g in goals], right=(2,)))
    _end(goals, check)


class _Shown:
    """How far it is, on stderr: a line that changes on a terminal, elsewhere a line for each arm."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._what = ""

    def at(self, what: str, share: float) -> None:
        if self._live:
            click.echo(f"\r\033[K{what}  {100 * share:.0f} %", err=True, nl=False)
        elif what != self._what:
            click.echo(what, err=True)
        self._what = what

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            click.echo("\r\033[K", err=True, nl=False)


def _end(goals: list[Goal], check: bool) -> None:
    if check and any(g.met is False for g in goals):
        sys.exit(ExitCode.GOAL_FAILED)


def _row(r: Row) -> tuple[str, ...]:
    return (
        r.scenario, r.arm.name, f"{r.p99_ms:.0f}", f"{100 * r.violations:.2f}", f"{r.batch_tokens_s:.0f}", f"{100 * r.recomputed:.2f}",
        str(r.refused), str(r.adjustments), str(r.commands), str(r.wants), str(r.turns_a_minute),
    )  # fmt: skip


def _row_json(r: Row) -> dict[str, Any]:
    found = {name: getattr(r, name) for name in r.__slots__ if name != "arm"}
    return {**found, "arm": r.arm.name, "mode": r.arm.mode, "loops": r.arm.loops, "without": r.arm.without}


def _goal(g: Goal) -> tuple[str, ...]:
    value = "not measured" if g.value is None else f"{g.value:.3g}"
    return (g.name, f"{'≤' if g.at_most else '≥'} {g.goal:g}", value, {True: "yes", False: "NO", None: "-"}[g.met])


def _cost(c: Cost) -> tuple[str, ...]:
    times = (c.median_ms, c.p99_ms, c.max_ms, c.write_p99_ms)
    return (c.mesh, str(c.nodes), str(c.ticks), *(f"{t:.1f}" for t in times), f"{c.report_us:.0f}", str(c.adjustments))
