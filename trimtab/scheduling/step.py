"""What the next step holds: decodes, prefill chunks, and who joins.

The protected come first and within `itl_budget_ms`; what else rides along has to fit beside them, and is held back where it does not, for
`max_suspend_ms` at most. Without anybody protected a step may last `max_step_ms`. Limits are hard (slots, memory, one giant at a time) or
soft (shares, windows, alike lengths); a request that would otherwise be overtaken by more than `max_overtake_ms` passes the soft ones. Slots
kept for the protected are hard while anybody else runs. A step is never empty while somebody could run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from trimtab.policy import Mode
from trimtab.scheduling.item import Item
from trimtab.scheduling.plan import Memory, Plan
from trimtab.scheduling.steptime import Shape

if TYPE_CHECKING:
    from trimtab.scheduling.decodes import Decodes
    from trimtab.scheduling.planner import Planner

MIN_CHUNK = 16
"""Tokens that a prompt gets at least when it must make progress, whatever the budget says."""
_ORDER, _ARRIVAL, _WAITS_SINCE, _GOAL, _ALONE = map(
    attrgetter, ("order", "arrival_ms", "waits_since_ms", "goal", "alone")
)


def _protected_first(item: Item) -> tuple[bool, float]:
    return not item.protected, item.order


def baseline(s: Planner, ready: Callable[[Item], bool]) -> Plan:
    """vLLM's own ways, `fcfs` and `priority`: everybody in order, nobody bounded but by the engine."""
    assert s.rules.mode is not Mode.TRIMTAB
    places = max(0, s.rules.active - len(s.running))
    able = (i for i in s.waiting if i.request_id not in s.barred and ready(i))
    return Plan(admit=list(islice(able, places)))


def express_limit_ms(s: Planner) -> float:
    """How long prompts of the protected may make a step."""
    return s.rules.itl_budget_ms if s.protected_decodes else s.rules.max_step_ms


