"""The scheduler's state from step to step: who waits, who runs, what was promised. It decides by `victims` and `step`; it has no clock.

The engine's side of each call, in order: `add` and `remove` as requests come and go; before a step `victims` (the engine preempts them
and says `preempted`), then `plan`; when the step is under way `began`; when it is over `ended`. Work per step grows with what changes
in it, not with what runs: decodes are counted, not visited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from trimtab.kv_shape import KvShape
from trimtab.messages import Workload
from trimtab.policy import Mode
from trimtab.scheduling import step, victims
from trimtab.scheduling.counters import Counters
from trimtab.scheduling.decodes import Decodes
from trimtab.scheduling.item import Item
from trimtab.scheduling.lengths import LengthClass
from trimtab.scheduling.plan import Memory, Plan
from trimtab.scheduling.resident import Wastes
from trimtab.scheduling.rules import Rules
from trimtab.scheduling.steptime import Shape, StepTimeModel
from trimtab.scheduling.waiting import Waiting

_LONGEST_FIRST = tuple(reversed(LengthClass))


@dataclass(slots=True)
class _Step:
    shape: Shape
    predicted_ms: float
    idle: list[Item]
    longest: LengthClass | None = None
    """Of those who ran, where all of them decode and a prediction is one."""


class Planner:
    """One engine's. Belongs to one thread."""

    def __init__(self, rules: Rules, model: StepTimeModel | None = None) -> None:
        self.rules = rules
        self.model = model or StepTimeModel()
        self.counters = Counters()
        self.waiting = Waiting()
        self.running: dict[str, Item] = {}
        self.prefilling: dict[str, Item] = {}
        self.rest_decodes = Decodes()
        self.protected_decodes = Decodes()
        self.express_running = 0
        self.running_of = dict.fromkeys(Workload, 0)
        self.running_lengths = dict.fromkeys(LengthClass, 0)
        self.queued_prefill_tokens = 0
        self.busy_ms = 0.0
        """Time spent in steps: the clock of time slices."""
        self.rest_ran_ms = 0.0
        """When unprotected work last got its share."""
        self.barred: set[str] = set()
        """Preempted since the last step: never preempted and resumed in one."""
        self.made_room = False
        """Somebody was preempted by choice since the last step."""
        self.made_place = False
        """And that for a protected request with a cold prompt."""
        self.no_victim_before_ms = 0.0
        """On the busy clock: until then everybody's time slice is known to last."""
        self._now_ms = 0.0
        self._wastes = Wastes()
        self._in_flight: deque[_Step] = deque()

    # Requests come and go.

    def add(self, item: Item) -> None:
        item.classify(self.rules)
        self.waiting.add(item)
        self.queued_prefill_tokens += item.left

    def remove(self, request_id: str) -> Item | None:
        """Finished or aborted, wherever it is; safe to repeat."""
        item = self.waiting.remove(request_id)
        if item is not None:
            self.queued_prefill_tokens -= item.left
            self.barred.discard(request_id)
            return item
        item = self.running.get(request_id)
        if item is not None:
            self._leave_running(item)
        return item

    def aborted(self, request_id: str) -> None:
        """`remove`, of one whose work is lost."""
        item = self.find(request_id)
        if item is not None:
            self.counters.aborted_tokens += max(item.high_water, self.computed(item))
            self.remove(request_id)

    def find(self, request_id: str) -> Item | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def set_rules(self, rules: Rules) -> None:
        """Holds from the next step on. Lowering a cap evicts nobody."""
        self.rules = rules
        self.no_victim_before_ms = 0.0
        self.waiting_changed(list(self.waiting))
        for item in list(self.running.values()):
            was_protected = item.protected
            self.express_running -= item.express
            self.running_lengths[item.length] -= 1
            item.classify(rules)
            self.express_running += item.express
            self.running_lengths[item.length] += 1
            # Who stays where he is keeps his turn among the decodes.
            if item.protected != was_protected and item.request_id not in self.prefilling:
                computed = self.computed(item)
                self._stop_decoding(item)
                self._start_decoding(item, computed)

    def waiting_changed(self, items: Iterable[Item]) -> None:
        """Their delta or isolation is another one now."""
        for item in items:
            item.classify(self.rules)
        self.waiting.resort()

    def steer(self, request_ids: Iterable[str], *, delta: int | None = None, isolated: bool | None = None) -> int:
        """Change requests that wait or run; how many of them are here."""
        found = [item for request_id in request_ids if (item := self.find(request_id)) is not None]
        for item in found:
            item.delta = item.delta if delta is None else delta
            item.isolated = item.isolated if isolated is None else isolated
        self.waiting_changed(found)
        return len(found)

    # Before a step.

    def victims(self, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> list[Item]:
        """Who has to make room now. The engine preempts each and says so by `preempted` before it asks for the plan."""
        self._now_ms = now_ms
        self.made_room = self.made_place = False
        if self.rules.mode is not Mode.TRIMTAB or not (self.waiting.express or self.waiting.cold_protected):
            return []
        found = victims.by_choice(self, now_ms, memory, ready)
        self.counters.preemptions += len(found)
        self.made_room = bool(found)
        for item in found:
            item.preemptions += 1
        return found

    def memory_victim(self) -> Item | None:
        """Who goes when a running request finds no free block."""
        found = victims.for_memory(self)
        if found is not None:
            self.counters.memory_preemptions += 1
            self.counters.slices_broken += self.rules.mode is Mode.TRIMTAB and not victims.slice_over(self, found)
        return found

    def preempted(self, request_id: str, *, goal: int) -> None:
        """It waits again and has `goal` tokens to compute anew."""
        item = self.running[request_id]
        reached = self.computed(item)
        item.high_water = max(item.high_water, reached)
        self._leave_running(item)
        item.goal, item.computed, item.held_ms, item.waits_since_ms = goal, 0, 0.0, self._now_ms
        item.fresh = True
        self.barred.add(request_id)
        self.waiting.add(item)
        self.queued_prefill_tokens += item.left

    def plan(self, now_ms: float, memory: Memory, ready: Callable[[Item], bool]) -> Plan:
        """What the next step holds. Nothing changes until it began, so that a plan may be dropped for another one."""
        self._now_ms = now_ms
        if self.rules.mode is not Mode.TRIMTAB:
            return step.baseline(self, ready)
        return step.assemble(self, now_ms, memory, ready)

    # The step itself.

    def began(
        self, plan: Plan, now_ms: float, ran: Mapping[str, int], total_tokens: int, computed: Callable[[Item], int]
    ) -> Shape:
        """What the engine made of the plan: `ran` gives each scheduled request its tokens, `computed` what it has with this step."""
        shape = Shape(kv_tokens=self.kv_tokens)
        for item in plan.admit:
            if item.request_id in ran:
                self._admit(item, now_ms)
        idle = self._step_decodes(plan, ran, shape) if total_tokens else []
        self.counters.forced += plan.forced
        for item in list(self.prefilling.values()):
            tokens = ran.get(item.request_id, 0)
            if tokens:
                self._prefilled(item, tokens, computed(item), shape)
            else:
                idle.append(item)
        shape.decodes = total_tokens - shape.prefill_tokens
        self.counters.computed_tokens += total_tokens
        if plan.rest_ran or not (self.rest_decodes or self.prefilling):
            self.rest_ran_ms = now_ms
        self.barred.clear()
        self.made_room = self.made_place = False
        if total_tokens:
            longest = self._longest() if not shape.prefill_tokens and self.model.known else None
            self._in_flight.append(_Step(shape, self.model.predict(shape), idle, longest))
        return shape

    def _step_decodes(self, plan: Plan, ran: Mapping[str, int], shape: Shape) -> list[Item]:
        """Each computes a token but those that are no part of the step: held back, or there was no token or block left for them."""
        kinds = (self.protected_decodes, self.rest_decodes)
        for kind in kinds:
            kind.step()
        missing = len(self.running) - len(self.prefilling) - len(ran) + sum([i in ran for i in self.prefilling])
        if not missing and not plan.held:
            return []
        held = (plan.held[: plan.held_protected], plan.held[plan.held_protected :])
        # Nobody has to be looked for where those who are missing are those whom the plan left out.
        as_planned = missing == len(plan.held) and ran.keys().isdisjoint(plan.held)
        if as_planned and all(map(Decodes.end_with, kinds, held)):
            self.counters.held_decodes += missing
        else:
            # vLLM may have preempted some meanwhile.
            self.counters.held_decodes += sum(i in self.running for i in plan.held)
            held = ([i for i in kinds[0] if i not in ran], [i for i in kinds[1] if i not in ran])
        idle: list[Item] = []
        for kind, ids in zip(kinds, held, strict=True):
            items, kv_tokens = kind.sit_out(ids, go_first=bool(plan.held))
            shape.kv_tokens -= kv_tokens
            idle += items
        return idle

    def ended(self, ms: float) -> None:
        """The oldest step under way took `ms`; steps without a token are not told."""
        step_ = self._in_flight.popleft()
        self.model.observe(step_.shape, ms)
        if step_.longest is not None and step_.predicted_ms > 0.0:
            self.counters.steadiness.add(step_.longest, ms, step_.predicted_ms)
        self.busy_ms += ms
        for item in step_.idle:
            item.held_ms += ms

    # Views.

    def computed(self, item: Item) -> int:
        """Tokens of a running request whose KV is there."""
        for kind in (self.rest_decodes, self.protected_decodes):
            if item.request_id in kind:
                return kind.computed(item)
        return item.computed

    @property
    def kv_tokens(self) -> int:
        """Tokens that all decodes together read in a step."""
        return self.protected_decodes.kv_tokens + self.rest_decodes.kv_tokens

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV the running hold."""
        return self.kv_tokens + sum(i.computed for i in self.prefilling.values())

    def growing(self, kv: KvShape) -> int:
        """KV blocks that decodes take for their next tokens."""
        return self.protected_decodes.growing(kv) + self.rest_decodes.growing(kv)

    @property
    def predicted_ms(self) -> float:
        """Of the step that began last."""
        return self._in_flight[-1].predicted_ms if self._in_flight else 0.0

    def executed_ms(self, item: Item) -> float:
        """Time in which it was part of steps since its last admission."""
        return self.busy_ms - item.busy_at_admission - item.held_ms

    def stats(self) -> tuple[float, ...]:
        """What a report says of the scheduler, named by STATS; counters since the engine's start, times in milliseconds."""
        c, w = self.counters, self.model.weights
        realtime, batch = c.waits[Workload.REALTIME], c.waits[Workload.BATCH]
        lengths = [
            (waits.count, waits.sum_ms, waits.max_ms, self.waiting.by_length[length])
            for length, waits in c.waits_by_length.items()
        ]
        return (
            c.preemptions, c.memory_preemptions, c.slices_broken, c.slices_denied, c.recomputed_tokens, c.aborted_tokens,
            c.computed_tokens, c.held_decodes, c.forced, c.max_overtake_ms, realtime.count, realtime.sum_ms, realtime.max_ms,
            batch.count, batch.sum_ms, batch.max_ms, *chain.from_iterable(lengths), self.model.error_ms, *w,
            *self.running_of.values(), *self.waiting.by_workload.values(), self.waiting.cold_batch, self.stored_tokens,
            max((i.prompt_tokens for i in self.prefilling.values()), default=0), self.busy_ms, c.steadiness.deviation,
            *self._wastes.of(self._resident, len(self.running), self.busy_ms),
        )  # fmt: skip

    def _resident(self) -> list[int]:
        """Tokens of each that runs whose KV is there."""
        return [self.computed(item) for item in self.running.values()]

    # Moves.

    def _longest(self) -> LengthClass | None:
        """Of all that run; those who sit a step out count too, which are few and soon part of one again."""
        running = self.running_lengths
        for length in _LONGEST_FIRST:
            if running[length]:
                return length
        return None

    def _admit(self, item: Item, now_ms: float) -> None:
        self.waiting.remove(item.request_id)
        item.busy_at_admission, item.held_ms = self.busy_ms, 0.0
        self.no_victim_before_ms = min(self.no_victim_before_ms, self.busy_ms + self.rules.slice_ms)
        # It is no part of steps that are under way already.
        for step_ in self._in_flight:
            if item not in step_.idle:
                step_.idle.append(item)
        self.running[item.request_id] = item
        self.prefilling[item.request_id] = item
        self.express_running += item.express
        self.running_of[item.workload] += 1
        self.running_lengths[item.length] += 1
        if item.started:
            return
        item.started = True
        self.counters.started(item.workload, item.length, now_ms - item.arrival_ms)
        oldest_ms = self.waiting.oldest_unstarted_ms()
        if oldest_ms is not None:
            self.counters.max_overtake_ms = max(self.counters.max_overtake_ms, item.arrival_ms - oldest_ms)

    def _prefilled(self, item: Item, tokens: int, computed: int, shape: Shape) -> None:
        """So many are `computed` with this step, `tokens` of them in it; between may lie a hit in the prefix cache.

        More than its goal where a token was on its way when it was preempted.
        """
        reached = min(item.goal, computed)
        shape.add_prefill(tokens, max(0, reached - tokens))
        self.counters.recomputed_tokens += max(0, min(reached, item.high_water) - max(0, reached - tokens))
        item.high_water = max(item.high_water, reached)
        self.queued_prefill_tokens -= reached - item.computed
        item.computed = reached
        if not item.left:
            del self.prefilling[item.request_id]
            item.fresh = False
            self._start_decoding(item, computed)

    def _start_decoding(self, item: Item, computed: int) -> None:
        (self.protected_decodes if item.protected else self.rest_decodes).add(item, computed)

    def _stop_decoding(self, item: Item) -> None:
        self.rest_decodes.remove(item.request_id)
        self.protected_decodes.remove(item.request_id)

    def _leave_running(self, item: Item) -> None:
        del self.running[item.request_id]
        self.express_running -= item.express
        self.running_of[item.workload] -= 1
        self.running_lengths[item.length] -= 1
        if self.prefilling.pop(item.request_id, None) is not None:
            self.queued_prefill_tokens -= item.left
        else:
            self._stop_decoding(item)
