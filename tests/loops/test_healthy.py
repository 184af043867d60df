"""Who is well is left alone: an hour of virtual time, all controllers, nothing done and nobody told."""

from __future__ import annotations

import pytest

from tests.loops.builders import HOUR_S, NAMES, Run, a_fleet, documents, people, rehearse
from trimtab.simulation import Fate, GpuCosts
from trimtab.workload import Source, mixed

pytestmark = pytest.mark.slow

COSTS = GpuCosts(80.0, 5.0, 0.25, kv_us=6.0)
"""Long steps cost an hour less to simulate."""


@pytest.mark.parametrize("sources", [[], mixed(0.5)], ids=["idle", "mixed load"])
def test_an_hour_of_it_fires_nothing(sources: list[Source]) -> None:
    run = rehearse(NAMES, sources, HOUR_S, fleet=a_fleet(costs=COSTS))
    assert done(run) == []
    assert run.alerts == []
    assert all(r.fate in (Fate.SERVED, Fate.OPEN) for r in run.outcome.requests)


def test_a_mix_with_few_lengths_of_a_class_fires_nothing_either() -> None:
    run = rehearse(NAMES, [people((0, 2)), documents((0, 0.25))], 400)
    assert done(run) == []


def done(run: Run) -> list[str]:
    """In words."""
    return [f"{n.at_s:.0f} s: {n.controller}: {n.what} ({n.reason}; {n.evidence})" for n in run.notes()]
