"""Who makes room: for a protected request that waits (by choice), and when the KV cache has no free block (by need)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from trimtab.messages import Workload
from trimtab.policy import Mode, Preemption
from trimtab.scheduling.item import Item
from trimtab.scheduling.step import MIN_CHUNK, cold_tokens, express_tokens, window_over

if TYPE_CHECKING:
    from trimtab.scheduling.plan import Memory
    from trimtab.scheduling.planner import Planner

MOST_AT_ONCE = 4
"""Preempted before one step at most: each costs its tokens again, and most of what waits can wait for one step more."""


def slice_over(s: Planner, item: Item) -> bool:
    """It has executed its guaranteed time since it was last admitted, and produced a token since it was last preempted."""
    return not item.fresh and s.executed_ms(item) >= s.rules.slice_ms


@dataclass(slots=True)
class _Need:
    """What those lack who could start: room for `slots` of them, beginning with one when `least` have gone, and KV blocks for the first."""

    slots: int
    least: int
    blocks: int


def by_choice(s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> list[Item]:
    """The cheapest to recompute, as many as the waiting protected requests lack slots, places or blocks for; none where it would not help.

    Express ones first. Only when they lack nothing is a place below the cap made for one with a cold prompt, and then `made_place` says so.
    """
    r = s.rules
    if r.preemption is Preemption.NONE:
        return []
    slices_last = s.busy_ms < s.no_victim_before_ms and r.preemption is not Preemption.AGGRESSIVE
    if slices_last and s.no_victim_before_ms == float("inf"):
        return []
    starting = _express(s, now_ms, ready)
    express = list(islice(starting, 1))
    if express and slices_last and len(s.running) >= r.active:
        s.counters.slices_denied += 1
        return []
    express += starting
    need = _of_express(s, express, memory) if express else None
    cold = need is None and bool(s.waiting.cold_protected)
    if cold:
        need = _of_cold(s, express, now_ms, memory, ready)
    found = [] if need is None else _cheapest(s, need, memory, slices_last=slices_last)
    s.made_place = cold and bool(found)
    return found


def _of_express(s: Planner, express: Sequence[Item], memory: Memory) -> _Need | None:
    """Slots for all of them and blocks for the first."""
    kv, least = memory.kv, len(s.running) + 1 - s.rules.active
    slots = len(express) + least - 1
    # Express prompts that run take theirs first, and so does a decode that begins a block.
    blocks = (
        express[0].blocks(kv) + sum(i.still_takes(kv) for i in s.prefilling.values() if i.express) - memory.free_blocks
    )
    if blocks > -len(s.running) * kv.kinds:
        blocks += s.growing(kv)
    return _Need(slots, least, blocks) if slots > 0 or blocks > 0 else None


def _of_cold(
    s: Planner, express: Sequence[Item], now_ms: float, memory: Memory, ready: Callable[[Item], bool]
) -> _Need | None:
    """Slots or places for protected requests with cold prompts, where that is what they lack; memory they wait for."""
    r, kv, running = s.rules, memory.kv, len(s.running)
    # The express take their slots and blocks first.
    least = max(running + len(express) - r.active, running - s.express_running - r.hard_cap) + 1
    if least < 1 or memory.use > r.pressure_threshold:
        return None
    cold = list(_cold(s, express, now_ms, ready))
    if not cold:
        return None
    blocks = sum(i.blocks(kv) for i in (*express, cold[0])) + sum(i.still_takes(kv) for i in s.prefilling.values())
    return _Need(len(cold) + least - 1, least, blocks - memory.free_blocks + s.growing(kv))


def _cheapest(s: Planner, need: _Need, memory: Memory, *, slices_last: bool) -> list[Item]:
    """Of those whose time is over, as many as it needs; counted as denied where time slices are what keeps them."""
    r = s.rules
    if slices_last:
        s.counters.slices_denied += 1
        return []
    able: list[Item] = []
    denied, soonest = 0, float("inf")
    for item in s.running.values():
        if item.protected:
            continue
        if r.preemption is Preemption.AGGRESSIVE:
            # Who has just resumed stays even so, or he would be resumed and preempted for ever.
            if not item.fresh:
                able.append(item)
        elif item.preemptions < r.max_preemptions:
            if slice_over(s, item):
                able.append(item)
            else:
                denied += 1
                soonest = min(soonest, item.busy_at_admission + item.held_ms + r.slice_ms)
    able.sort(key=s.computed)
    found = _fewest([(i, memory.kv.held(s.computed(i))) for i in able], need)
    if not able:
        # Until the soonest of these; who is admitted later brings his own time. Infinite where nobody may be preempted any more.
        s.no_victim_before_ms = soonest
    if not found and denied:
        s.counters.slices_denied += 1
    return found


def _express(s: Planner, now_ms: float, ready: Callable[[Item], bool]) -> Iterator[Item]:
    """Express requests that the next step would begin if they had a slot and blocks."""
    places = s.rules.realtime_max_running - s.express_running
    if not s.waiting.express or places <= 0:
        return
    tokens = express_tokens(s, now_ms) - sum(i.left for i in s.prefilling.values() if i.express)
    for item in _could_start(s, s.waiting.express, places, ready):
        if tokens <= 0:
            return
        tokens -= item.left
        yield item


def _cold(s: Planner, express: Sequence[Item], now_ms: float, ready: Callable[[Item], bool]) -> Iterator[Item]:
    """Protected requests with cold prompts that the next step would begin beside all decodes and the `express`, if they had a place."""
    places = s.rules.concurrent - sum(i.protected and not i.hot for i in s.prefilling.values())
    if places > 0 and cold_tokens(s, express, now_ms) >= MIN_CHUNK:
        yield from (i for i in _could_start(s, s.waiting.cold_protected, places, ready) if window_over(s, i, now_ms))


def _could_start(s: Planner, line: Iterable[Item], places: int, ready: Callable[[Item], bool]) -> Iterator[Item]:
    """The first of a line of the protected whom neither exclusivity nor the engine keeps from starting."""
    found: list[Item] = []
    for item in line:
        if len(found) >= places:
            return
        if item.request_id in s.barred:
            continue
        if item.alone and any(i.alone for i in (*s.running.values(), *found)):
            continue
        giants = (i.serial and i.protected for i in (*s.prefilling.values(), *found))
        if item.serial and sum(giants) >= s.rules.serial_prefills:
            continue
        if ready(item):
            found.append(item)
            yield item


def _fewest(able: list[tuple[Item, int]], need: _Need) -> list[Item]:
    """Of those `able` (with the blocks that each holds, the cheapest first): a few that make room for one at least, and nobody too many."""
    for first in range(len(able)):
        some = able[first : first + MOST_AT_ONCE]
        if len(some) < need.least:
            break
        freed = sum(holds for _, holds in some)
        if freed < need.blocks:
            continue
        for row in reversed(tuple(some)):
            if len(some) > need.slots and freed - row[1] >= need.blocks:
                some.remove(row)
                freed -= row[1]
        return [item for item, _ in some]
    return []


def for_memory(s: Planner) -> Item | None:
    """BATCH before REALTIME, those whose slice is over before others, the cheapest to recompute first; of REALTIME the last arrived.

    vLLM's own ways know no slice: there it is who would come last.
    """
    if not s.running:
        return None
    if s.rules.mode is not Mode.TRIMTAB:
        return max(s.running.values(), key=lambda i: (i.order, i.arrival_ms))
    return min(
        s.running.values(),
        key=lambda i: (
            i.workload is Workload.REALTIME,
            not slice_over(s, i),
            s.computed(i) if i.workload is Workload.BATCH else -i.arrival_ms,
        ),
    )
