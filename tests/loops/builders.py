"""Small meshes for closed-loop tests: engines with few steps a second, so that an hour of virtual time costs seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from controlplane.controllers.decision import Controller
from controlplane.controllers.roster import CONTROLLERS
from controlplane.rehearsal import Noted, Rehearsal, most_a_minute, turns
from trimtab.messages import Workload
from trimtab.policy import Value
from trimtab.simulation import Fault, Fleet, GpuCosts, Mesh, Outcome
from trimtab.snapshot import Document
from trimtab.workload import Kind, Lengths, Phase, Source, arrivals

NAMES = tuple(c.name for c in CONTROLLERS)
OFF = ("clusters", "safe_batch")
COSTS = GpuCosts(40.0, 20.0, 0.0)
SHORT = Kind(Lengths(200, 600, 2000), Lengths(10, 20, 40))
"""Requests of half a second."""
LONG = Kind(Lengths(6000, 9000, 12_000), Lengths(20, 40, 80))
HOUR_S = 3600.0


def controllers(*names: str) -> list[Controller]:
    """Those of these names, in the roster's order."""
    return [c for c in CONTROLLERS if c.name in names]


def a_fleet(
    workers: int = 1,
    *,
    costs: GpuCosts = COSTS,
    blocks: int = 65_536,
    start_s: float = 10.0,
    kv_bytes_per_token: int = 131_072,
) -> Fleet:
    limits = replace(Fleet().limits, total_blocks=blocks)
    return Fleet(
        {"default": workers}, limits=limits, costs=costs, start_s=start_s, kv_bytes_per_token=kv_bytes_per_token
    )


def people(*phases: tuple[float, float], kind: Kind = SHORT, cv: float = 1.0) -> Source:
    """REALTIME; (from when, how many a second)."""
    return Source("people", Workload.REALTIME, kind, tuple(Phase(*p) for p in phases), cv)


def documents(*phases: tuple[float, float], kind: Kind = LONG, cv: float = 1.0) -> Source:
    """BATCH."""
    return Source("documents", Workload.BATCH, kind, tuple(Phase(*p) for p in phases), cv)


@dataclass(slots=True)
class Run:
    mesh: Mesh
    outcome: Outcome
    rehearsal: Rehearsal

    def notes(self, *kinds: str) -> list[Noted]:
        return [n for n in self.rehearsal.notes if not kinds or n.kind in kinds]

    def held(self, field: str) -> list[tuple[float, float]]:
        """How far that field was moved when, wherever: (seconds, distance from what people set)."""
        return sorted(p for (_, f, _), line in self.rehearsal.factors.items() if f == field for p in line)

    def turns_a_minute(self) -> int:
        """The most changes of direction of any one adjustment within a minute."""
        return max((most_a_minute(turns(line)) for line in self.rehearsal.factors.values()), default=0)

    @property
    def alerts(self) -> list[str]:
        return [f"{a.severity}: {a.text}" for _, a in self.rehearsal.alerts]


def rehearse(
    names: Iterable[str],
    sources: Iterable[Source],
    until_s: float,
    *,
    fleet: Fleet | None = None,
    faults: Iterable[Fault] = (),
    policy: Mapping[str, Value] | None = None,
    seed: int = 1,
) -> Run:
    """Those controllers on a mesh, until then."""
    found = controllers(*names)
    # Those that only advise by default are to act here; the two that are off stay off unless a test says so.
    acting = {f"loops.{name}": "on" for name in names if name not in OFF}
    document = Document({**acting, **(policy or {})})
    rehearsal = Rehearsal(found, document)
    fleet = replace(fleet or a_fleet(), document=document)
    mesh = Mesh(fleet, arrivals(list(sources), until_s, seed), control=rehearsal, faults=faults, seed=seed)
    outcome = mesh.run(until_s)
    assert rehearsal.failures == []
    return Run(mesh, outcome, rehearsal)
