"""The loop leader's tick: once a second the controllers see the mesh, and what they decide is done by the doors that people use.

Adjustments go through `Replica.write` under the leader's lease, so a deposed leader changes nothing; commands through the same code as
`trimtab drain` and `trimtab requests`. A tick that takes long, a store that is away or a controller that fails delays the next tick and
nothing else. Only the leader's controllers run; each new leader starts them from what lives.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from controlplane import spec, tick
from controlplane.actuators import Actuators
from controlplane.alerts import Alerts
from controlplane.controllers import blocks
from controlplane.controllers.decision import Alert, Command, Controller, Move, Reblock, Severity, Want
from controlplane.fleet import Fleet
from controlplane.leader import Leader
from controlplane.metrics import ControlMetrics
from controlplane.policies import Policies
from controlplane.pools import pools_of
from controlplane.replica import Replica, unix_ms
from controlplane.rollouts.through import Through, unknown
from controlplane.seen import Seen
from controlplane.spec import Key
from controlplane.store import Lease, Stored
from controlplane.telemetry import Telemetry
from controlplane.tick import Changes, Controllers, Step
from trimtab.codec import decode_document
from trimtab.errors import Conflict, PolicyRefused, StoreUnavailable
from trimtab.messages import Role
from trimtab.policy import Loop
from trimtab.snapshot import Adjustment

log = structlog.get_logger(__name__)

TICK_S = 1.0
DECISIONS = 500
"""That are kept for `top`; the history has those that changed the policy for longer."""
MOVE, COMMAND, WANT, PLAN = "move", "command", "want", "plan"
"""Kinds of decisions. Moves that were done are in the policy's history too."""
REFUSED_S = 30.0
"""A controller whose move was refused is not written again before."""


@dataclass(frozen=True, slots=True)
class Record:
    """One decision, as `top` shows it. `failed` says why it was not done."""

    controller: str
    at_unix_ms: int
    text: str
    reason: str
    evidence: str = ""
    advised: bool = False
    failed: str = ""
    kind: str = MOVE