def owed_tokens(s: Planner, now_ms: float) -> tuple[int, int]:
    """Tokens of the next step that end a suspension: for a decode, and for a prompt. Both are 0 where none is to end."""
    if now_ms - s.rest_ran_ms < s.rules.max_suspend_ms:
        return 0, 0
    prefilling = any(not i.protected for i in s.prefilling.values())
    decode = int(bool(s.rest_decodes))
    return decode, min(MIN_CHUNK, (s.rules.step_tokens - decode + 1) // 2) if prefilling else 0


def express_tokens(s: Planner, now_ms: float) -> int:
    """Prompt tokens of the protected that fit into the next step."""
    shape = Shape(decodes=len(s.protected_decodes), kv_tokens=s.protected_decodes.kv_tokens)
    room = s.model.prefill_room(shape, express_limit_ms(s), 0)
    return min(s.rules.step_tokens - shape.decodes - sum(owed_tokens(s, now_ms)), max(MIN_CHUNK, room))


def cold_tokens(s: Planner, express: Sequence[Item], now_ms: float) -> int:
    """Prompt tokens of the rest that fit into the next step, beside all decodes and the `express` that begin in it."""
    shape = Shape(decodes=len(s.running) - len(s.prefilling), kv_tokens=s.kv_tokens)
    present = bool(express or s.protected_decodes)
    for item in (*(i for i in s.prefilling.values() if i.express), *express):
        shape.add_prefill(item.left, item.computed)
        present = True
    room = s.model.prefill_room(shape, s.rules.itl_budget_ms if present else s.rules.max_step_ms, 0)
    return min(s.rules.step_tokens - shape.tokens - sum(owed_tokens(s, now_ms)), room)


def window_over(s: Planner, item: Item, now_ms: float) -> bool:
    """Whether a request with a cold prompt need not wait for others like it any more."""
    return now_ms - item.arrival_ms >= s.rules.cold_window_ms or s.waiting.cold_count >= s.rules.concurrent


def assemble(s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> Plan:
    """The scheduler's own way."""
    return _Assembly(s, now_ms, memory, ready).plan()


class _Assembly:
    # What a step without prompts, the most frequent one, leaves as it is.
    express_prefilling: Sequence[Item] = ()
    rest_prefilling: Sequence[Item] = ()
    express_waits = alone = False
    rest_tokens = serial = serial_protected = 0

    def __init__(self, s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> None:
        self.s, self.r, self.now_ms, self.memory = s, s.rules, now_ms, memory
        self.result = Plan()
        self.shape = self.result.shape
        self.running = len(s.running)
        self.express = s.express_running
        self.others = self.running - self.express
        self.waiting: list[Item] = []
        self._look_at_waiting(ready)
        if s.prefilling or self.waiting:
            self._look_at_prompts()
        present = self.express_waits or self.express_prefilling or s.protected_decodes
        self.rest_limit = self.r.itl_budget_ms if present else self.r.max_step_ms
        # Tokens of this step that nobody else may take, until their turn comes.
        self.owed_decode, self.owed_prefill = owed_tokens(s, now_ms)
        self.ends_suspension = self.owed_decode + self.owed_prefill > 0
        if self.ends_suspension:
            self.rest_limit = max(self.rest_limit, self.r.max_step_ms)

    def _look_at_waiting(self, ready: Callable[[Item], bool]) -> None:
        s = self.s
        full = self.running >= self.r.active or self.others >= self.r.hard_cap
        if full and not s.waiting.express:
            return
        able = (lambda i: i.request_id not in s.barred and ready(i)) if s.barred else ready
        if self.running >= self.r.active:
            # Nobody can be admitted: it is enough to know whether one who waits is protected.
            self.express_waits = any(map(able, s.waiting.express))
        else:
            self.waiting = s.waiting.foremost(self.r.active - self.running, able)
            self.express_waits = any(i.express for i in self.waiting)

    def _look_at_prompts(self) -> None:
        s, kv = self.s, self.memory.kv
        prefilling = sorted(s.prefilling.values(), key=_ORDER)
        self.express_prefilling = [i for i in prefilling if i.express]
        self.rest_prefilling = [i for i in prefilling if not i.express]
        self.overdue: list[Item] = []
        # Blocks that prompts in prefill have been promised: nobody but the express may take those.
        self.promised = sum(i.still_takes(kv) for i in prefilling)
        # Free when those who run have taken what this step gives them. Decodes are looked at only where their blocks could matter.
        self.free, wanted = self.memory.free_blocks, float(self.promised)
        if self.waiting:
            # At least what all of them need.
            wanted += kv.together(sum(map(_GOAL, self.waiting)), len(self.waiting))
            wanted += self.r.reserve * self.memory.total_blocks
            self.serial = sum(i.serial for i in prefilling)
            self.serial_protected = sum(i.serial and i.protected for i in prefilling)
            # Looked for only where it matters: it visits everybody who runs.
            self.alone = any(map(_ALONE, self.waiting)) and any(map(_ALONE, s.running.values()))
        if wanted and self.free < wanted + self.running * kv.kinds:
            self.free -= s.growing(kv)

    def plan(self) -> Plan:
        s, shape, waits = self.s, self.shape, bool(self.waiting)
        protected_ran = self._protected_decodes() if s.protected_decodes else 0
        if self.express_prefilling or waits:
            self._express_prefill()
        self.owed_decode = 0
        if s.rest_decodes:
            self._rest_decodes()
        decodes_ran = shape.decodes > protected_ran or not s.rest_decodes
        if self.rest_prefilling or waits:
            self._rest_prefill()
        if not shape.tokens:
            self._make_progress()
        self.result.admit = [i for i in self.result.admit if self.result.allowance[i.request_id]]
        self.result.rest_ran = decodes_ran and (self.rest_tokens > 0 or all(i.protected for i in self.rest_prefilling))
        self.result.forced += self.ends_suspension
        return self.result

    # Parts of the step.

    def _protected_decodes(self) -> int:
        """All of them, unless the step has fewer tokens; how many they are."""
        take = min(len(self.s.protected_decodes), self._tokens_left())
        self._decode(self.s.protected_decodes, take)
        self.result.held_protected = len(self.result.held)
        return take

    def _rest_decodes(self) -> None:
        """As many as fit; who sat out goes first next time."""
        s, shape = self.s, self.shape
        count = len(s.rest_decodes)
        mean = s.rest_decodes.kv_tokens / count
        room = s.model.decode_room(shape, self.rest_limit, mean) if s.model.known else count
        if self.ends_suspension or not shape.tokens:
            room = max(1, room)
        self._decode(s.rest_decodes, max(0, min(count, room, self._tokens_left())))

    def _decode(self, decodes: Decodes, take: int) -> None:
        """The first `take`; the others sit this step out."""
        self.shape.decodes += take
        self.shape.kv_tokens += round(decodes.kv_tokens * take / len(decodes))
        if take == len(decodes):
            return
        held = decodes.after(take)
        self.result.held += held
        self.result.allowance.update(dict.fromkeys(held, 0))

    def _express_prefill(self) -> None:
        """Prompts of the protected, whole where the budget allows it; overdue others join before anyone overtakes them."""
        limit = express_limit_ms(self.s)
        # However little the budget leaves, they make progress; one after another, so that the step stays short.
        least = MIN_CHUNK
        for item in self.express_prefilling:
            least -= self._chunk(item, max(least, self._room(limit, item)))
        # Room that somebody had to make is theirs for whom he made it.
        if not self.s.made_room:
            self._admit_overdue()
        for item in [i for i in self.overdue if i.express]:
            least -= self._chunk(item, max(least, self._room(limit, item)))
        for item in [i for i in self.waiting if i.express]:
            if self.running >= self.r.active or self.express >= self.r.realtime_max_running or self._tokens_left() < 1:
                break
            tokens = max(least, self._room(limit, item))
            if tokens > 0 and self._express(item):
                least -= self._admit(item, tokens)

    def _admit_overdue(self) -> None:
        """Who would be overtaken by too much is scheduled now, be it by a small chunk; who was preempted waits no longer than that either."""
        if not self.waiting:
            return
        # Nobody else can be scheduled before them in this step.
        latest = max(map(_ARRIVAL, self.waiting))
        if max(self.now_ms, latest) - min(map(_WAITS_SINCE, self.waiting)) <= self.r.max_overtake_ms:
            return
        overdue = [
            i
            for i in self.waiting
            if (self.now_ms if i.started else latest) - i.waits_since_ms > self.r.max_overtake_ms
        ]
        for item in sorted(overdue, key=lambda i: i.arrival_ms):
            # An old backlog must not take the slots that are kept for the protected, nor be without any slot for ever.
            reserved = 0 if item.protected or not self.others else self.r.realtime_reserve
            if self._tokens_left() > 0 and (self._express(item) if item.express else self._hard(item, reserved)):
                self._admit(item, MIN_CHUNK)
                self.overdue.append(item)
                self.result.forced += 1

    def _rest_prefill(self) -> None:
        """Hot before cold; cold prompts share what is left, `concurrent` of them at a time."""
        self.owed_prefill = 0
        owed = [i for i in self.rest_prefilling if not i.protected]
        if self.ends_suspension and owed:
            self._chunk(owed[0], MIN_CHUNK)
        # Tokens that were owed may be left now, and room that the express did not need. A place that somebody had to make is not theirs.
        if not self.s.made_place:
            self._admit_overdue()
        # REALTIME before BATCH here too: it joins whatever BATCH has in prefill, and BATCH gets what it leaves.
        cold = [i for i in (*self.rest_prefilling, *self.overdue) if i.protected and not i.hot]
        joined = self._joining(self.r.concurrent - len(cold), protected=True)
        for item in joined:
            self._chunk(item, min(MIN_CHUNK, self._room(self.rest_limit, item)))
        if self.s.made_place:
            self._admit_overdue()
        running = sorted((*self.rest_prefilling, *joined, *(i for i in self.overdue if not i.express)), key=_ORDER)
        for item in running:
            if item.hot:
                self._chunk(item, self._room(self.rest_limit, item))
        for item in list(self.waiting):
            if not self._place(self.r.realtime_reserve):
                break
            if item.hot and not item.express and self._soft(item) and (room := self._room(self.rest_limit, item)) > 0:
                self._admit(item, room)
        cold = [i for i in running if not i.hot]
        cold += self._joining(self.r.concurrent - len(cold), protected=False)
        cold.sort(key=_protected_first)
        # Giants one by one: those of the protected first, the others pause meanwhile.
        giants = [i for i in cold if i.serial][self.r.serial_prefills :]
        active = [i for i in cold if i not in giants][: self.r.concurrent]
        paused = [i for i in cold if i not in active]
        for item in paused:
            self._chunk(item, 0)
        for sharers in ([i for i in active if i.protected], [i for i in active if not i.protected]):
            # From the back, so that who comes first takes what the others leave; then what a short one leaves goes to the others.
            for position, item in reversed(list(enumerate(sharers))):
                self._chunk(item, self._room(self.rest_limit, item) // (position + 1))
            for item in sharers:
                self._chunk(item, self._room(self.rest_limit, item))

    def _joining(self, places: int, *, protected: bool) -> list[Item]:
        """Cold requests, of the protected or of the others, that are admitted now: alike in length to those in prefill where there is a
        choice, else in order."""
        found: list[Item] = []
        reserved = 0 if protected else self.r.realtime_reserve
        while self.waiting and len(found) < places and self._place(reserved):
            able = [i for i in self.waiting if not i.hot and i.protected is protected and self._soft(i)]
            if not able or not self._room(self.rest_limit, able[0]):
                break
            item = able[0]
            if self.now_ms - item.arrival_ms < self.r.max_overtake_ms / 2:
                item = next((i for i in able if self._alike(i)), item)
            self._count_in(item)
            found.append(item)
        return found

    def _make_progress(self) -> None:
        """Nothing would run: who is first gets a chunk, whatever the soft limits say."""
        prefilling = sorted(self.s.prefilling.values(), key=_ORDER)
        if prefilling:
            item = prefilling[0]
            self._chunk(item, max(MIN_CHUNK, self._room(self.r.max_step_ms, item)))
            return
        for item in self.waiting:
            if self._capacity(item):
                self._admit(item, max(MIN_CHUNK, self._room(self.r.max_step_ms, item)))
                return

    # Limits.

    def _place(self, reserved_slots: int) -> bool:
        """Whether somebody who is not express might find a slot; what else he needs is not looked at."""
        return self.running < self.r.active - reserved_slots and self.others < self.r.hard_cap

    def _capacity(self, item: Item) -> bool:
        """Slots and exclusivity; memory only while others hold it."""
        if self.running >= self.r.active or self._excluded(item):
            return False
        return self.running == 0 or self._fits(item, 0.0)

    def _excluded(self, item: Item) -> bool:
        """Isolated ones run one at a time, whoever sends them; giants prefill so many at a time, and one of BATCH stops none of REALTIME."""
        serial = self.serial_protected if item.protected else self.serial
        return (item.alone and self.alone) or (item.serial and serial >= self.r.serial_prefills)

    def _express(self, item: Item) -> bool:
        if self.running >= self.r.active or self.express >= self.r.realtime_max_running:
            return False
        return not self._excluded(item) and self._fits(item, 0.0)

    def _fits(self, item: Item, keep: float) -> bool:
        free = self.free if item.express else self.free - self.promised
        return free - item.blocks(self.memory.kv) >= keep * self.memory.total_blocks

    def _hard(self, item: Item, reserved_slots: int) -> bool:
        if not self._place(reserved_slots) or self._excluded(item):
            return False
        if not item.hot and self.memory.use > self.r.pressure_threshold:
            return False
        return self._fits(item, 0.0 if item.protected else self.r.reserve)

    def _soft(self, item: Item) -> bool:
        if not self._hard(item, 0 if item.protected else self.r.realtime_reserve):
            return False
        return item.hot or not self.running or window_over(self.s, item, self.now_ms)

    def _alike(self, item: Item) -> bool:
        """Of one length class with all the cold prompts that it shares with, and within the spread limit of each; a limit of 1 is off."""
        prefill = (*self.s.prefilling.values(), *self.result.admit)
        cold = [i for i in prefill if not i.hot and i.protected is item.protected]
        if not cold or self.r.spread_limit >= 1.0:
            return True
        if any(i.length is not item.length for i in cold):
            return False
        lengths = [item.prompt_tokens, *(i.prompt_tokens for i in cold)]
        return max(lengths) - min(lengths) <= self.r.spread_limit * max(lengths)

    # Bookkeeping of the step.

    def _tokens_left(self) -> int:
        return max(0, self.r.step_tokens - self.shape.tokens - self.owed_decode - self.owed_prefill)

    def _room(self, limit_ms: float, item: Item) -> int:
        tokens = self._tokens_left()
        if not tokens:
            return 0
        context = item.computed + self.result.allowance.get(item.request_id, 0)
        room = min(tokens, self.s.model.prefill_room(self.shape, limit_ms, context))
        if item.request_id in self.s.prefilling and not item.express:
            room = self.memory.kv.room(context, room, self.free)
        return room

    def _chunk(self, item: Item, tokens: int) -> int:
        """So many more tokens of its prompt than it has in this step already, or what is left of it or of the step; how many they are."""
        has = self.result.allowance.get(item.request_id, 0)
        tokens = max(0, min(tokens, item.left - has, self._tokens_left()))
        self.result.allowance[item.request_id] = has + tokens
        if not tokens:
            return 0
        self.shape.add_prefill(tokens, item.computed + has)
        if item.request_id in self.s.prefilling:
            takes = self.memory.kv.taken(item.computed + has, tokens)
            self.free -= takes
            self.promised -= takes
        if not item.protected:
            self.rest_tokens += tokens
        return tokens

    def _count_in(self, item: Item) -> None:
        self.waiting.remove(item)
        self.running += 1
        self.express += item.express
        self.others += not item.express
        self.serial += item.serial
        self.serial_protected += item.serial and item.protected
        self.alone |= item.alone
        self.free -= item.blocks(self.memory.kv)
        self.result.admit.append(item)

    def _admit(self, item: Item, tokens: int) -> int:
        self._count_in(item)
        return self._chunk(item, tokens)
