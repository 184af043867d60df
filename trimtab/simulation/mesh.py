"""A mesh in virtual time: workers, gateways, arrivals, faults, and whoever controls it. Pure: nothing here waits.

Events are taken in order of their time; of those at one time, in the order in which they were made. So one seed gives one course. Whoever
controls it hears what a control plane hears (hellos, reports, nodes that go) and answers with a policy and with orders; without one, the
mesh runs by the policy that it began with.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from trimtab.blocks import LADDER
from trimtab.messages import Hello, Report, RequestMatch, Role, Workload
from trimtab.policy import Policy
from trimtab.simulation import faults as f
from trimtab.simulation.gateway import SimulatedGateway
from trimtab.simulation.request import Fate, Request
from trimtab.simulation.worker import GpuCosts, SimulatedWorker, Stage
from trimtab.snapshot import Document, Limits, Node, resolve
from trimtab.workload import Arrival

REPORT_S = 0.8
TICK_S = 1.0
LIMITS = Limits(64, 2048, 131_072, 16, 65_536, "simulated", block_sizes=LADDER, live_blocks=True)
COSTS = GpuCosts(6.0, 5.0, 0.25, kv_us=6.0)
"""An 8B model on four GPUs, roughly: 2,048 tokens of prefill take 16 ms, reading a million tokens of KV 6 ms."""
NOTHING_SET = Document()


@dataclass(frozen=True, slots=True)
class Fleet:
    """What there is at the beginning. A worker that starts takes `start_s` until it serves; those of the beginning serve at once."""

    pools: Mapping[str, int] = field(default_factory=lambda: {"default": 2})
    gateways: int = 1
    limits: Limits = LIMITS
    costs: GpuCosts = COSTS
    kv_bytes_per_token: int = 131_072
    start_s: float = 20.0
    model: str = "m"
    document: Document = NOTHING_SET


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker finishes what it can within `drain_s`; then it ends, and is started anew unless it is surplus."""

    node_id: str
    incarnation: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """So many workers of a pool; `surplus` go first where there are more."""

    pool: str
    workers: int
    surplus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Orders:
    """What a tick came to. `document` is the policy as it is to hold from now on; None leaves it. `reblocks` are (node id, incarnation, KV
    block size)."""

    document: Document | None = None
    drains: tuple[Drain, ...] = ()
    releases: tuple[tuple[str, RequestMatch], ...] = ()
    sizes: tuple[Size, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of new work, what these workers get next to what they would get by themselves; the others get all of it."""
    reblocks: tuple[tuple[str, str, int], ...] = ()


class Control(Protocol):
    """Who controls the mesh; `now` in seconds. `tick` is called once a second."""

    def joined(self, hello: Hello, now: float) -> None: ...
    def lost(self, node_id: str, now: float, *, out_of_memory: bool) -> None: ...
    def reported(self, node_id: str, report: Report, now: float) -> None: ...
    def limits_changed(self, node_id: str, limits: Limits) -> None: ...
    def tick(self, now: float) -> Orders: ...


@dataclass(slots=True)
class Outcome:
    """Every request that came, in order of arrival, and the tokens that BATCH got in each second: a prompt's with its first output."""

    requests: list[Request] = field(default_factory=list)
    batch_tokens: dict[int, int] = field(default_factory=dict)
    workers: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, workers that serve), each second."""
    computed_tokens: int = 0
    recomputed_tokens: int = 0


class Mesh:
    """`run` once; afterwards `outcome` has what came of it."""

    def __init__(
        self,
        fleet: Fleet,
        arrivals: Iterable[Arrival],
        *,
        control: Control | None = None,
        faults: Iterable[f.Fault] = (),
        seed: int = 0,
    ) -> None:
        self.fleet = fleet
        self.workers: list[SimulatedWorker] = []
        self.outcome = Outcome()
        self.now_ms = 0.0
        self.document = fleet.document
        self._control = control
        self._rng = random.Random(f"{seed}/mesh")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._names = itertools.count(1)
        self._silent_until_ms: dict[str, float] = {}
        self.gateways = [
            SimulatedGateway(node := Node(f"gateway-{i}"), self._policy(node), self.workers, self._rng)
            for i in range(fleet.gateways)
        ]
        for g in self.gateways:
            self._join(Hello(g.node, f"{g.node.node_id}/1", Role.GATEWAY))
            self._report_gateway(g)
        for pool, count in fleet.pools.items():
            for _ in range(count):
                self._started(self._start(pool, self._name(pool)))
        for fault in faults:
            self._at(1000.0 * fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._at(1000.0 * TICK_S, self._tick)
        self._next_arrival()

    def run(self, until_s: float) -> Outcome:
        """What comes before then happens; it may be called again with a later time."""
        while self._events and self._events[0][0] <= 1000.0 * until_s:
            self.now_ms, _, do = heapq.heappop(self._events)
            do()
        return self.outcome

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000.0

    def _at(self, at_ms: float, do: Callable[[], None]) -> None:
        if at_ms < math.inf:
            heapq.heappush(self._events, (at_ms, next(self._number), do))

    # Requests.

    def _next_arrival(self) -> None:
        a = next(self._arrivals, None)
        if a is not None:
            self._at(1000.0 * a.at_s, lambda: self._arrive(a))

    def _arrive(self, a: Arrival) -> None:
        number = len(self.outcome.requests)
        r = Request(f"r{number}", a.workload, a.prompt, a.output, self.now_ms, a.tenant, a.source)
        self.outcome.requests.append(r)
        self._gateway_of(r).enter(r, self.now_ms)
        self._go_on()
        self._next_arrival()

    def _gateway_of(self, r: Request) -> SimulatedGateway:
        return self.gateways[int(r.request_id[1:]) % len(self.gateways)]

    def _orphan(self, requests: Iterable[Request]) -> None:
        for r in requests:
            self._gateway_of(r).again(r, self.now_ms)
        self._go_on()

    def _go_on(self) -> None:
        """Whoever waits at a gateway is looked at, and workers that can step do."""
        for g in self.gateways:
            g.pump(self.now_ms)
        for w in self.workers:
            if w.can_step(self.now_ms):
                self._at(self.now_ms + w.begin(self.now_ms), lambda w=w: self._step_ended(w))  # type: ignore[misc]

    def _step_ended(self, w: SimulatedWorker) -> None:
        if w.stage is Stage.GONE:
            return
        if w.hung_until_ms is not None and self.now_ms < w.hung_until_ms:
            self._at(w.hung_until_ms, lambda: self._step_ended(w))
            return
        ended, batch_tokens = w.end(self.now_ms, self._rng)
        for r in ended:
            self._gateway_of(r).end(r, r.fate, self.now_ms)
        if batch_tokens:
            second = int(self.now_s)
            self.outcome.batch_tokens[second] = self.outcome.batch_tokens.get(second, 0) + batch_tokens
        self._go_on()

    # Workers.

    def _name(self, pool: str) -> str:
        return f"{pool}-{next(self._names)}"

    def _policy(self, node: Node) -> Policy:
        return resolve(self.document, node, now_unix_ms=int(self.now_ms)).policy

    def _join(self, hello: Hello) -> None:
        if self._control is not None:
            self._control.joined(hello, self.now_s)

    def _start(self, pool: str, name: str, life: int = 1) -> SimulatedWorker:
        node = Node(name, pool, limits=self.fleet.limits)
        w = SimulatedWorker(
            node, life, self.fleet.costs, self.fleet.kv_bytes_per_token, self._policy(node), self.now_ms
        )
        self.workers.append(w)
        self._join(Hello(node, w.incarnation, Role.WORKER, self.fleet.model))
        self._report_worker(w)
        return w

    def _started(self, w: SimulatedWorker) -> None:
        if w.stage is Stage.STARTING:
            w.stage = Stage.SERVING
            self._go_on()

    def _begin(self, pool: str, name: str, life: int) -> None:
        w = self._start(pool, name, life)
        self._at(self.now_ms + 1000.0 * self.fleet.start_s, lambda: self._started(w))

    def _drain(self, w: SimulatedWorker, within_s: float, *, for_good: bool) -> None:
        if w.stage is not Stage.GONE:
            w.stage, w.leaves_for_good = Stage.DRAINING, w.leaves_for_good or for_good
            self._at(self.now_ms + 1000.0 * within_s, lambda: self._leave(w))

    def _leave(self, w: SimulatedWorker, *, out_of_memory: bool = False) -> None:
        """The process ends; its requests go elsewhere, and its supervisor starts it anew unless it was surplus."""
        if w.stage is Stage.GONE:
            return
        w.stage = Stage.GONE
        self.workers.remove(w)
        self._add_up(w)
        if self._control is not None:
            self._control.lost(w.node.node_id, self.now_s, out_of_memory=out_of_memory)
        if not w.leaves_for_good:
            self._begin(w.node.pool, w.node.node_id, w.life + 1)
        self._orphan(w.take_all())

    def _add_up(self, w: SimulatedWorker) -> None:
        self.outcome.computed_tokens += w.engine.planner.counters.computed_tokens
        self.outcome.recomputed_tokens += w.engine.planner.counters.recomputed_tokens

    def total_tokens(self) -> tuple[int, int]:
        """Computed, and of these computed again, by all workers that there were."""
        counters = [w.engine.planner.counters for w in self.workers]
        return (
            self.outcome.computed_tokens + sum(c.computed_tokens for c in counters),
            self.outcome.recomputed_tokens + sum(c.recomputed_tokens for c in counters),
        )

    # Reports and ticks.

    def _report_worker(self, w: SimulatedWorker) -> None:
        if w.stage is Stage.GONE:
            return
        if w.hung(self.now_ms) and w.requests:
            # Gateways move what a hung worker holds (decision 13).
            self._orphan(w.take_all())
        if w.stage is Stage.DRAINING and not w.requests:
            self._leave(w)
            return
        self._report(w.node.node_id, lambda: w.report(self.now_ms))
        self._at(self.now_ms + 1000.0 * REPORT_S, lambda: self._report_worker(w))

    def _report_gateway(self, g: SimulatedGateway) -> None:
        self._report(g.node.node_id, lambda: g.report(self.now_ms))
        self._at(self.now_ms + 1000.0 * REPORT_S, lambda: self._report_gateway(g))

    def _report(self, node_id: str, make: Callable[[], Report]) -> None:
        """A silent node's measurements stay with it until it is heard again."""
        if self._control is not None and self.now_ms >= self._silent_until_ms.get(node_id, 0.0):
            self._control.reported(node_id, make(), self.now_s)

    def _tick(self) -> None:
        self._at(self.now_ms + 1000.0 * TICK_S, self._tick)
        self.outcome.workers.append((self.now_s, sum(w.serving(self.now_ms) for w in self.workers)))
        if self._control is not None:
            self._obey(self._control.tick(self.now_s))
        # Adjustments expire by themselves, so policies are looked at each second.
        for w in self.workers:
            w.set_policy(self._policy(w.node))
        for g in self.gateways:
            g.set_policy(self._policy(g.node))
        self._go_on()

    def _obey(self, orders: Orders) -> None:
        self.document = orders.document or self.document
        here = {w.node.node_id: w for w in self.workers}
        for worker in self.workers:
            worker.weight = orders.weights.get(worker.node.node_id, 1.0)
        for d in orders.drains:
            w = here.get(d.node_id)
            if w is not None and w.incarnation == d.incarnation:
                self._drain(w, d.drain_s, for_good=False)
        for node_id, match in orders.releases:
            if node_id in here:
                for r in here[node_id].release(match, self.now_ms):
                    self._gateway_of(r).end(r, Fate.RELEASED, self.now_ms)
        for node_id, incarnation, block_size in orders.reblocks:
            w = here.get(node_id)
            if w is not None and w.incarnation == incarnation and w.reblock(block_size) and self._control is not None:
                self._control.limits_changed(node_id, w.node.limits)
        for size in orders.sizes:
            mine = [w for w in self.workers if w.node.pool == size.pool and not w.leaves_for_good]
            for _ in range(size.workers - len(mine)):
                self._begin(size.pool, self._name(size.pool), 1)
            last = sorted(mine, key=lambda w: (w.node.node_id in size.surplus, w.began_ms))
            for w in last[size.workers :] if size.workers < len(mine) else ():
                self._drain(w, 30.0, for_good=True)

    # Faults.

    def _strike(self, fault: f.Fault) -> None:
        if isinstance(fault, f.Silence):
            self._silent_until_ms[fault.node_id] = self.now_ms + 1000.0 * fault.for_s
            return
        w = next((w for w in self.workers if w.node.node_id == fault.node_id), None)
        if w is None:
            return
        match fault:
            case f.Die():
                self._leave(w, out_of_memory=fault.out_of_memory)
            case f.Hang():
                w.hang(self.now_ms, self.now_ms + 1000.0 * fault.for_s)
                self._at(w.hung_until_ms or 0.0, self._go_on)
            case f.Slow():
                was = w.engine.costs
                w.engine.costs = replace(self.fleet.costs, slowdown=fault.factor)
                self._at(self.now_ms + 1000.0 * fault.for_s, lambda: setattr(w.engine, "costs", was))
            case f.Fail():
                w.fails = fault.share
                self._at(self.now_ms + 1000.0 * fault.for_s, lambda: setattr(w, "fails", 0.0))
            case f.Leak():
                w.engine.free_blocks -= min(fault.blocks, w.engine.free_blocks)
            case f.Grow():
                w.grows_mb_per_min, w.began_ms = fault.mb_per_min, self.now_ms


def run(
    fleet: Fleet,
    arrivals: Iterable[Arrival],
    until_s: float,
    *,
    control: Control | None = None,
    faults: Iterable[f.Fault] = (),
    seed: int = 0,
) -> Outcome:
    """The course of a mesh from 0 to `until_s`, in virtual time."""
    mesh = Mesh(fleet, arrivals, control=control, faults=faults, seed=seed)
    outcome = mesh.run(until_s)
    outcome.computed_tokens, outcome.recomputed_tokens = mesh.total_tokens()
    return outcome


def realtime(requests: Iterable[Request]) -> list[Request]:
    return [r for r in requests if r.workload is Workload.REALTIME]
