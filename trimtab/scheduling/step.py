"""What the next step holds: decodes, prefill chunks, and who joins.

The protected come first and within `itl_budget_ms`; what else rides along has to fit beside them, and is held back where it does not, for
`max_suspend_ms` at most. Without anybody protected a step may last `max_step_ms`. Limits are hard (slots, memory, one giant at a time) or
soft (shares, windows, alike lengths); a request that would otherwise be overtaken by more than `max_overtake_ms` passes the soft ones. Slots
kept for the protected are hard while anybody else runs. A step is never empty while somebody could run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from trimtab.policy import Mode
from trimtab.scheduling.item import Item
from trimtab.scheduling.steptime import Shape

if TYPE_CHECKING:
    from trimtab.scheduling.planner import Planner

MIN_CHUNK = 16
"""Tokens that a prompt gets at least when it must make progress, whatever the budget says."""
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's KV cache now."""

    free_blocks: int
    total_blocks: int
    block_size: int

    @property
    def use(self) -> float:
        return 1.0 - self.free_blocks / max(1, self.total_blocks)


@dataclass(slots=True)
class Plan:
    """`admit` in this order; `allowance` bounds the tokens of those named in it (0: not in this step), all others take what they want.

    `held` are running decodes that sit this step out; they have an allowance of 0.
    """

    admit: list[Item] = field(default_factory=list)
    allowance: dict[str, int] = field(default_factory=dict)
    held: list[Item] = field(default_factory=list)
    shape: Shape = field(default_factory=Shape)
    """What the step holds if vLLM finds nothing in its prefix cache."""
    rest_ran: bool = True
    """Unprotected work got its share, or there was none."""
    forced: int = 0
    """What `Counters.forced` grows by when the plan is carried out."""


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
    prefilling = any(not i.express for i in s.prefilling.values())
    if now_ms - s.rest_ran_ms < s.rules.max_suspend_ms or not (prefilling or s.rest_decodes):
        return 0, 0
    decode = int(bool(s.rest_decodes))
    return decode, min(MIN_CHUNK, (s.rules.step_tokens - decode + 1) // 2) if prefilling else 0


def express_tokens(s: Planner, now_ms: float) -> int:
    """Prompt tokens of the protected that fit into the next step."""
    shape = Shape(decodes=len(s.protected_decodes), kv_tokens=s.protected_kv_tokens)
    room = s.model.prefill_room(shape, express_limit_ms(s), 0)
    return min(s.rules.step_tokens - shape.decodes - sum(owed_tokens(s, now_ms)), max(MIN_CHUNK, room))


def assemble(s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> Plan:
    """The scheduler's own way."""
    return _Assembly(s, now_ms, memory, ready).plan()


class _Assembly:
    def __init__(self, s: Planner, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> None:
        self.s, self.r, self.now_ms, self.memory = s, s.rules, now_ms, memory
        self.result = Plan()
        self.shape = self.result.shape
        self.running = len(s.running)
        # Where nobody can be admitted it is enough to know whether one who waits is protected.
        full = self.running >= self.r.active or (
            self.running - s.express_running >= self.r.hard_cap and not s.waiting.express
        )
        self.waiting = (
            []
            if full
            else s.waiting.foremost(self.r.active - self.running, lambda i: i.request_id not in s.barred and ready(i))
        )
        express_waits = any(i.request_id not in s.barred and ready(i) for i in s.waiting.express)
        self.cold_waiting = len(s.waiting.cold)
        self.express = s.express_running
        self.others = self.running - self.express
        prefilling = s.prefilling.values()
        bs = memory.block_size
        # Blocks that prompts in prefill have been promised: nobody but the express may take those.
        self.promised = sum(i.still_takes(bs) for i in prefilling)
        # Free when those who run have taken what this step gives them. Decodes are looked at only where their blocks could matter.
        self.free, wanted = memory.free_blocks, float(self.promised)
        self.serial, self.alone = 0, False
        if self.waiting:
            wanted += sum(i.blocks(bs) for i in self.waiting) + self.r.reserve * memory.total_blocks
            self.serial = sum(i.serial for i in prefilling)
            # Looked for only where it matters: it visits everybody who runs.
            self.alone = any(i.alone for i in self.waiting) and any(i.alone for i in s.running.values())
        if wanted and self.free < wanted + self.running:
            self.free -= s.growing(bs)
        self.overdue: list[Item] = []
        self.rest_prefilling = sorted((i for i in prefilling if not i.express), key=lambda i: i.order)
        self.rest_tokens = 0
        express_prefill = len(self.rest_prefilling) < len(s.prefilling) or express_waits
        self.present = bool(s.protected_decodes) or express_prefill
        self.rest_limit = self.r.itl_budget_ms if self.present else self.r.max_step_ms
        # Tokens of this step that nobody else may take, until their turn comes.
        self.owed_decode, self.owed_prefill = owed_tokens(s, now_ms)
        self.ends_suspension = self.owed_decode + self.owed_prefill > 0
        if self.ends_suspension:
            self.rest_limit = max(self.rest_limit, self.r.max_step_ms)

    def plan(self) -> Plan:
        s, shape = self.s, self.shape
        prompts = bool(s.prefilling or self.waiting)
        self._protected_decodes()
        if prompts:
            self._express_prefill()
        self._rest_decodes()
        decodes_ran = shape.decodes > self.protected_ran or not s.rest_decodes
        if prompts:
            self._rest_prefill()
        if not shape.tokens:
            self._make_progress()
        self.result.admit = [i for i in self.result.admit if self.result.allowance[i.request_id]]
        self.result.rest_ran = decodes_ran and (self.rest_tokens > 0 or not self.rest_prefilling)
        self.result.forced += self.ends_suspension
        return self.result

    # Parts of the step.

    def _protected_decodes(self) -> None:
        """All of them, unless the step has fewer tokens."""
        s = self.s
        self.protected_ran = min(len(s.protected_decodes), self._tokens_left())
        self._decode(s.protected_decodes, self.protected_ran, s.protected_kv_tokens)

    def _rest_decodes(self) -> None:
        """As many as fit; who sat out goes first next time."""
        s, shape = self.s, self.shape
        self.owed_decode = 0
        count = len(s.rest_decodes)
        mean = s.rest_kv_tokens / max(1, count)
        room = s.model.decode_room(shape, self.rest_limit, mean) if s.model.known else count
        if self.ends_suspension or not shape.tokens:
            room = max(1, room)
        self._decode(s.rest_decodes, max(0, min(count, room, self._tokens_left())), s.rest_kv_tokens)

    def _decode(self, decodes: dict[str, Item], take: int, kv_tokens: int) -> None:
        """The first `take`, of so many tokens that all of them read; the others sit this step out."""
        self.shape.decodes += take
        self.shape.kv_tokens += round(kv_tokens * take / max(1, len(decodes)))
        if take == len(decodes):
            return
        held = list(islice(decodes.values(), take, None))
        self.result.held += held
        self.result.allowance.update((item.request_id, 0) for item in held)

    def _express_prefill(self) -> None:
        """Prompts of the protected, whole where the budget allows it; overdue others join before anyone overtakes them."""
        limit = express_limit_ms(self.s)
        # However little the budget leaves, they make progress; one after another, so that the step stays short.
        least = MIN_CHUNK
        for item in sorted((i for i in self.s.prefilling.values() if i.express), key=lambda i: i.order):
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
        latest = max(i.arrival_ms for i in self.waiting)
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
        if self.ends_suspension and self.rest_prefilling:
            self._chunk(self.rest_prefilling[0], MIN_CHUNK)
        # Tokens that were owed may be left now, and room that the express did not need.
        self._admit_overdue()
        running = sorted((*self.rest_prefilling, *(i for i in self.overdue if not i.express)), key=lambda i: i.order)
        for item in running:
            if item.hot:
                self._chunk(item, self._room(self.rest_limit, item))
        for item in list(self.waiting):
            if not self._place():
                break
            if item.hot and not item.express and self._soft(item) and (room := self._room(self.rest_limit, item)) > 0:
                self._admit(item, room)
        cold = [i for i in running if not i.hot]
        active, paused = cold[: self.r.concurrent], cold[self.r.concurrent :]
        for item in paused:
            self._chunk(item, 0)
        joining: list[Item] = []
        if self.waiting and self._place() and self._room(self.rest_limit, self.waiting[0]) > 0:
            joining = self._joining(self.r.concurrent - len(cold))
        # From the back, so that who comes first takes what the others leave; then what a short one leaves goes to the others.
        sharers = [*active, *joining]
        for position, item in reversed(list(enumerate(sharers))):
            self._chunk(item, self._room(self.rest_limit, item) // (position + 1))
        for item in sharers:
            self._chunk(item, self._room(self.rest_limit, item))

    def _joining(self, places: int) -> list[Item]:
        """Cold requests that are admitted now: alike in length to what runs where there is a choice, else in order."""
        found: list[Item] = []
        while len(found) < places:
            able = [i for i in self.waiting if not i.hot and self._soft(i)]
            if not able:
                break
            item = able[0]
            if self.now_ms - item.arrival_ms < self.r.max_overtake_ms / 2:
                item = next((i for i in able if self._alike(i)), item)
            self._count_in(item)
            found.append(item)
        return found

    def _make_progress(self) -> None:
        """Nothing would run: who is first gets a chunk, whatever the soft limits say."""
        prefilling = sorted(self.s.prefilling.values(), key=lambda i: i.order)
        if prefilling:
            item = prefilling[0]
            self._chunk(item, max(MIN_CHUNK, self._room(self.r.max_step_ms, item)))
            return
        for item in self.waiting:
            if self._capacity(item):
                self._admit(item, max(MIN_CHUNK, self._room(self.r.max_step_ms, item)))
                return

    # Limits.

    def _place(self) -> bool:
        """Whether somebody might find a slot who is not express; what else he needs is not looked at."""
        return self.running < self.r.active and self.others < self.r.hard_cap

    def _capacity(self, item: Item) -> bool:
        """Slots and exclusivity; memory only while others hold it."""
        if self.running >= self.r.active or self._excluded(item):
            return False
        return self.running == 0 or self._fits(item, 0.0)

    def _excluded(self, item: Item) -> bool:
        """Isolated ones run one at a time, giants prefill so many at a time; whoever sends them."""
        return (item.alone and self.alone) or (item.serial and self.serial >= self.r.serial_prefills)

    def _express(self, item: Item) -> bool:
        if self.running >= self.r.active or self.express >= self.r.realtime_max_running:
            return False
        return not self._excluded(item) and self._fits(item, 0.0)

    def _fits(self, item: Item, keep: float) -> bool:
        free = self.free if item.express else self.free - self.promised
        return free - item.blocks(self.memory.block_size) >= keep * self.memory.total_blocks

    def _hard(self, item: Item, reserved_slots: int) -> bool:
        if self.running >= self.r.active - reserved_slots or self.others >= self.r.hard_cap:
            return False
        if self._excluded(item):
            return False
        if not item.hot and self.memory.use > self.r.pressure_threshold:
            return False
        return self._fits(item, 0.0 if item.protected else self.r.reserve)

    def _soft(self, item: Item) -> bool:
        if not self._hard(item, 0 if item.protected else self.r.realtime_reserve):
            return False
        if item.hot or not self.running or self.now_ms - item.arrival_ms >= self.r.cold_window_ms:
            return True
        return self.cold_waiting >= self.r.concurrent

    def _alike(self, item: Item) -> bool:
        lengths = [i.prompt_tokens for i in (*self.s.running.values(), *self.result.admit) if not i.hot]
        if not lengths:
            return True
        longest = max(item.prompt_tokens, *lengths)
        return longest - min(item.prompt_tokens, *lengths) <= self.r.spread_limit * longest

    # Bookkeeping of the step.

    def _tokens_left(self) -> int:
        return max(0, self.r.step_tokens - self.shape.tokens - self.owed_decode - self.owed_prefill)

    def _room(self, limit_ms: float, item: Item) -> int:
        context = item.computed + self.result.allowance.get(item.request_id, 0)
        room = min(self._tokens_left(), self.s.model.prefill_room(self.shape, limit_ms, context))
        if item.request_id in self.s.prefilling and not item.express:
            bs = self.memory.block_size
            room = min(room, -context % bs + max(0, self.free) * bs)
        return room

    def _chunk(self, item: Item, tokens: int) -> int:
        """So many more tokens of its prompt than it has in this step already, or what is left of it or of the step; how many they are."""
        has = self.result.allowance.get(item.request_id, 0)
        tokens = max(0, min(tokens, item.left - has, self._tokens_left()))
        self.result.allowance[item.request_id] = has + tokens
        if tokens:
            self.shape.add_prefill(tokens, item.computed + has)
        if item.request_id in self.s.prefilling:
            bs, context = self.memory.block_size, item.computed + has
            takes = -(-(context + tokens) // bs) - -(-context // bs)
            self.free -= takes
            self.promised -= takes
        if not item.express:
            self.rest_tokens += tokens
        return tokens

    def _count_in(self, item: Item) -> None:
        self.waiting.remove(item)
        self.running += 1
        self.express += item.express
        self.others += not item.express
        self.serial += item.serial
        self.alone |= item.alone
        self.free -= item.blocks(self.memory.block_size)
        self.result.admit.append(item)

    def _admit(self, item: Item, tokens: int) -> int:
        self._count_in(item)
        return self._chunk(item, tokens)
