"""Who is in this gateway: bounds at the door, and the end of those who are stuck or outlive a drain.

A request has its place from `enter` to `leave`. The bound is on requests that no worker has accepted yet: REALTIME is handed to a worker at
once, so more than a few of them means that the workers don't answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from trimtab import scheduling
from trimtab.errors import Draining, InvalidRequest, QueueFull, TrimtabError, Violation
from trimtab.messages import Workload
from trimtab.policy import Policy

STALL_S = 30.0
"""A reader that takes nothing for so long is cancelled, wherever it is stuck; its worker has long been held back by the window."""
SWEEP_S = 0.5


class Admitted(Protocol):
    """What admission needs of a call. `handed_over_at` is when its reader got what it is busy with; None while it waits for more."""

    request_id: str
    workload: Workload
    handed_over_at: float | None

    def end(self, error: TrimtabError) -> None: ...

    def give_up(self, after_s: float) -> None: ...


class Admission:
    """Belongs to one event loop."""

    def __init__(self, policy: Callable[[], Policy], *, stall_s: float = STALL_S) -> None:
        self._policy = policy
        self.stall_s = stall_s
        self.draining = False
        self.live: dict[str, Admitted] = {}
        self.unaccepted = dict.fromkeys(Workload, 0)
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, call: Admitted) -> None:
        """A place for it, or the reason why there is none."""
        if self.draining:
            raise Draining("this gateway is shutting down; another one, or this one in a moment, will take the request")
        if call.request_id in self.live:
            text = f"is that of a request which still runs here: {call.request_id}"
            raise InvalidRequest(f"request_id {text}", violations=(Violation("request_id", text),))
        # Those that workers may take up at once, and those beyond: the same two bounds that a worker has.
        policy, workload = self._policy(), call.workload
        bound = scheduling.handover_bound(policy, workload) + scheduling.queue_bound(policy, workload)
        if self.unaccepted[workload] >= bound:
            raise QueueFull(
                f"{bound} {workload.value} requests wait here for a worker to accept them: "
                "try again later, or add workers",
                metadata={"bound": str(bound), "workload": workload.value},
            )
        self.live[call.request_id] = call
        self.unaccepted[workload] += 1
        self.idle.clear()

    def accepted(self, call: Admitted) -> None:
        """A worker has it, or it left before one had."""
        self.unaccepted[call.workload] -= 1

    def leave(self, call: Admitted) -> None:
        del self.live[call.request_id]
        if not self.live:
            self.idle.set()

    def in_flight(self, workload: Workload) -> int:
        return sum(call.workload is workload for call in self.live.values())

    async def watch_readers(self) -> None:
        """For the life of the process: cancel the readers that are stuck."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for call in list(self.live.values()):
                if call.handed_over_at is not None and now - call.handed_over_at > self.stall_s:
                    call.give_up(self.stall_s)

    def end_all(self, error_of: Callable[[], TrimtabError]) -> None:
        """Cut what still runs."""
        for call in list(self.live.values()):
            call.end(error_of())
