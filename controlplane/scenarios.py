"""What the loops are tried on, in virtual time: meshes, mixes of requests and faults. Values only.

Loads are multiples of `CAPACITY`: what one worker of the simulator's default costs gets done in a second with the default policy when there
is twice as much to do, in requests of the mix, 30 % of them REALTIME. A test holds it to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trimtab.messages import Workload
from trimtab.policy import Partial
from trimtab.simulation import Die, Fault, Fleet, Grow, Hang, Leak, Slow
from trimtab.workload import CHAT, DOCUMENTS, GIANTS, SUMMARIES, Phase, Source, mixed

CAPACITY = 7.7
"""Requests a second of one worker."""
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """`step_s` are the beginning and the end of what is asked too much, where there is such a time."""

    name: str
    says: str
    sources: tuple[Source, ...]
    until_s: float
    fleet: Fleet = field(default_factory=Fleet)
    faults: tuple[Fault, ...] = ()
    policy: Partial = field(default_factory=dict)
    step_s: tuple[float, float] | None = None


def load(times: float | Sequence[tuple[float, float]], workers: int = WORKERS) -> float | tuple[Phase, ...]:
    """So many times what the workers can do; or (from when, how many times)."""
    if isinstance(times, int | float):
        return times * CAPACITY * workers
    return tuple(Phase(at, t * CAPACITY * workers) for at, t in times)


def step(
    before_s: float = 60.0, over_s: float = 90.0, after_s: float = 120.0, times: float = 1.5, name: str = "step"
) -> Scenario:
    """Half of what the mesh can do, then too much, then half again."""
    ends = before_s + over_s
    phases = load(((0.0, 0.5), (before_s, times), (ends, 0.5)))
    return Scenario(
        name, f"load 0.5 → {times:g} → 0.5 × capacity", tuple(mixed(phases)), ends + after_s, step_s=(before_s, ends)
    )


def healthy(until_s: float = 240.0) -> Scenario:
    return Scenario("healthy", "load 0.6 × capacity, Poisson", tuple(mixed(load(0.6))), until_s)


def idle(until_s: float = 600.0) -> Scenario:
    return Scenario("idle", "nobody comes", (), until_s)


def bursts(until_s: float = 240.0) -> Scenario:
    return Scenario("bursts", "load 0.8 × capacity, gaps that vary by 4", tuple(mixed(load(0.8), cv=4.0)), until_s)


def memory(until_s: float = 240.0) -> Scenario:
    """KV for a tenth of the tokens: those who run are preempted for want of blocks, and their tokens computed again."""
    fleet = Fleet(limits=replace(Fleet().limits, total_blocks=10_240))
    answers = replace(SUMMARIES, output=replace(SUMMARIES.output, p50=1200, p90=3200))
    return Scenario(
        "memory",
        "KV cache of 160K tokens, long answers, load 0.9 × capacity",
        tuple(mixed(load(0.45), batch=(answers, DOCUMENTS))),
        until_s,
        fleet,
    )


def giants(until_s: float = 240.0) -> Scenario:
    """Prompts of up to 126K tokens join a mix of short ones for two minutes."""
    chat = mixed(load(0.5), batch=(SUMMARIES,))
    long = Source("giants", Workload.BATCH, GIANTS, (Phase(0.0, 0.0), Phase(60.0, 0.5), Phase(180.0, 0.0)))
    return Scenario(
        "giants", "prompts of 70K to 126K tokens from 60 s to 180 s", (*chat, long), until_s, step_s=(60.0, 180.0)
    )


def flood(until_s: float = 240.0, max_workers: int = 4) -> Scenario:
    """More REALTIME than two workers have places for (211 tokens each at some 15 ms are 120 at once); the pool may grow."""
    phases = (Phase(0.0, 4.0), Phase(60.0, 40.0), Phase(180.0, 4.0))
    sources = (
        Source("realtime", Workload.REALTIME, CHAT, phases),
        Source("batch", Workload.BATCH, SUMMARIES, (Phase(0.0, 4.0),)),
    )
    return Scenario(
        "flood", f"REALTIME 4 → 40 → 4 a second; up to {max_workers} workers", sources, until_s,
        policy={"scale.max_workers": max_workers, "scale.min_workers": WORKERS}, step_s=(60.0, 180.0),
    )  # fmt: skip


def slow(until_s: float = 240.0) -> Scenario:
    """One of two workers takes six times as long for each step, for two minutes."""
    return Scenario(
        "slow", "one of two workers six times slower from 60 s to 180 s", tuple(mixed(load(0.45))), until_s,
        faults=(Slow(60.0, "default-1", 6.0, 120.0),), step_s=(60.0, 180.0),
    )  # fmt: skip


def faults(until_s: float = 420.0) -> Scenario:
    """One after another: a worker hangs, another leaks blocks, one runs out of memory; REALTIME and short BATCH by halves of the load."""
    return Scenario(
        "faults", "a worker hangs, one leaks blocks and idles, one runs out of memory", tuple(mixed(load(0.4))), until_s,
        faults=(Hang(40.0, "default-1"), Leak(120.0, "default-2", 20_000), Die(240.0, "default-1", out_of_memory=True),
                Grow(60.0, "default-2", 200.0)),
    )  # fmt: skip


def all_of(*, quick: bool = False) -> tuple[Scenario, ...]:
    """Those of the bench."""
    if quick:
        return (step(40.0, 60.0, 70.0), memory(120.0), giants(200.0), flood(200.0))
    return (
        healthy(),
        bursts(),
        step(),
        step(times=2.5, name="overload"),
        memory(),
        giants(),
        flood(),
        slow(),
        faults(),
    )
