"""A simulated worker: `trimtab.engine` behind a queue with the rules of the worker's gate. No clock: the mesh says when.

The queue is bounded by workload and ordered by `scheduling.order_ms`; the engine is handed what may run and a few steps' supply of each
workload. Invariant: a request that was given to a worker is in its queue or in its engine until it ends or is taken away.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimtab import measures, scheduling
from trimtab.blocks import LADDER
from trimtab.engine import Costs, EngineValue, StepResult
from trimtab.messages import Load, NodeState, Report, RequestMatch, Workload
from trimtab.policy import Mode, Policy
from trimtab.progress import HUNG_AFTER_MS
from trimtab.routing import Candidate
from trimtab.scheduling import NOW, STATS, Rules, Shape
from trimtab.scheduling.line import Line
from trimtab.simulation.measuring import Measuring
from trimtab.simulation.request import Fate, Request
from trimtab.snapshot import Node

ISOLATION = "isolation"
"""A pool of this name is for isolated requests."""
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuCosts(Costs):
    """`kv_us`/1000 × thousands of KV tokens that decodes read come on top: on a GPU that is memory traffic, and a prompt's attention is not."""

    kv_us: float = 0.0
    slowdown: float = 1.0

    def of(self, shape: Shape) -> float:
        return self.slowdown * (Costs.of(self, shape) + self.kv_us * shape.kv_tokens / 1e6)


