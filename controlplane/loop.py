"""The loop leader's tick: once a second the controllers see the mesh, and what they decide is done by the doors that people use.

Adjustments go through `Replica.write` under the leader's lease, so a deposed leader changes nothing; commands through the same code as
`trimtab drain` and `trimtab requests`. A tick that takes long, a store that is away or a controller that fails delays the next tick and
nothing else. Only the leader's controllers run; each new leader starts them from what lives. One that finds in the middle of a tick that it
leads no more ends it there: the store refuses a deposed leader's moves, and nobody else would refuse its commands.
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
from controlplane.controllers import blocks, scale
from controlplane.controllers.decision import Command, Controller, Move, Reblock, Want
from controlplane.fleet import Fleet
from controlplane.leader import Leader
from controlplane.metrics import ControlMetrics
from controlplane.policies import Policies
from controlplane.pools import pools_of
from controlplane.refusals import Refusals
from controlplane.replica import Replica, unix_ms
from controlplane.rollouts.through import Through, unknown
from controlplane.seen import Seen
from controlplane.spec import Key
from controlplane.store import Fenced, Lease, Stored
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
ATTEMPTS = 16
"""Times in one tick that a controller's moves are written without those that were refused; the next tick goes on."""
FENCED_S = 60.0
"""No lease lasts for longer unless it was renewed (controlplane/settings.py)."""
GONE = "another replica may lead by now"


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
        self._restarted: Mapping[str, tuple[float, ...]] = {}
        self._led: Lease | None = None
        self._policies: tuple[Stored, Policies] | None = None
        self._said: dict[str, tuple[str, ...]] = {}
        self._refusals = Refusals()
        self._fenced: tuple[Lease, float] | None = None
        """Under which a write was refused, and when: another was granted, though this one has not run out by this replica's own clock."""
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
                if lease is None or not self._still(lease):
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

    def _still(self, lease: Lease) -> bool:
        """Whether this replica leads under it, as far as it knows."""
        if self._fenced is not None and self._fenced[0] == lease and self._clock() - self._fenced[1] < FENCED_S:
            return False
        return self._leader.leads == lease

    async def _rest(self) -> None:
        self._metrics.rested()
        self._actuators.rest()
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
            self._restarted = self._by_own_clock(self._actuators.restarted, now)
            self._controllers.start(live.values())
            self._through, self._refusals = Through(), Refusals()
            self._led = lease
        begun = time.perf_counter()
        seen = self._telemetry.seen(self._fleet, tuple(live.values()), self._clock())
        seen.wants = {pool: want.workers for pool, want in self.wants.items()}
        seen.plans = self._actuators.plans.seen(seen.now, now)
        seen.restarting = self.restarting()
        seen.restarted = self._restarted
        self.steps = self._controllers.step(seen, policies.spec)
        pinned = {p.field for p in policies.document.pins}
        planned = [
            (s, tick.changes(s.name, moves, live, pinned, now, self._refusals.of(s.name, self._clock())))
            for s in self.steps
            for moves in (self._moves(s, live, seen, policies),)
        ]
        self.tick_ms = 1000.0 * (time.perf_counter() - begun)
        self._metrics.ticked(self.tick_ms / 1000.0)
        self._metrics.leads.set(1)
        for step, found in planned:
            if step.failed:
                log.error("a controller failed", controller=step.name, because=step.failed)
            if step.mode is Loop.ADVISE:
                self._advise(step)
            elif not found.empty:
                await self._write(step.name, found, lease, live)
            if not self._still(lease):
                return
            if step.mode is Loop.ON:
                await self._act(step, lease)
            elif step.name == scale.name:
                await self._actuators.forget()
            if not self._still(lease):
                return
            await self._plan(step, seen.now)
        if not self._still(lease):
            return
        await self._carry_on(lease, seen, policies)
        own = self._refusals.alerts(self._clock()) + unknown(
            policies.spec(None).rollout.through, self._controllers.controllers
        )
        self._alerts.tell([a for s in self.steps for a in s.decision.alerts] + own)
        self._measure(live.values())
        self._metrics.scaled(pools_of(seen, self.wants, policies.spec))

    def _by_own_clock(self, times: Mapping[str, Iterable[int]], now_unix_ms: int) -> dict[str, tuple[float, ...]]:
        """Unix milliseconds, by node, as this leader's controllers count time; what another's clock puts into the future is now."""
        now = self._clock()
        return {k: tuple(now - max(0, now_unix_ms - at) / 1000.0 for at in found) for k, found in times.items()}

    def _moves(self, s: Step, live: Mapping[Key, Adjustment], seen: Seen, policies: Policies) -> tuple[Move, ...]:
        """What of a controller's moves is to hold now: some try theirs on canaries first."""
        if s.mode is not Loop.ON:
            # A trial that nobody goes on with is none: on again, the move is tried anew.
            self._through.moves(s.name, (), live, seen, policies)
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
        except Fenced as e:
            self._fenced = (lease, self._clock())
            log.warning("a rollout was not carried on", because=e.message)
        except Conflict as e:
            # Somebody else has ended it, or leads: what there is then is seen by the next tick.
            log.warning("a rollout was not carried on", because=e.message)
        except Exception:
            log.exception("a rollout was not carried on")

    async def _write(self, name: str, found: Changes, lease: Lease, live: Mapping[Key, Adjustment]) -> None:
        """Without what is refused: a node that can't take its own move, or one move too many, must not have all the others expire."""
        for _ in range(ATTEMPTS):
            if found.empty or not self._still(lease):
                return
            failed = ""
            rest = Changes()
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
                failed = e.message
                member = self._fleet.member(e.node)
                rest = tick.without(found, e, member.hello.node if member is not None else None, live)
                kept = {spec.key_of(a) for a in rest.put}
                refused = [key for a in found.put if (key := spec.key_of(a)) not in kept]
                self._refusals.note(refused, self._clock())
                log.warning("a controller's move was refused", controller=name, moves=len(refused), because=e.message)
            except Conflict as e:
                # Deposed, or others kept writing: the next tick, or the next leader, sees what is there then.
                failed = e.message
                if isinstance(e, Fenced):
                    self._fenced = (lease, self._clock())
            except StoreUnavailable as e:
                # What the others command does not wait for it; the next tick offers the same moves again.
                self._store_away(e)
                return
            else:
                self._away = False
            left = set(rest.texts)
            for text in found.texts:
                if text not in left:
                    self._record(name, text, found.reason, found.evidence, failed=failed)
            found = rest

    async def _act(self, step: Step, lease: Lease) -> None:
        commands = step.decision.commands
        for command in commands:
            if isinstance(command, Reblock):
                # An engine changes between two steps, which may be long; the other controllers do not wait for that.
                task = asyncio.create_task(self._do(step.name, command, lease))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
        # Together: one node that does not answer must not keep the others waiting.
        await asyncio.gather(*(self._do(step.name, c, lease) for c in commands if not isinstance(c, Reblock)))
        for want in step.decision.wants:
            if self._still(lease) and await self._actuators.want(want):
                self._record(step.name, tick.wanted(want), want.reason, want.evidence, kind=WANT)

    async def _do(self, name: str, command: Command, lease: Lease) -> None:
        try:
            failed = await self._actuators.do(f"controller/{name}", command) if self._still(lease) else GONE
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

    def _measure(self, live: Iterable[Adjustment]) -> None:
        held: dict[str, int] = {s.name: 0 for s in self.steps}
        for a in live:
            held[a.controller] = held.get(a.controller, 0) + 1
        self._metrics.looped(
            moves=held, holds={s.name: len(s.decision.holds) for s in self.steps if s.mode is not Loop.OFF}
        )
