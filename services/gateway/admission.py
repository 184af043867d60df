"""Who is in this gateway: what may enter and in which shape, and the end of those who are stuck or outlive a drain.

A request has its place from `enter` to `leave`, which is when its stream has truly ended. The bound is on requests that no worker has accepted
yet: REALTIME is handed to a worker at once, so more than a few of them means that the workers don't answer; BATCH waits here for its turn.
Of what a tenant may in the whole mesh, and of the BATCH requests that may wait in all gateways, each gateway lets in its part
(docs/decisions/0020). When there is too much, cold BATCH goes first, then a REALTIME request gets less output than it asked for, and only
then it is refused.
While the mesh is degraded (`degraded.state`) there is no cold BATCH at all, and less output for everybody.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from services.gateway.metrics import GatewayMetrics
from trimtab import measures, scheduling, tenant
from trimtab.errors import Cancelled, Draining, InvalidRequest, PermissionDenied, QueueFull, TrimtabError, Violation
from trimtab.messages import Workload
from trimtab.policy import Degraded, Policy, Shed
from trimtab.tenant import Bucket, Tenant

STALL_S = 30.0
"""A reader that takes nothing for so long is cancelled, wherever it is stuck; its worker has long been held back by the window."""
SWEEP_S = 0.5


class Admitted(Protocol):
    """What admission needs of a call. `handed_over_at` is when its reader got what it is busy with; None while it waits for more."""

    request_id: str
    workload: Workload
    tenant: Tenant
    handed_over_at: float | None

    @property
    def cold(self) -> bool: ...

    @property
    def tokens(self) -> int:
        """Of its prompt, and of its output at most where that is said."""
        ...

    @property
    def resumed(self) -> bool:
        """Its client goes on with what it got elsewhere."""
        ...

    def give_place(self, error: TrimtabError) -> None:
        """End, and leave at once."""
        ...

    def cap(self, max_tokens: int, because: str) -> None:
        """Give it no more output than that."""
        ...

    def end(self, error: TrimtabError) -> None: ...

    def give_up(self, after_s: float) -> None: ...


class Admission:
    """Belongs to one event loop."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        metrics: GatewayMetrics | None = None,
        *,
        stall_s: float = STALL_S,
        serving: Callable[[], int] = lambda: 1,
        realtime_use: Callable[[], float] = lambda: 0.0,
        gateways: Callable[[], int] = lambda: 1,
    ) -> None:
        """`serving` counts the workers that serve now, `gateways` those that share limits, this one among them; `realtime_use` is the part of
        its REALTIME queue that the least used worker has taken.
        """
        self._policy = policy
        self._metrics = metrics or GatewayMetrics()
        self.stall_s = stall_s
        self._serving = serving
        self._realtime_use = realtime_use
        self._gateways = gateways
        self.draining = False
        self.live: dict[str, Admitted] = {}
        self.unaccepted = dict.fromkeys(Workload, 0)
        self._cold = 0
        """BATCH requests among the unaccepted whose prompts are cold."""
        self._counted_cold: set[str] = set()
        self._at_workers: dict[str, str] = {}
        """Requests that some worker was given, and whose they are."""
        self._taken: dict[str, int] = {}
        """Their number, by tenant."""
        self._shares: dict[str, float] = {}
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, call: Admitted) -> None:
        """A place for it, or the reason why there is none. It may be given less output than it asked for."""
        if self.draining:
            raise Draining("this gateway is shutting down; another one, or this one in a moment, will take the request")
        before = self.live.get(call.request_id)
        if before is not None:
            if not call.resumed or before.tenant.name != call.tenant.name:
                text = f"is that of a request which still runs here: {call.request_id}"
                raise InvalidRequest(f"request_id {text}", violations=(Violation("request_id", text),))
            # Its client goes on with it, and has lost the connection that this gateway still takes for good.
            before.give_place(Cancelled("its client goes on with it in another call"))
        who, workload = call.tenant, call.workload
        self._shares[who.name] = who.share
        if workload is Workload.REALTIME and not who.realtime:
            raise PermissionDenied(f"tenant {who.name!r} may not send REALTIME requests; send it as BATCH")
        self._bounded(call)
        if workload is Workload.REALTIME and not self.may_start(who.name, who.share):
            text = f"tenant {who.name!r} has its share of the slots ({who.share:g}{self._divided()})"
            raise self._refused(call, "share", text)
        if not call.resumed:
            self._degrade(call)
            self._spend(call)
        elif before is None:
            # It may have been weighed and paid for at another gateway, which nobody here can tell from one that says so.
            self._spend(call, ahead_s=tenant.RESUMED_S)
        self.live[call.request_id] = call
        self.unaccepted[workload] += 1
        if workload is Workload.BATCH and call.cold:
            self._cold += 1
            self._counted_cold.add(call.request_id)
        self.idle.clear()

    def started(self, call: Admitted) -> None:
        """A worker was given it: from now on it counts in its tenant's share."""
        if call.request_id not in self._at_workers:
            self._at_workers[call.request_id] = call.tenant.name
            self._taken[call.tenant.name] = self._taken.get(call.tenant.name, 0) + 1

    def may_start(self, name: str, share: float | None = None) -> bool:
        """Whether this tenant's share has room for one more."""
        return self.left(name, 1, share) > 0

    def left(self, name: str, wanted: int, share: float | None = None) -> int:
        """How many more this tenant's share has room for, of so many."""
        if share is None:
            share = self._shares.get(name, 1.0)
        if share >= 1.0:
            return wanted
        slots = tenant.slots_part(share, self._serving() * self._policy().batch.active, self._gateways())
        return min(wanted, max(0, slots - self._taken.get(name, 0)))

    def has_started(self, request_id: str) -> bool:
        """Whether it counts in its tenant's share, as it does from its first worker to its end."""
        return request_id in self._at_workers

    def accepted(self, call: Admitted) -> None:
        """A worker has it, or it left before one had."""
        self.unaccepted[call.workload] -= 1
        if call.request_id in self._counted_cold:
            self._counted_cold.discard(call.request_id)
            self._cold -= 1

    def leave(self, call: Admitted) -> None:
        del self.live[call.request_id]
        name = self._at_workers.pop(call.request_id, None)
        if name is not None:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]
        if not self.live:
            self.idle.set()

    def _bounded(self, call: Admitted) -> None:
        """Those that workers may take up at once, and those beyond: the same two bounds that a worker has. Of BATCH, which waits in gateways, a
        gateway holds its part of those beyond; REALTIME waits at workers, which bound what comes from all gateways by themselves.
        """
        policy, workload = self._policy(), call.workload
        shed = policy.admission.shed
        if workload is Workload.BATCH and call.cold and policy.degraded.state == Degraded.DEGRADED:
            raise self._refused(call, "degraded", "cold BATCH requests are not taken now (degraded.state)")
        if workload is Workload.BATCH and (shed == Shed.BATCH or (shed == Shed.COLD and call.cold)):
            raise self._refused(call, "shed", f"{shed} requests are not taken now (admission.shed)")
        queue = scheduling.queue_bound(policy, workload)
        if workload is Workload.BATCH:
            queue = tenant.queue_part(queue, self._gateways())
        bound = scheduling.handover_bound(policy, workload) + queue
        if self.unaccepted[workload] >= bound:
            words = f"{bound} {workload.value} requests wait here for a worker to accept them: try again later, or add workers"
            raise self._refused(call, "queue", words, bound)
        if workload is Workload.BATCH and call.cold and self._cold >= int(policy.admission.cold_share * bound):
            raise self._refused(
                call, "cold", f"{self._cold} cold BATCH requests wait here (admission.cold_share)", self._cold
            )

    def _degrade(self, call: Admitted) -> None:
        """Less output: for anybody while the mesh is degraded, for REALTIME while queues are full."""
        policy = self._policy()
        rules, degraded = policy.admission, policy.degraded
        caps: list[tuple[int, str]] = []
        if degraded.state == Degraded.DEGRADED:
            caps.append((degraded.max_tokens, "the mesh is degraded (degraded.max_tokens)"))
        full = call.workload is Workload.REALTIME and rules.degraded_max_tokens
        if full and self._realtime_use() > rules.degrade_above:
            caps.append((rules.degraded_max_tokens, "queues are full (admission.degraded_max_tokens)"))
        if caps:
            call.cap(*min(caps))
            self._metrics.shed(call.workload.value, "capped")

    def _spend(self, call: Admitted, *, ahead_s: float = 0.0) -> None:
        """Of the tenant's rates: requests, and tokens that it may cost at most. What one of them refuses costs nothing of the other."""
        who, now, gateways = call.tenant, time.monotonic(), self._gateways()
        spent: list[tuple[dict[str, Bucket], Bucket]] = []
        for buckets, rate, cost, what in (
            (self._requests, who.requests_per_s, 1.0, "requests_per_s"),
            (self._tokens, who.tokens_per_s, float(call.tokens), "tokens_per_s"),
        ):
            if rate is None:
                continue
            bucket, wait_s = tenant.spend(buckets.get(who.name), rate / gateways, cost, now, ahead_s=ahead_s)
            if wait_s > 0.0:
                text = f"tenant {who.name!r} is above its {what} ({rate:g}{self._divided()})"
                raise self._refused(call, "rate", text, retry_after_ms=int(wait_s * 1000.0) + 1)
            spent.append((buckets, bucket))
        for buckets, bucket in spent:
            buckets[who.name] = bucket

    def _divided(self) -> str:
        """Of a limit, what else is true of it here."""
        n = self._gateways()
        return "" if n == 1 else f" in the mesh, and here its part of {n} gateways"

    def _refused(
        self, call: Admitted, why: str, text: str, bound: int | None = None, *, retry_after_ms: int | None = None
    ) -> QueueFull:
        self._metrics.shed(call.workload.value, why)
        facts = {"workload": call.workload.value} | ({"bound": str(bound)} if bound is not None else {})
        return QueueFull(text, metadata=facts, retry_after_ms=retry_after_ms)

    def gauges(self) -> dict[str, float]:
        """Requests that no worker has accepted yet wait; the others run."""
        in_flight = Counter(call.workload for call in self.live.values())
        waiting = self.unaccepted
        return {
            measures.REALTIME_WAITING: waiting[Workload.REALTIME],
            measures.BATCH_WAITING: waiting[Workload.BATCH],
            measures.COLD_WAITING: self._cold,
            measures.REALTIME_RUNNING: in_flight[Workload.REALTIME] - waiting[Workload.REALTIME],
            measures.BATCH_RUNNING: in_flight[Workload.BATCH] - waiting[Workload.BATCH],
        }

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
