"""Clients that leave, against a real mesh of simulated engines; few of them here, thousands in the drill itself."""

from __future__ import annotations

from collections import Counter

import pytest

from services.drill import leavers
from services.drill.leavers import PHASES, Lot, goals
from services.drill.mesh import Shape, mesh

FLAGS = ["--engine", "simulated", "--step-ms", "10", "--max-num-seqs", "16", "--max-step-tokens", "256"]


def lots(remaining: float = 0.0, last_mb: float = 50.0) -> list[Lot]:
    found = [Lot(10, 0.1, {"w0 running": 0.0}, {"w0": 50.0}) for _ in range(leavers.LOTS)]
    found[-1] = Lot(10, 0.1, {"w0 running": remaining}, {"w0": last_mb})
    return found


def test_what_is_left_or_has_grown_is_a_goal_missed():
    assert [g.met for g in goals(lots())] == [True, True]
    assert [g.met for g in goals(lots(remaining=1.0))] == [False, True]
    assert [g.met for g in goals(lots(last_mb=80.0))] == [True, False]
    assert [g.met for g in goals(lots()[:3])] == [None, None]


@pytest.mark.slow
async def test_after_clients_that_left_in_every_phase_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    seen: Counter[str] = Counter()
    async with mesh(tmp_path, Shape(1, 1, FLAGS, policy={"batch.active": "16"})) as running:
        await leavers._lot(running, "test", 60, seen)
        lot = await leavers._rest(running, 60)
    assert sum(lot.remaining.values()) == 0
    # How far the others get before they leave depends on the machine; everybody came, and some left in each way that needs nobody's answer.
    assert sum(seen.values()) == 60
    assert seen["at once"] == seen["reads nothing"] == 60 // len(PHASES)
