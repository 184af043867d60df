"""The worker's one queue: ordered by `scheduling.key`, bounded, and the only way to the engine.

The engine gets no more than its running set and a few steps' supply; everybody else waits here, where order can still change.
Invariant: a place is held from `enter` to `leave`, whatever happens between.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from trimtab import scheduling
from trimtab.errors import QueueFull
from trimtab.messages import Workload
from trimtab.policy import Policy


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place."""

    workload: Workload
    prompt_tokens: int
    arrival: int
    admitted: asyncio.Future[None] = field(repr=False)
    left: bool = False


class Gate:
    """Belongs to one event loop."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, int], int, Ticket]] = []
        self._waiting = dict.fromkeys(Workload, 0)
        self._handed = 0
        self._arrivals = 0
        self._waiting_tokens = 0

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting."""
        return self._waiting_tokens

    @property
    def handed(self) -> int:
        """Requests that the engine has been given and that have not left."""
        return self._handed

    def room(self, workload: Workload) -> int:
        """Requests of this workload that may still come: into the engine's supply, then into the queue."""
        free = max(0, scheduling.handover_bound(self._policy) - self._handed - self.waiting)
        return free + max(0, scheduling.queue_bound(self._policy, workload) - self._waiting[workload])

    def enter(self, workload: Workload, prompt_tokens: int) -> tuple[Ticket, int]:
        """A place, and how many are ahead of it. QueueFull when this workload's part of the queue is full."""
        self._arrivals += 1
        ticket = Ticket(workload, prompt_tokens, self._arrivals, asyncio.get_running_loop().create_future())
        if self._handed < scheduling.handover_bound(self._policy) and not self.waiting:
            self._handed += 1
            ticket.admitted.set_result(None)
            return ticket, 0
        bound = scheduling.queue_bound(self._policy, workload)
        if self._waiting[workload] >= bound:
            raise QueueFull(
                f"{bound} {workload.value} requests wait here already (admission.{workload.value}_queue)",
                metadata={"workload": workload.value, "bound": str(bound)},
            )
        place = scheduling.key(workload, ticket.arrival)
        ahead = sum(1 for k, _, t in self._heap if not t.left and k < place)
        heapq.heappush(self._heap, (place, ticket.arrival, ticket))
        self._waiting[workload] += 1
        self._waiting_tokens += prompt_tokens
        return ticket, ahead

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; safe to call twice."""
        if ticket.left:
            return
        ticket.left = True
        if ticket.admitted.done() and not ticket.admitted.cancelled():
            self._handed -= 1
        else:
            # Its entry stays in the heap until it comes up; it is passed over then.
            self._waiting[ticket.workload] -= 1
            self._waiting_tokens -= ticket.prompt_tokens
            ticket.admitted.cancel()
            self._sweep()
        self._hand_over()

    def _sweep(self) -> None:
        """Drop the entries of those who left, once they are the most: behind a steady stream of others they would never come up."""
        if len(self._heap) > 2 * self.waiting + 64:
            self._heap = [entry for entry in self._heap if not entry[2].left]
            heapq.heapify(self._heap)

    def set_policy(self, policy: Policy) -> None:
        """New bounds act at once; nobody who waits already is sent away."""
        self._policy = policy
        self._hand_over()

    def _hand_over(self) -> None:
        while self._heap and self._handed < scheduling.handover_bound(self._policy):
            ticket = heapq.heappop(self._heap)[2]
            if ticket.left:
                continue
            if ticket.admitted.cancelled():
                # The waiter was cancelled and its `leave` has not run yet; it counts as waiting until then.
                continue
            self._waiting[ticket.workload] -= 1
            self._waiting_tokens -= ticket.prompt_tokens
            self._handed += 1
            ticket.admitted.set_result(None)
