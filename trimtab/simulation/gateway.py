"""A simulated gateway: what it refuses at its door, and who waits there. REALTIME goes to a worker at once or is refused; BATCH waits for
credit (DESIGN §2). Which worker says `trimtab.routing`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from trimtab import measures, routing, scheduling
from trimtab.errors import NoWorker, QueueFull
from trimtab.messages import Load, NodeState, Report, Workload
from trimtab.policy import Degraded, Isolation, Policy, Shed
from trimtab.scheduling import Rules
from trimtab.scheduling.line import Line
from trimtab.simulation.measuring import Measuring
from trimtab.simulation.request import Fate, Request
from trimtab.simulation.worker import SimulatedWorker
from trimtab.snapshot import Limits, Node


class SimulatedGateway:
    """`workers` is the mesh's list, as it changes."""

    def __init__(self, node: Node, policy: Policy, workers: Sequence[SimulatedWorker], rng: random.Random) -> None:
        self.node = node
        self.policy = policy
        self.measuring = Measuring(0.0, engine=False)
        self.in_flight: dict[str, Request] = {}
        self._workers = workers
        self._rng = rng
        self._line: Line[Request] = Line()
        self._rules = Rules.of(policy, Limits())
        self._cold: set[str] = set()
        self._orphans: dict[str, Request] = {}
        """REALTIME requests whose worker is gone and for whom there is no other one yet."""

    def set_policy(self, policy: Policy) -> None:
        self.policy, self._rules = policy, Rules.of(policy, Limits())

    def enter(self, r: Request, now_ms: float) -> None:
        """A request has come: it is given away, waits, or has a fate."""
        refusal = self._refusal(r)
        if refusal is not None:
            self.end(r, refusal, now_ms)
            return
        self._cap(r)
        self.in_flight[r.request_id] = r
        if r.workload is Workload.BATCH and (self._line or not self._any_supply(now_ms)):
            self._wait(r)
        elif not self._give(r, now_ms):
            if r.workload is Workload.BATCH:
                self._wait(r)
            else:
                self.end(r, Fate.REFUSED, now_ms)

    def again(self, r: Request, now_ms: float) -> None:
        """Its worker is gone: another one takes it on, at once or when there is one."""
        r.orphaned_ms = now_ms if r.orphaned_ms is None else r.orphaned_ms
        if r.attempts >= self.policy.resume.attempts:
            self.end(r, Fate.FAILED, now_ms)
        elif not self._give(r, now_ms):
            if r.workload is Workload.BATCH:
                self._wait(r)
            else:
                self._orphans[r.request_id] = r

    def pump(self, now_ms: float) -> None:
        """Whoever waits and can be taken goes; who has waited too long for another worker fails."""
        for r in list(self._orphans.values()):
            given = self._give(r, now_ms)
            if given or now_ms - (r.orphaned_ms or now_ms) > self.policy.resume.wait_ms:
                del self._orphans[r.request_id]
                if not given:
                    self.end(r, Fate.FAILED, now_ms)
        while (first := self._line.first()) is not None and self._any_supply(now_ms):
            if not self._give(first, now_ms):
                return
            self._line.remove(first.request_id)
            self._cold.discard(first.request_id)

    def end(self, r: Request, fate: Fate, now_ms: float) -> None:
        """The request leaves the mesh."""
        r.fate = fate
        self.in_flight.pop(r.request_id, None)
        # A refusal is no engine's fault, and nothing that was served.
        if fate in (Fate.SERVED, Fate.FAILED):
            if r.first_ms is not None:
                self.measuring.first_token(r, self.policy)
            self.measuring.ended(r, self.policy, now_ms)

    def report(self, now_ms: float) -> Report:
        here = [r.workload for r in self.in_flight.values()]
        realtime, batch = here.count(Workload.REALTIME), here.count(Workload.BATCH)
        gauges = {
            measures.REALTIME_RUNNING: float(realtime - len(self._orphans)),
            measures.BATCH_RUNNING: float(batch - len(self._line)),
            measures.REALTIME_WAITING: float(len(self._orphans)),
            measures.BATCH_WAITING: float(len(self._line)),
            measures.COLD_WAITING: float(len(self._cold)),
        }
        return self.measuring.report(now_ms, NodeState.SERVING, Load(), 0, {}, gauges)

    def _refusal(self, r: Request) -> Fate | None:
        p, cold = self.policy, r.prompt >= self.policy.paths.hot_below
        if r.workload is Workload.BATCH:
            degraded = p.degraded.state == Degraded.DEGRADED
            if p.admission.shed == Shed.BATCH or (cold and (p.admission.shed == Shed.COLD or degraded)):
                return Fate.SHED
            bound = scheduling.queue_bound(p, r.workload)
            if len(self._line) >= bound or (cold and len(self._cold) >= p.admission.cold_share * bound):
                return Fate.REFUSED
        if p.isolate.action == Isolation.REFUSE and self._rules.isolates(r.prompt, r.tenant):
            return Fate.REFUSED
        return None

    def _cap(self, r: Request) -> None:
        """Less output than it asked for, where there is too much to do."""
        p = self.policy
        if p.degraded.state == Degraded.DEGRADED:
            r.output = min(r.output, p.degraded.max_tokens)
        uses = [w.realtime_use() for w in self._workers] if r.workload is Workload.REALTIME else []
        if uses and p.admission.degraded_max_tokens and min(uses) > p.admission.degrade_above:
            r.output = min(r.output, p.admission.degraded_max_tokens)

    def _any_supply(self, now_ms: float) -> bool:
        return any(w.serving(now_ms) and w.supply(Workload.BATCH) for w in self._workers)

    def _give(self, r: Request, now_ms: float) -> bool:
        isolated = self.policy.isolate.action == Isolation.POOL and self._rules.isolates(r.prompt, r.tenant)
        apart = isolated and any(w.isolates for w in self._workers)
        want = routing.Want(r.workload, routing.Need.ISOLATION if apart else routing.Need.ANY)
        fleet = [w.candidate(r.workload, now_ms) for w in self._workers]
        try:
            pick = routing.pick(fleet, want, [self._rng.random() for _ in range(routing.draws(len(fleet)))])
        except (NoWorker, QueueFull):
            return False
        next(w for w in self._workers if w.node.node_id == pick.node_id).give(r, now_ms)
        return True

    def _wait(self, r: Request) -> None:
        r.order = scheduling.order_ms(self._rules, r.workload, r.arrival_ms)
        self._line.add(r)
        if r.prompt >= self.policy.paths.hot_below:
            self._cold.add(r.request_id)
