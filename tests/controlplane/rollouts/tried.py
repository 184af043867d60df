"""A rollout on a simulated mesh of chat, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from controlplane.rollouts.choose import Wanted
from controlplane.rollouts.rehearsal import RolloutRehearsal
from controlplane.rollouts.state import Rollout
from trimtab.messages import Workload
from trimtab.policy import Value
from trimtab.simulation import Fault, Fleet, GpuCosts, Mesh, Request
from trimtab.snapshot import Document
from trimtab.workload import Kind, Lengths, Phase, Source, arrivals

CHAT = Kind(Lengths(200, 400, 800), Lengths(30, 60, 120))
COSTS = GpuCosts(20.0, 5.0, 0.25, kv_us=6.0)
RATE = 4.0
"""Requests a second of each worker: a tenth of what it can do."""
BEGINS_S, OBJECTIVE_MS = 10.0, 500.0


@dataclass(frozen=True, slots=True)
class Tried:
    rollout: Rollout
    took_s: float
    realtime: list[Request]
    """Those that came from its beginning on, for a minute at least."""
    document: Document

    @property
    def over(self) -> float:
        """Share of them that missed the objective for the first token, or had none."""
        late = sum(r.ttft_ms is None or r.ttft_ms > OBJECTIVE_MS for r in self.realtime)
        return late / len(self.realtime)


def tried(
    fields: Mapping[str, str],
    *,
    workers: int = 3,
    rate: float = RATE,
    until_s: float = 320.0,
    seed: int = 1,
    policy: Mapping[str, Value] | None = None,
    faults: Iterable[Fault] = (),
    wanted: Wanted | None = None,
) -> Tried:
    """Until it is over, and a little longer."""
    document = Document(dict(policy or {}))
    rehearsal = RolloutRehearsal(fields, at_s=BEGINS_S, document=document, wanted=wanted)
    fleet = replace(Fleet({"default": workers}), document=document, costs=COSTS)
    source = Source("people", Workload.REALTIME, CHAT, (Phase(0.0, rate * workers),))
    mesh = Mesh(fleet, arrivals([source], until_s, seed), control=rehearsal, faults=faults, seed=seed)
    now = BEGINS_S
    while now < until_s and (rehearsal.rollout is None or rehearsal.rollout.live):
        now += 1.0
        mesh.run(now)
    end = max(now, BEGINS_S + 60.0)
    mesh.run(end + 10.0)
    assert rehearsal.rollout is not None and rehearsal.failures == []
    came = [r for r in mesh.outcome.requests if 1000.0 * BEGINS_S <= r.arrival_ms < 1000.0 * end]
    return Tried(rehearsal.rollout, now - BEGINS_S, came, mesh.document)
