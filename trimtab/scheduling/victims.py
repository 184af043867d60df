"""Who makes room: for a protected request that waits (by choice), and when the KV cache has no free block (by need)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trimtab.messages import Workload
from trimtab.policy import Mode, Preemption
from trimtab.scheduling.item import Item
from trimtab.scheduling.step import express_tokens

if TYPE_CHECKING:
    from trimtab.scheduling.plan import Memory
    from trimtab.scheduling.planner import Planner

MOST_AT_ONCE = 4
"""Preempted before one step at most: each costs its tokens again, and most of what waits can wait for one step more."""


def slice_over(s: Planner, item: Item) -> bool:
    """It has executed its guaranteed time since it was last admitted, and produced a token since it was last preempted."""
    return not item.fresh and s.executed_ms(item) >= s.rules.slice_ms


def by_choice(s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> list[Item]:
    """The cheapest to recompute, as many as the waiting express requests lack slots or blocks for; none where it would not help."""
    r = s.rules
    if r.preemption is Preemption.NONE:
        return []
    slices_last = s.busy_ms < s.no_victim_before_ms and r.preemption is not Preemption.AGGRESSIVE
    if slices_last and s.no_victim_before_ms == float("inf"):
        return []
    could_start = _could_start(s, now_ms, ready)
    first = next(could_start, None)
    if first is None:
        return []
    if slices_last and len(s.running) >= r.active:
        s.counters.slices_denied += 1
        return []
    bs = memory.block_size
    slots = 1 + sum(1 for _ in could_start) - (r.active - len(s.running))
    # Express prompts that run take theirs first, and so does a decode that begins a block.
    blocks = first.blocks(bs) + sum(i.still_takes(bs) for i in s.prefilling.values() if i.express) - memory.free_blocks
    if blocks > -len(s.running):
        blocks += s.growing(bs)
    if slots <= 0 and blocks <= 0:
        return []
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
    found = _fewest([(i, -(-s.computed(i) // bs)) for i in able], len(s.running) + 1 - r.active, slots, blocks)
    if not able:
        # Until the soonest of these; who is admitted later brings his own time. Infinite where nobody may be preempted any more.
        s.no_victim_before_ms = soonest
    if not found and denied:
        s.counters.slices_denied += 1
    return found


def _could_start(s: Planner, now_ms: float, ready: Callable[[Item], bool]) -> Iterator[Item]:
    """Express requests that the next step would begin if they had a slot and blocks."""
    places = s.rules.realtime_max_running - s.express_running
    if not s.waiting.express or places <= 0:
        return
    tokens = express_tokens(s, now_ms) - sum(i.left for i in s.prefilling.values() if i.express)
    found: list[Item] = []
    for item in s.waiting.express:
        if len(found) >= places or tokens <= 0:
            return
        if item.request_id in s.barred:
            continue
        if item.alone and any(i.alone for i in (*s.running.values(), *found)):
            continue
        if item.serial and sum(i.serial for i in (*s.prefilling.values(), *found)) >= s.rules.serial_prefills:
            continue
        if ready(item):
            found.append(item)
            tokens -= item.left
            yield item


def _fewest(able: list[tuple[Item, int]], least: int, slots: int, blocks: int) -> list[Item]:
    """Of those `able` (with the blocks that each holds, the cheapest first): a few that make room for one at least, and nobody too many."""
    for first in range(len(able)):
        some = able[first : first + MOST_AT_ONCE]
        if len(some) < least:
            break
        freed = sum(holds for _, holds in some)
        if freed < blocks:
            continue
        for row in reversed(tuple(some)):
            if len(some) > slots and freed - row[1] >= blocks:
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
