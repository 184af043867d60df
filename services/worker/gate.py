"""The worker's one queue: ordered by `scheduling.order_ms`, bounded, and the only way to the engine.

The engine gets no more than may run and a few steps' supply, of each workload; everybody else waits here, where order can still change.
Invariant: a place is held from `enter` to `leave`, whatever happens between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trimtab import scheduling
from trimtab.errors import QueueFull
from trimtab.messages import Workload
from trimtab.policy import Mode, Policy
from trimtab.scheduling.line import Line
from trimtab.snapshot import Limits


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place. `request_id` is unique within this worker."""

    request_id: str
    workload: Workload
    prompt_tokens: int
    arrival_ms: float
    admitted: asyncio.Future[None] = field(repr=False)
    delta: int = 0
    order: float = 0.0
    left: bool = False


class Gate:
    """Belongs to one event loop."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rules = scheduling.Rules.of(policy, Limits())
        self._lines: dict[Workload, Line[Ticket]] = {w: Line() for w in Workload}
        self._handed = dict.fromkeys(Workload, 0)
        self._coming = dict.fromkeys(Workload, 0)
        self._waiting_tokens = 0
        self.on_moved: Callable[[], None] = lambda: None
        """Called when there may be more room than before."""

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def waiting_of(self, workload: Workload) -> int:
        return len(self._lines[workload])

    def cold_waiting(self, hot_below: int) -> int:
        """BATCH requests among them whose prompts are not below so many tokens."""
        return sum(ticket.prompt_tokens >= hot_below for ticket in self._lines[Workload.BATCH])

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting."""
        return self._waiting_tokens

    @property
    def handed(self) -> int:
        """Requests that the engine has been given and that have not left."""
        return sum(self._handed.values())

    def supply(self, workload: Workload) -> int:
        """Requests of this workload that the engine may still be given, beyond those that wait here already or are on their way."""
        return max(0, self._engine_room(workload) - len(self._lines[workload]) - self._coming[workload])

    def room(self, workload: Workload) -> int:
        """Requests of this workload that may still come: into the engine's supply, then into the queue."""
        waiting = len(self._lines[workload])
        supply = max(0, self._engine_room(workload) - waiting)
        queue = max(0, scheduling.queue_bound(self._policy, workload) - waiting)
        return max(0, supply + queue - self._coming[workload])

    def expect(self, workload: Workload) -> None:
        """One is here that has no place yet: its prompt becomes tokens first, which takes a while where it is long."""
        self._coming[workload] += 1

    def expected(self, workload: Workload) -> None:
        """It has its place now, or will take none."""
        self._coming[workload] -= 1
        self.on_moved()

    def enter(self, request_id: str, workload: Workload, prompt_tokens: int, arrival_ms: float) -> tuple[Ticket, int]:
        """A place, and how many are ahead of it. QueueFull when this workload's part of the queue is full."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = Ticket(request_id, workload, prompt_tokens, arrival_ms, future)
        ticket.order = scheduling.order_ms(self._rules, workload, arrival_ms)
        line = self._lines[workload]
        if self._engine_room(workload) > 0 and not self._blocks(workload):
            self._handed[workload] += 1
            ticket.admitted.set_result(None)
            return ticket, 0
        bound = scheduling.queue_bound(self._policy, workload)
        if len(line) >= bound:
            raise QueueFull(
                f"{bound} {workload.value} requests wait here already (admission.{workload.value}_queue)",
                metadata={"workload": workload.value, "bound": str(bound)},
            )
        ahead = sum(each.ahead(ticket.order, arrival_ms) for each in self._lines.values())
        line.add(ticket)
        self._waiting_tokens += prompt_tokens
        return ticket, ahead

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; safe to call twice."""
        if ticket.left:
            return
        ticket.left = True
        if self._lines[ticket.workload].remove(ticket.request_id) is not None:
            self._waiting_tokens -= ticket.prompt_tokens
            ticket.admitted.cancel()
        else:
            self._handed[ticket.workload] -= 1
        self._hand_over()

    def set_policy(self, policy: Policy) -> None:
        """New bounds and order act at once; nobody who waits already is sent away."""
        self._policy = policy
        self._rules = scheduling.Rules.of(policy, Limits())
        self.reorder(lambda ticket: None)
        self._hand_over()

    def reorder(self, change: Callable[[Ticket], None]) -> None:
        """`change` each waiting ticket, such as its delta, and sort anew."""
        for line in self._lines.values():
            for ticket in line:
                change(ticket)
                ticket.order = scheduling.order_ms(self._rules, ticket.workload, ticket.arrival_ms, ticket.delta)
            line.resort()

    def _engine_room(self, workload: Workload) -> int:
        """How many more of this workload the engine may be given."""
        # In order of arrival there is one queue for all, or a workload with room would overtake the one without.
        handed = self.handed if self._rules.mode is Mode.FCFS else self._handed[workload]
        return scheduling.handover_bound(self._policy, workload) - handed

    def _blocks(self, workload: Workload) -> bool:
        """Whether somebody waits who has to be handed over before a newcomer of this workload."""
        return bool(self.waiting) if self._rules.mode is Mode.FCFS else bool(self._lines[workload])

    def _heads(self) -> Iterator[Ticket]:
        for workload, line in self._lines.items():
            head = line.first()
            if head is not None and self._engine_room(workload) > 0:
                yield head

    def _hand_over(self) -> None:
        while (ticket := min(self._heads(), key=lambda t: (t.order, t.arrival_ms), default=None)) is not None:
            self._lines[ticket.workload].remove(ticket.request_id)
            self._waiting_tokens -= ticket.prompt_tokens
            self._handed[ticket.workload] += 1
            if ticket.admitted.done():
                # The waiter was cancelled or released and its `leave` has not run yet; that gives the place back.
                continue
            ticket.admitted.set_result(None)
        self.on_moved()
