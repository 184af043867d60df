"""What pools want and what is planned for them, kept as marks: the newest leader's word is what the next one hears, whatever their clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane import actuators
from controlplane.actuators import Actuators
from controlplane.controllers.decision import Want
from controlplane.plans import Plans
from controlplane.store import Mark
from controlplane.store.memory import MemoryStore
from tests.controlplane.test_plans import PLAN, T0, CountingStore
from trimtab.errors import StoreUnavailable

TWO, SIX = Want("p", 2, "by the first"), Want("p", 6, "by the second", surplus=("w1",))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [T0]
    monkeypatch.setattr(actuators, "unix_ms", lambda: now[0])
    return now


def some_actuators(store: MemoryStore) -> Actuators:
    unused: Any = None
    return Actuators(unused, unused, store, unused)


async def recalled(store: MemoryStore) -> dict[str, Want]:
    """As the next leader has it."""
    found = some_actuators(store)
    await found.recall()
    return found.wants


async def test_a_leader_whose_clock_is_behind_is_heard_all_the_same(clock: list[int]) -> None:
    store = MemoryStore()
    assert await some_actuators(store).want(TWO)
    clock[0] -= 5000
    second = some_actuators(store)
    await second.recall()
    assert second.wants == {"p": TWO}
    assert await second.want(SIX)
    assert await recalled(store) == {"p": SIX}


async def test_a_mark_that_is_refused_is_offered_again_above_what_is_there(clock: list[int]) -> None:
    store = MemoryStore()
    mine, other = some_actuators(store), some_actuators(store)
    await mine.recall()
    await other.want(TWO)
    assert await mine.want(SIX)
    assert await recalled(store) == {"p": TWO}, "who came between may lead: that is found out before the next tick"
    assert not await mine.want(SIX)
    assert await recalled(store) == {"p": SIX}
    marks = await store.marks()
    assert not await mine.want(SIX)
    assert await store.marks() == marks, "once it is there it is not written again"


async def test_what_the_store_does_not_tell_any_more_is_forgotten(clock: list[int]) -> None:
    store = MemoryStore()
    mine = some_actuators(store)
    await mine.want(TWO)
    await store.unmark((await store.marks())[0])
    await mine.recall()
    assert mine.wants == {}
    assert await mine.want(SIX)
    assert await recalled(store) == {"p": SIX}


async def test_a_want_is_forgotten_in_the_store_whoever_stored_it(clock: list[int]) -> None:
    store = CountingStore()
    await store.mark(Mark("plan/p", 1, b"{}"))
    await some_actuators(store).want(TWO)
    mine = some_actuators(store)
    await mine.want(replace(SIX, pool="q"))
    store.away = True
    await mine.forget()
    assert mine.wants.keys() == {"q"}, "as long as the store has it, it holds"
    store.away = False
    await mine.forget()
    assert (mine.wants, [m.key for m in await store.marks()]) == ({}, ["plan/p"])


# ---- plans


async def test_a_plan_of_a_leader_whose_clock_is_behind_is_kept_and_forgotten() -> None:
    store = MemoryStore()
    await Plans(store).keep([PLAN], 1200.0, T0)
    second, third = Plans(store), Plans(store)
    second.recall(await store.marks())
    await second.keep([replace(PLAN, planned=96)], 1200.0, T0 - 5000)
    third.recall(await store.marks())
    assert third.seen(0.0, T0)["default"].planned == 96
    await second.keep([replace(PLAN, planned=96, evidence="waste 13 %")], 1201.0, T0 - 4000 + 60_000)
    third.recall(await store.marks())
    assert third.seen(0.0, T0)["default"].evidence == "waste 13 %"
    await second.forget()
    assert await store.marks() == []


async def test_a_plan_that_another_came_between_is_offered_again() -> None:
    store = MemoryStore()
    mine = Plans(store)
    await Plans(store).keep([PLAN], 1200.0, T0)
    other = replace(PLAN, planned=96)
    await mine.keep([other], 1200.0, T0 - 5000)
    await mine.keep([other], 1201.0, T0 - 4000)
    third = Plans(store)
    third.recall(await store.marks())
    assert third.seen(0.0, T0)["default"].planned == 96


async def test_figures_are_refreshed_where_they_were_written_by_a_clock_that_is_hours_ahead() -> None:
    store = MemoryStore()
    await Plans(store).keep([PLAN], 1200.0, T0 + 7_200_000)
    mine = Plans(store)
    mine.recall(await store.marks())
    # Its plan was changed as long ago, by the clock that is right.
    newer = replace(PLAN, evidence="waste 13 %", changed_at=1200.0 + 7000.0)
    await mine.keep([newer], 1200.0, T0)
    third = Plans(store)
    third.recall(await store.marks())
    assert third.seen(0.0, T0)["default"].evidence == "waste 13 %"


async def test_a_store_that_goes_away_as_a_refused_mark_is_looked_up_loses_nothing(clock: list[int]) -> None:
    class Going(MemoryStore):
        away = False

        async def marks(self) -> list[Mark]:
            if self.away:
                raise StoreUnavailable("the store is away")
            return await super().marks()

    store = Going()
    mine = some_actuators(store)
    await some_actuators(store).want(TWO)
    store.away = True
    assert await mine.want(SIX)
    store.away = False
    assert not await mine.want(SIX)
    assert not await mine.want(SIX)
    assert await recalled(store) == {"p": SIX}