class Stage(enum.Enum):
    """Of a worker's life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class SimulatedWorker:
    """One process. `policy` is what it resolved last."""

    def __init__(
        self, node: Node, life: int, costs: GpuCosts, kv_bytes_per_token: int, policy: Policy, now_ms: float
    ) -> None:
        self.node, self.life = node, life
        self.stage = Stage.STARTING
        self.policy = policy
        limits = node.limits
        self.engine = EngineValue(
            costs,
            limits.block_size,
            limits.total_blocks,
            Rules.of(policy, limits),
            kv=limits.kv if limits.kv_groups else None,
        )
        self.measuring = Measuring(now_ms)
        self.requests: dict[str, Request] = {}
        self.step: StepResult | None = None
        self.step_began_ms = 0.0
        self.leaves_for_good = False
        self.hung_until_ms: float | None = None
        self.grows_mb_per_min = 0.0
        self.fails = 0.0
        """Of requests, the share that its engine fails."""
        self.weight = 1.0
        """Of new work, next to what it would get by itself."""
        self.began_ms = now_ms
        self._kv_bytes_per_token = kv_bytes_per_token
        self._lines: dict[Workload, Line[Request]] = {w: Line() for w in Workload}
        self._handed = dict.fromkeys(Workload, 0)
        self._waiting_tokens = 0
        self._busy_ms = 0.0
        self._reported_ms = now_ms
        self._stuck_since_ms: float | None = None

    @property
    def incarnation(self) -> str:
        return f"{self.node.node_id}/{self.life}"

    @property
    def isolates(self) -> bool:
        return self.node.pool == ISOLATION or self.node.labels.get(ISOLATION) == "true"

    def hung(self, now_ms: float) -> bool:
        """As health judges: work is there, and no step has ended for two seconds."""
        return self._stuck_since_ms is not None and now_ms - self._stuck_since_ms > HUNG_AFTER_MS

    def serving(self, now_ms: float) -> bool:
        return self.stage is Stage.SERVING and not self.hung(now_ms)

    def state(self, now_ms: float) -> NodeState:
        if self.stage is Stage.STARTING:
            return NodeState.STARTING
        if self.hung(now_ms):
            return NodeState.HUNG
        return NodeState.SERVING if self.stage is Stage.SERVING else NodeState.DRAINING

    # Requests.

    def supply(self, workload: Workload) -> int:
        """What it grants gateways: requests that the engine may still be given, beyond those that wait here."""
        return max(0, self._engine_room(workload) - len(self._lines[workload]))

    def room(self, workload: Workload) -> int:
        """The supply, and places in the queue."""
        waiting = len(self._lines[workload])
        queue = max(0, scheduling.queue_bound(self.policy, workload) - waiting)
        return max(0, self._engine_room(workload) - waiting) + queue

    def realtime_use(self) -> float:
        """Of the REALTIME queue, what is taken."""
        bound = self.policy.admission.realtime_queue
        return len(self._lines[Workload.REALTIME]) / bound if bound else 1.0

    def give(self, r: Request, now_ms: float) -> None:
        """A gateway hands it over; there is room."""
        r.attempts, r.given_ms, r.orphaned_ms, r.delivered_before = r.attempts + 1, now_ms, None, r.delivered
        self.requests[r.request_id] = r
        self.measuring.accepted(r)
        r.order = scheduling.order_ms(self.engine.rules, r.workload, r.arrival_ms)
        self._lines[r.workload].add(r)
        self._waiting_tokens += r.tokens
        self._hand_over()
        if self._stuck_since_ms is None and self.hung_until_ms is not None:
            self._stuck_since_ms = now_ms

    def take_all(self) -> list[Request]:
        """All its requests, in order of arrival; nothing is left here."""
        found = sorted(self.requests.values(), key=lambda r: (r.arrival_ms, r.request_id))
        for r in found:
            self._forget(r)
        return found

    def release(self, match: RequestMatch, now_ms: float) -> list[Request]:
        """Those that it covers end now."""
        found = [
            r
            for r in self.requests.values()
            if match.covers(r.request_id, r.workload, r.tenant, r.prompt, now_ms - r.arrival_ms)
        ]
        for r in found:
            r.fate = Fate.RELEASED
            self._forget(r)
            self.measuring.ended(r, self.policy, now_ms)
        self._hand_over()
        return found

    def set_policy(self, policy: Policy) -> None:
        if policy == self.policy:
            return
        self.policy = policy
        self.engine.set_rules(Rules.of(policy, self.node.limits))
        for line in self._lines.values():
            for r in line:
                r.order = scheduling.order_ms(self.engine.rules, r.workload, r.arrival_ms)
            line.resort()
        self._hand_over()

    def reblock(self, block_size: int) -> bool:
        """Its KV is cut anew, and what runs is computed anew. False, and nothing happens, while more is resident than the policy lets go."""
        limits, resident = self.node.limits, self.engine.resident_tokens
        idle = not resident or resident < self.policy.block_plan.max_recompute_tokens
        if block_size not in limits.block_sizes or not limits.live_blocks or not idle:
            return False
        self.engine.reblock(block_size)
        changed = replace(limits, block_size=block_size, total_blocks=self.engine.total_blocks)
        self.node = replace(self.node, limits=changed)
        return True

    # Steps.

    def can_step(self, now_ms: float) -> bool:
        if self.hung_until_ms is not None and now_ms >= self.hung_until_ms:
            self.hung_until_ms, self._stuck_since_ms = None, None
        stops = self.stage in (Stage.STARTING, Stage.GONE) or self.hung_until_ms is not None
        return self.step is None and not stops and self.engine.busy

    def begin(self, now_ms: float) -> float:
        """Begins a step; its length in milliseconds."""
        self.step, self.step_began_ms = self.engine.step(now_ms), now_ms
        for request_id in self.step.started:
            r = self.requests[request_id]
            r.scheduled_ms = now_ms if r.scheduled_ms is None else r.scheduled_ms
        for request_id in self.step.preempted:
            self.requests[request_id].preemptions += 1
        return self.step.cost_ms

    def end(self, now_ms: float, rng: random.Random) -> tuple[list[Request], int]:
        """The step is over: who has come to the end, and the tokens that BATCH got, a prompt's counted with its first output."""
        step, self.step = self.step, None
        assert step is not None
        self._busy_ms += now_ms - max(self.step_began_ms, self._reported_ms)
        ended, batch_tokens, measuring = [], 0, self.measuring
        for emission in step.emissions:
            r = self.requests.get(emission.request_id)
            if r is None:
                continue
            if self.fails and r.first_ms is None and rng.random() < self.fails:
                r.fate = Fate.FAILED
                ended.append(r)
                continue
            if r.first_ms is None:
                r.first_ms = now_ms
                measuring.first_token(r, self.policy)
                batch_tokens += r.prompt * (r.workload is Workload.BATCH)
            elif r.delivered > r.delivered_before:
                measuring.gap(r, self.policy, now_ms - r.last_ms)
            r.last_ms = now_ms
            r.delivered += 1
            batch_tokens += r.workload is Workload.BATCH
            if emission.last:
                r.fate = Fate.SERVED
                ended.append(r)
        for r in ended:
            longest = max((s.prompt_len for s in self.engine.running), default=0)
            self._forget(r)
            measuring.ended(r, self.policy, now_ms, len(self.engine.running), longest)
        self._hand_over()
        return ended, batch_tokens

    # Telemetry.

    def load(self) -> Load:
        """The engine's, with the queue's added."""
        load = self.engine.load()
        return replace(
            load,
            waiting=load.waiting + sum(len(line) for line in self._lines.values()),
            queued_prefill_tokens=load.queued_prefill_tokens + self._waiting_tokens,
        )

    def candidate(self, workload: Workload, now_ms: float) -> Candidate:
        """As a gateway sees it; BATCH needs credit."""
        room = self.supply(workload) if workload is Workload.BATCH else self.room(workload)
        return Candidate(
            self.node.node_id,
            self.life,
            self.serving(now_ms),
            self.load(),
            len(self.requests),
            room=room,
            isolates=self.isolates,
            weight=self.weight,
        )

    def report(self, now_ms: float) -> Report:
        stats = dict(zip(STATS, self.engine.planner.stats(), strict=True))
        counters = {f"scheduler_{name}": int(value) for name, value in stats.items() if name not in NOW}
        report = self.measuring.report(
            now_ms, self.state(now_ms), self.load(), self.engine.steps, counters, self._gauges(stats, now_ms)
        )
        self._busy_ms, self._reported_ms = 0.0, now_ms
        return report

    def _gauges(self, stats: Mapping[str, float], now_ms: float) -> dict[str, float]:
        e = self.engine
        realtime, batch = (list(self._lines[w]) for w in (Workload.REALTIME, Workload.BATCH))
        busy_ms = self._busy_ms + (now_ms - max(self.step_began_ms, self._reported_ms) if self.step else 0.0)
        minutes = (now_ms - self.began_ms) / 60_000.0
        hung_ms = now_ms - self._stuck_since_ms if self._stuck_since_ms is not None and self.hung(now_ms) else 0.0
        known = {measures.block_waste(size): w for size in LADDER if (w := stats[f"waste_{size}"]) >= 0.0}
        if deviation := stats["decode_deviation"]:
            known[measures.DECODE_DEVIATION] = deviation
        return {
            **known,
            measures.REALTIME_RUNNING: stats["realtime_running"],
            measures.BATCH_RUNNING: stats["batch_running"],
            measures.REALTIME_WAITING: stats["realtime_waiting"] + len(realtime),
            measures.BATCH_WAITING: stats["batch_waiting"] + len(batch),
            measures.COLD_WAITING: stats["cold_waiting"] + sum(r.prompt >= self.policy.paths.hot_below for r in batch),
            measures.KV_USED: 1.0 - e.free_blocks / e.total_blocks,
            measures.STORED_TOKENS: stats["stored_tokens"],
            measures.KV_BYTES_PER_TOKEN: float(self._kv_bytes_per_token),
            measures.RSS_BYTES: 4096 * MB + self.grows_mb_per_min * minutes * MB,
            measures.BUSY: min(1.0, busy_ms / max(1.0, now_ms - self._reported_ms)),
            measures.HUNG_S: hung_ms / 1000.0,
        }

    # Its queue.

    def hang(self, now_ms: float, until_ms: float) -> None:
        """No step begins before then; the one in flight does not end either."""
        self.hung_until_ms = until_ms
        if self.engine.busy:
            self._stuck_since_ms = now_ms

    def _engine_room(self, workload: Workload) -> int:
        # In order of arrival there is one queue for all, or a workload with room would overtake the one without.
        fcfs = self.engine.rules.mode is Mode.FCFS
        handed = sum(self._handed.values()) if fcfs else self._handed[workload]
        return scheduling.handover_bound(self.policy, workload) - handed

    def _hand_over(self) -> None:
        while True:
            heads = [h for w, line in self._lines.items() if (h := line.first()) and self._engine_room(w) > 0]
            if not heads:
                return
            r = min(heads, key=lambda h: (h.order, h.arrival_ms))
            self._lines[r.workload].remove(r.request_id)
            self._waiting_tokens -= r.tokens
            self._handed[r.workload] += 1
            left = max(1, r.output - r.delivered)
            self.engine.add(r.request_id, r.tokens, left, r.workload, r.arrival_ms, tenant=r.tenant)

    def _forget(self, r: Request) -> None:
        del self.requests[r.request_id]
        if self._lines[r.workload].remove(r.request_id) is None:
            self._handed[r.workload] -= 1
            self.engine.remove(r.request_id)
        else:
            self._waiting_tokens -= r.tokens
