"""Random faults, and what must hold whatever they are. `TRIMTAB_CHAOS=SEED[,SEED…]` and `TRIMTAB_CHAOS_STEPS=N` ask for more of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane.store import Lease
from tests.controlplane.chaos import a_world, run
from tests.controlplane.witness import Asked, History, Outcome, Seen, Written

SEEDS = [int(x) for x in os.environ.get("TRIMTAB_CHAOS", "1").split(",")]
STEPS = int(os.environ.get("TRIMTAB_CHAOS_STEPS", "8"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * STEPS)
@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_committed_is_lost_and_nothing_goes_back(tmp_path: Path, seed: int) -> None:
    async with a_world(tmp_path, seed) as world:
        await world.puts()
        await run(world, STEPS)
        final = await world.quiet()
        faults = world.history.faults(final, world.planes.nodes)
        outcomes = [a.outcome.value for a in world.history.asked]
        story = f"{world.history.log}, {len(world.history.written)} controllers' writes, {world.history.fenced} fenced, {outcomes}"
        assert not faults, f"{faults}; seed {seed}: {story}"
        assert Outcome.COMMITTED in {a.outcome for a in world.history.asked}, story


def asked(value: int, began: float, ended: float, outcome: Outcome = Outcome.COMMITTED) -> Asked:
    return Asked(value, began, ended, outcome)


def test_the_checker_finds_a_lost_write() -> None:
    history = History([asked(1, 0, 1), asked(2, 2, 3)])
    assert history.faults(2, []) == []
    assert "2 was acknowledged as committed and is lost" in history.faults(1, [])[0]
    assert len(history.faults(None, [])) == 2
    assert "nobody asked" in history.faults(9, [])[0]


def test_the_checker_lets_overlapping_and_unknown_writes_win() -> None:
    assert History([asked(1, 0, 5), asked(2, 2, 3)]).faults(1, []) == []
    assert History([asked(1, 0, 1, Outcome.UNKNOWN), asked(2, 2, 3)]).faults(1, []) == []
    assert History([asked(1, 0, 1, Outcome.ACCEPTED)]).faults(None, []) == []
    assert History([asked(1, 0, 1, Outcome.REFUSED)]).faults(1, [])


def test_the_checker_finds_a_write_of_an_old_term() -> None:
    a, b = Lease("a", 1), Lease("b", 2)
    history = History(written=[Written(a, 1.0), Written(a, 3.0)], grants=[Seen(a, 0.4, 0.5), Seen(b, 1.9, 2.0)])
    assert history.faults(None, []) == ["a write of term 1 landed after term 2 was granted"]


def test_the_checker_finds_a_write_under_a_term_that_has_another_holder_by_then() -> None:
    a, b = Lease("a", 1), Lease("b", 1)
    grants = [Seen(a, 0.4, 0.5), Seen(b, 1.9, 2.0)]
    assert History(grants=grants).faults(None, []) == []
    assert History(written=[Written(a, 1.0), Written(b, 3.0)], grants=grants).faults(None, []) == []
    assert History(written=[Written(a, 3.0)], grants=grants).faults(None, []) == [
        "a write of a landed after term 1 was b's"
    ]
    # Of two that were asked for at one time nobody knows which came first.
    assert History(written=[Written(a, 3.0)], grants=[Seen(a, 0.4, 2.0), Seen(b, 1.9, 2.0)]).faults(None, []) == []