class TelemetryLoop:
    """Belongs to one event loop; `run` must be running. `clock` gives seconds and is that of the telemetry."""

    def __init__(
        self,
        replica: Replica,
        fleet: Fleet,
        telemetry: Telemetry,
        leader: Leader,
        controllers: Sequence[Controller],
        actuators: Actuators,
        alerts: Alerts,
        metrics: ControlMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions: deque[Record] = deque(maxlen=DECISIONS)
        self.steps: list[Step] = []
        self.tick_ms: float | None = None
        """How long the last one took to decide; None where this replica does not lead."""
        self._replica = replica
        self._fleet = fleet
        self._telemetry = telemetry
        self._leader = leader
        self._controllers = Controllers(controllers)
        self._actuators = actuators
        self._alerts = alerts
        self._metrics = metrics
        self._clock = clock
        self.restarting: Callable[[], frozenset[str]] = frozenset
        """Workers that people have started anew one after another, while they are away or watched; set by whoever drives that."""
        self.carry_on: Callable[[Lease, Seen, Policies], Awaitable[None]] | None = None
        """Rollouts, after the controllers have acted; set by whoever drives them."""
        self._through = Through()
        self._led: Lease | None = None
        self._policies: tuple[Stored, Policies] | None = None
        self._said: dict[str, tuple[str, ...]] = {}
        self._refused_at: dict[str, float] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._away = False
        """The store was, when it was last needed."""

    async def run(self) -> None:
        """For ever."""
        try:
            await self._run()
        finally:
            for task in self._under_way:
                task.cancel()

    async def _run(self) -> None:
        while True:
            begun = self._clock()
            lease = self._leader.leads
            try:
                if lease is None:
                    await self._rest()
                else:
                    await self._tick(lease)
            except StoreUnavailable as e:
                self._store_away(e)
            except Exception:
                # The mesh goes on without a tick, and the next one may do better; without a loop it would go on blind.
                log.exception("a tick failed")
            await asyncio.sleep(max(0.05, TICK_S - (self._clock() - begun)))

    @property
    def leads(self) -> bool:
        """Whether its controllers have run last."""
        return self._led is not None and self._leader.leads is not None

    @property
    def wants(self) -> dict[str, Want]:
        """What each pool wants, by the leader's last word."""
        return self._actuators.wants

    def policies(self) -> Policies | None:
        """Of the newest policy; None before there is one."""
        stored = self._replica.newest.value
        if stored is None:
            return None
        if self._policies is None or self._policies[0] is not stored:
            self._policies = (stored, Policies(decode_document(stored.snapshot.document)))
        return self._policies[1]

    async def _rest(self) -> None:
        self._metrics.rested()
        if self._led is not None:
            self._led, self.tick_ms, self.steps = None, None, []
            self._said = {}
            self._alerts.forget()

    async def _tick(self, lease: Lease) -> None:
        policies = self.policies()
        if policies is None:
            return
        now = unix_ms()
        live = tick.live_of(policies.document.adjustments, now)
        if self._led is None or self._led.term != lease.term:
            await self._actuators.recall()
            self._controllers.start(live.values())
            self._through = Through()
            self._led = lease
        begun = time.perf_counter()
        seen = self._telemetry.seen(self._fleet, tuple(live.values()), self._clock())
        seen.wants = {pool: want.workers for pool, want in self.wants.items()}
        seen.plans = self._actuators.plans.seen(seen.now, now)
        seen.restarting = self.restarting()
        self.steps = self._controllers.step(seen, policies.spec)
        pinned = {p.field for p in policies.document.pins}
        planned = [
            (s, tick.changes(s.name, self._moves(s, live, seen, policies), live, pinned, now)) for s in self.steps
        ]
        self.tick_ms = 1000.0 * (time.perf_counter() - begun)
        self._metrics.ticked(self.tick_ms / 1000.0)
        self._metrics.leads.set(1)
        for step, found in planned:
            if step.failed:
                log.error("a controller failed", controller=step.name, because=step.failed)
            if step.mode is Loop.ADVISE:
                self._advise(step)
            elif step.mode is Loop.ON:
                await self._write(step.name, found, lease)
                await self._act(step)
            elif not found.empty:
                await self._write(step.name, found, lease)
            await self._plan(step, seen.now)
        await self._carry_on(lease, seen, policies)
        own = self._own_alerts() + unknown(policies.spec(None).rollout.through, self._controllers.controllers)
        self._alerts.tell([a for s in self.steps for a in s.decision.alerts] + own)
        self._measure(live.values())
        self._metrics.scaled(pools_of(seen, self.wants, policies.spec))

    def _moves(self, s: Step, live: Mapping[Key, Adjustment], seen: Seen, policies: Policies) -> tuple[Move, ...]:
        """What of a controller's moves is to hold now: some try theirs on canaries first."""
        if s.mode is not Loop.ON:
            return ()
        moves = self._through.moves(s.name, s.decision.moves, live, seen, policies)
        for name, text, evidence in self._through.told:
            self._record(name, text, "rollout.through", evidence, kind=COMMAND)
        self._through.told.clear()
        return moves

    async def _carry_on(self, lease: Lease, seen: Seen, policies: Policies) -> None:
        if self.carry_on is None:
            return
        try:
            await self.carry_on(lease, seen, policies)
        except StoreUnavailable as e:
            self._store_away(e)
        except Conflict as e:
            # Somebody else has ended it, or leads: what there is then is seen by the next tick.
            log.warning("a rollout was not carried on", because=e.message)
        except Exception:
            log.exception("a rollout was not carried on")

    async def _write(self, name: str, found: Changes, lease: Lease) -> None:
        if found.empty or self._clock() - self._refused_at.get(name, -REFUSED_S) < REFUSED_S:
            return
        failed = ""
        try:
            await self._replica.write(
                spec.adjust(found.put, found.drop),
                lambda: [m.hello.node for m in self._fleet.connected(Role.WORKER)],
                author=f"controller/{name}",
                reason=found.reason,
                evidence=found.evidence,
                lease=lease,
            )
        except PolicyRefused as e:
            self._refused_at[name] = self._clock()
            failed = e.message
            log.warning("a controller's move was refused", controller=name, because=e.message)
        except Conflict as e:
            # Deposed, or others kept writing: the next tick, or the next leader, sees what is there then.
            failed = e.message
        except StoreUnavailable as e:
            # What the others command does not wait for it; the next tick offers the same moves again.
            self._store_away(e)
            return
        else:
            self._away = False
        for text in found.texts:
            self._record(name, text, found.reason, found.evidence, failed=failed)

    async def _act(self, step: Step) -> None:
        commands = step.decision.commands
        for command in commands:
            if isinstance(command, Reblock):
                # An engine changes between two steps, which may be long; the other controllers do not wait for that.
                task = asyncio.create_task(self._do(step.name, command))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
        # Together: one node that does not answer must not keep the others waiting.
        await asyncio.gather(*(self._do(step.name, c) for c in commands if not isinstance(c, Reblock)))
        for want in step.decision.wants:
            if await self._actuators.want(want):
                self._record(step.name, tick.wanted(want), want.reason, want.evidence, kind=WANT)

    async def _do(self, name: str, command: Command) -> None:
        try:
            failed = await self._actuators.do(f"controller/{name}", command)
        except Exception as e:
            log.exception("a command failed", controller=name, command=tick.described(command))
            failed = f"{type(e).__name__}: {e}"
        self._record(name, tick.described(command), command.reason, command.evidence, failed=failed, kind=COMMAND)

    async def _plan(self, step: Step, now: float) -> None:
        """Plans are kept whether they are carried out or only advised: they change nothing by themselves."""
        plans = self._actuators.plans
        if step.mode is Loop.OFF:
            if step.name == blocks.name:
                await plans.forget()
            return
        for plan in await plans.keep(step.decision.plans, now, unix_ms()):
            if step.mode is Loop.ON:
                self._record(step.name, tick.blocked(plan), plan.reason, plan.evidence, kind=PLAN)

    def _store_away(self, e: StoreUnavailable) -> None:
        if not self._away:
            log.warning("the loop's moves wait for the store", because=e.message)
        self._away = True

    def _advise(self, step: Step) -> None:
        """Says what it would do, once for as long as it stays the same."""
        d = step.decision
        would = [(tick.moved(m), m.reason, m.evidence, MOVE) for m in d.moves]
        # A plan says what its commands would come to, which are given again and again until they are done.
        would += [(tick.described(c), c.reason, c.evidence, COMMAND) for c in d.commands if not isinstance(c, Reblock)]
        would += [(tick.blocked(p), p.reason, p.evidence, PLAN) for p in d.plans if p.planned != p.present]
        would += [(tick.wanted(w), w.reason, w.evidence, WANT) for w in d.wants]
        texts = tuple(text for text, *_ in would)
        before = self._said.get(step.name, ())
        if texts != before:
            for text, reason, evidence, kind in would:
                if text not in before:
                    self._record(step.name, text, reason, evidence, advised=True, kind=kind)
            self._said[step.name] = texts

    def _record(
        self,
        name: str,
        text: str,
        reason: str,
        evidence: str,
        *,
        advised: bool = False,
        failed: str = "",
        kind: str = MOVE,
    ) -> None:
        self.decisions.append(Record(name, unix_ms(), text, reason, evidence, advised, failed, kind))
        self._metrics.decided(name, "advised" if advised else "failed" if failed else "done")
        log.info(
            "decided", controller=name, what=text, reason=reason, evidence=evidence, advised=advised, failed=failed
        )

    def _own_alerts(self) -> list[Alert]:
        refused = [name for name, at in self._refused_at.items() if self._clock() - at < REFUSED_S]
        return [
            Alert(
                f"refused/{name}", Severity.WARNING, f"what the {name} controller wants is refused; see `trimtab why`"
            )
            for name in refused
        ]

    def _measure(self, live: Iterable[Adjustment]) -> None:
        held: dict[str, int] = {s.name: 0 for s in self.steps}
        for a in live:
            held[a.controller] = held.get(a.controller, 0) + 1
        self._metrics.looped(
            moves=held, holds={s.name: len(s.decision.holds) for s in self.steps if s.mode is not Loop.OFF}
        )
