"""The drill of rolling restarts, small: real workers on simulated engines, a real control plane, and the verb that people type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.drill import restart
from services.drill.loop_figures import Trial, goals, notes
from services.drill.loops import Demand, stand

pytestmark = pytest.mark.slow

SMALL = replace(restart.QUICK, demand=Demand(8, 10), bake_s=0.5, load_s=0.5)


def missed(trials: list[Trial]) -> list[str]:
    """Goals that are not met, and what there is to say of them."""
    bad = [g.name for g in goals(trials) if not g.met]
    return [*bad, *(f"{t.name}: {t.did}" for t in trials), *notes(trials)] if bad else []


async def test_workers_are_started_anew_with_other_settings_and_no_client_notices_more_than_a_pause(
    tmp_path: Path,
) -> None:
    trials: list[Trial] = []
    async with stand(tmp_path, restart.simulated()) as s:
        await s.undisturbed(SMALL.demand, 1)
        await restart.rolled_anew(s, SMALL, trials)
    assert missed(trials) == []
    assert trials[0].did == "done: 3 of 3 workers were started anew"


async def test_settings_that_are_no_good_cost_one_worker_a_restart_at_most(tmp_path: Path) -> None:
    trials: list[Trial] = []
    async with stand(tmp_path, restart.simulated()) as s:
        await s.undisturbed(SMALL.demand, 1)
        await restart.refused(s, SMALL, trials)
        await restart.broken(s, SMALL, trials)
    assert missed(trials) == []
    assert [t.did.partition(":")[0] for t in trials] == ["stopped", "stopped"]
