"""The controllers on a simulated mesh: what the leader's loop does, in virtual time and without a store.

The fold of reports, the fleet, the tick and the fold of adjustments are those that are served; commands and wants become the simulator's
orders. What is left out is what a tick can't change: the lease, the wire, and how long a push takes (milliseconds, DESIGN §12).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controlplane import spec
from controlplane.controllers.decision import Alert, BlockPlan, Controller, Reblock, Release, Reload, Restart
from controlplane.fleet import Fleet
from controlplane.policies import Policies
from controlplane.telemetry import Telemetry
from controlplane.tick import Changes, Controllers, Step, blocked, changes, described, live_of, wanted
from trimtab.errors import PolicyRefused
from trimtab.messages import Hello, Report, Role
from trimtab.policy import Loop
from trimtab.simulation import Drain, Orders, Size
from trimtab.snapshot import Adjustment, Document, Limits

NO_DOCUMENT = Document()


@dataclass(frozen=True, slots=True)
class Noted:
    """One thing that a controller did, `what` in words. `kind` is move, back (what people set again), command, want, plan or refused."""

    at_s: float
    controller: str
    kind: str
    what: str
    reason: str
    evidence: str = ""


class Rehearsal:
    """A `trimtab.simulation.Control`. `notes` has what was done, `alerts` what was first told when, `holds` why somebody could not decide."""

    def __init__(self, controllers: Sequence[Controller], document: Document = NO_DOCUMENT) -> None:
        self.document = document
        self.notes: list[Noted] = []
        self.alerts: list[tuple[float, Alert]] = []
        self.holds: dict[str, set[str]] = {}
        self.failures: list[str] = []
        self.factors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        """By controller, field and scope: how far it was moved when, as (seconds, distance from what people set)."""
        self._fleet = Fleet()
        self._telemetry = Telemetry(0.0)
        self._controllers = Controllers(controllers)
        self._controllers.start(())
        self._sessions: dict[str, int] = {}
        self._hellos: dict[str, Hello] = {}
        self._told: set[str] = set()
        self._wants: dict[str, int] = {}
        self.plans: dict[str, BlockPlan] = {}
        """By pool: the newest."""
        self._policies = Policies(document)

    # What a control plane hears.

    def joined(self, hello: Hello, now: float) -> None:
        node_id = hello.node.node_id
        self._sessions[node_id], _ = self._fleet.joined(hello, now)
        self._hellos[node_id] = hello

    def lost(self, node_id: str, now: float, *, out_of_memory: bool) -> None:
        if out_of_memory:
            self._telemetry.ran_out_of_memory(self._hellos[node_id], now)
        self._fleet.lost(self._sessions[node_id], now)

    def reported(self, node_id: str, report: Report, now: float) -> None:
        self._fleet.reported(self._sessions[node_id], report, now)
        self._telemetry.reported(self._hellos[node_id], report, now)

    def limits_changed(self, node_id: str, limits: Limits) -> None:
        hello = self._fleet.limits_changed(self._sessions[node_id], limits)
        assert hello is not None
        self._hellos[node_id] = hello

    # What it does.

    def tick(self, now: float) -> Orders:
        """The leader's tick."""
        return self.carry_out(self.decide(now), now)

    def decide(self, now: float) -> list[tuple[Step, Changes]]:
        """What each controller makes of what there is, and what of it is to be written."""
        now_ms = int(1000.0 * now)
        live = live_of(self.document.adjustments, now_ms)
        seen = self._telemetry.seen(self._fleet, tuple(live.values()), now)
        seen.wants = dict(self._wants)
        if self._policies.document is not self.document:
            self._policies = Policies(self.document)
        pinned = {p.field for p in self.document.pins}
        return [
            (s, changes(s.name, s.decision.moves if s.mode is Loop.ON else (), live, pinned, now_ms))
            for s in self._controllers.step(seen, self._policies.spec)
        ]

    def carry_out(self, planned: Iterable[tuple[Step, Changes]], now: float) -> Orders:
        orders = Orders()
        for s, found in planned:
            if not found.empty:
                self._write(s.name, found, now)
            if s.mode is Loop.ON:
                orders = self._obeyed(s, orders, now)
            self._heard(s, now)
        self._trace(now)
        return replace(orders, document=self.document)

    def _write(self, name: str, found: Changes, now: float) -> None:
        nodes = [m.hello.node for m in self._fleet.connected(Role.WORKER)]
        try:
            draft = spec.adjust(found.put, found.drop)(self.document, nodes, int(1000.0 * now))
        except PolicyRefused as e:
            self.notes.append(Noted(now, name, "refused", e.message, found.reason, found.evidence))
            return
        self.document = draft.document
        for text in found.texts:
            kind = "back" if text.endswith("as people set it") else "move"
            self.notes.append(Noted(now, name, kind, text, found.reason, found.evidence))

    def _obeyed(self, s: Step, orders: Orders, now: float) -> Orders:
        for c in s.decision.commands:
            self.notes.append(Noted(now, s.name, "command", described(c), c.reason, c.evidence))
            if isinstance(c, Restart):
                orders = replace(orders, drains=(*orders.drains, Drain(c.node_id, c.incarnation, c.drain_s)))
            elif isinstance(c, Release):
                orders = replace(orders, releases=(*orders.releases, (c.node_id, c.match)))
            elif isinstance(c, Reblock):
                told = (c.node_id, c.incarnation, c.block_size)
                orders = replace(orders, reblocks=(*orders.reblocks, told))
            else:
                # A simulated node never runs by another policy than the newest: there is nothing to tell it anew.
                assert isinstance(c, Reload)
        for plan in s.decision.plans:
            before = self.plans.get(plan.pool)
            if plan.planned != (plan.present if before is None else before.planned):
                self.notes.append(Noted(now, s.name, "plan", blocked(plan), plan.reason, plan.evidence))
            self.plans[plan.pool] = plan
        for w in s.decision.wants:
            if self._wants.get(w.pool) != w.workers:
                self._wants[w.pool] = w.workers
                self.notes.append(Noted(now, s.name, "want", wanted(w), w.reason, w.evidence))
            orders = replace(orders, sizes=(*orders.sizes, Size(w.pool, w.workers, w.surplus)))
        return orders

    def _heard(self, s: Step, now: float) -> None:
        if s.failed:
            self.failures.append(f"{now:.0f} s: {s.name}: {s.failed}")
        self.holds.setdefault(s.name, set()).update(s.decision.holds)
        for a in s.decision.alerts:
            if a.key not in self._told:
                self._told.add(a.key)
                self.alerts.append((now, a))

    def _trace(self, now: float) -> None:
        """How far each adjustment is from what people set, where that changed."""
        now_ms = int(1000.0 * now)
        values = {
            (a.controller, a.field, str(a.scope)): _distance(a)
            for a in live_of(self.document.adjustments, now_ms).values()
        }
        for key in values.keys() | self.factors.keys():
            line = self.factors.setdefault(key, [])
            value = values.get(key, 0.0)
            if (line[-1][1] if line else 0.0) != value:
                line.append((now, value))


def _distance(a: Adjustment) -> float:
    """From what people set: 0 is none; of a factor what it takes away, of a delta the delta, and 1 of a word."""
    if a.state is not None:
        return 1.0
    return a.factor - 1.0 if a.factor is not None else float(a.delta)


def turns(line: Sequence[tuple[float, float]]) -> list[float]:
    """When an adjustment changed direction, in seconds: up after down, or down after up."""
    found, way, last = [], 0, 0.0
    for at, value in line:
        now = (value > last) - (value < last)
        if now and way and now != way:
            found.append(at)
        way, last = now or way, value
    return found


def most_a_minute(moments: Sequence[float]) -> int:
    """The most of these that fall into one minute."""
    ordered = sorted(moments)
    return max((sum(a <= m < a + 60.0 for m in ordered) for a in ordered), default=0)
