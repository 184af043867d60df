"""The workers that this gateway knows: named by the control plane's FleetView, or static.

Losing the control plane freezes membership; the last view is on disk, so a gateway that starts without one serves. A worker that is gone from
the view gets no new requests, and what runs there goes on; its model is known for hours yet. Identity is the incarnation, not the address: a
restarted worker is a new one.
Once this gateway's certificate was renewed each worker gets a second link that shows it. New requests go there as soon as it is up; the
first link ends with the last request on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from services.gateway.census import Census
from services.gateway.endpoint import Endpoint, LinkState
from services.gateway.fleet import Remembered, Workers
from trimtab import breaking, codec
from trimtab.errors import ModelNotFound, NoWorker
from trimtab.kit import rpc
from trimtab.kit.process import write_atomically
from trimtab.messages import NodeState
from trimtab.policy_tree import BreakerPart
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)

LEAVE_GRACE_S = 5.0
"""A worker absent from a view for less than this keeps its place, and so does a gateway: after a restart of the control plane the view fills
again one by one."""

PEERS_MS = 1000.0
"""A pool's medians are looked up so often: a request's end costs the same among a thousand workers as among two."""

LIVES = 1 << 20
"""A worker's link has fewer of them: no two links of one node have a life in common, so that a new process was tried by nobody."""

Key = tuple[str, str]
"""(node id, incarnation); a static worker has its address and no incarnation."""


class Endpoints:
    """Belongs to one event loop. `start` before use, `close` at the end."""

    def __init__(
        self,
        gateway_id: str,
        static: tuple[str, ...],
        *,
        cache: Path | None = None,
        on_dropped: Callable[[], None] = lambda: None,
        on_moved: Callable[[Endpoint], None] = lambda _: None,
        on_tripped: Callable[[Endpoint, breaking.Trip], None] = lambda e, t: None,
        rules: Callable[[], BreakerPart] = BreakerPart,
        isolates: Callable[[str], bool] = lambda _: False,
        leave_grace_s: float = LEAVE_GRACE_S,
        gateways: int = 1,
    ) -> None:
        """`on_moved` hears of each worker that has said or become something; `isolates` says of a pool whether it is for isolated requests;
        `gateways` is how many the mesh has at least.
        """
        self._gateway_id = gateway_id
        self._static = static
        self._cache = cache
        self._on_dropped = on_dropped
        self._on_moved = on_moved
        self._on_tripped = on_tripped
        self._rules = rules
        self._isolates = isolates
        self._by_model: dict[str, Workers] = {}
        self._models_of: dict[Endpoint, str] = {}
        self._medians: dict[tuple[str, str], tuple[float, int, dict[str, float | None]]] = {}
        """By model and pool: when it was looked, and the median of first tokens of each worker that has one, the least first."""
        self._leave_grace_s = leave_grace_s
        self._members: dict[Key, Endpoint] = {}
        self._joined = 0
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._leaving: dict[Key, asyncio.TimerHandle] = {}
        self._retirements: set[asyncio.Task[None]] = set()
        self._successors: dict[Key, Endpoint] = {}
        """Links with a renewed certificate that are not up yet."""
        self._unrenewed: set[Key] = set()
        """Of those, the ones that have failed to connect."""
        self._renewing: asyncio.Task[None] | None = None
        self._seen = b""
        self._view = control_pb2.FleetView()
        self._left = Remembered()
        self.control_connected: Callable[[], bool] = lambda: True
        """Whether the newest view is still kept up to date; while it is not, nobody leaves."""
        self.census = Census(gateways, grace_s=leave_grace_s, on_fewer=lambda: self._store(self._view))
        self.census.connected = lambda: self.control_connected()

    def start(self) -> None:
        if rpc.uses_tls():
            self._renewing = asyncio.create_task(self._renew(rpc.generation()), name="renew links")
        for address in self._static:
            self._join((address, ""), self._endpoint(address, address, asks_model=True))
        view = self._load()
        if view is not None:
            log.info("fleet view loaded from disk", workers=len(view.workers), gateways=view.gateways)
            self._follow(view)
            self.census.hear(view.gateways)

    def on_fleet(self, view: control_pb2.FleetView) -> None:
        """Take the newest view."""
        self._follow(view)
        self._view = view
        self.census.hear(view.gateways)
        self._store(view)

    def get(self, node_id: str) -> Endpoint:
        return next(e for e in self._members.values() if e.node_id == node_id)

    def workers(self, model: str) -> Workers:
        """All of this model, able or not. NoWorker where its last worker has left, or none has joined yet; ModelNotFound where others are
        served.
        """
        found = self._by_model.get(model)
        if found is None:
            members = [e for e in self._members.values() if e.model == model]
            if not members:
                if self._left.knows(model, time.monotonic()):
                    text = f"the last worker of model {model!r} has left; another one may come"
                    raise NoWorker(text, metadata={"model": model})
                served = ", ".join(sorted({e.model for e in self._members.values() if e.model}))
                if served:
                    text = f"model {model!r} is not served here; served: {served}"
                    raise ModelNotFound(text, metadata={"model": model})
                raise NoWorker("there is no worker now", metadata={"model": model})
            found = self._by_model[model] = Workers(members)
        return found

    def serving(self) -> list[Endpoint]:
        """Those that may be given work, whatever their breakers say."""
        return [e for e in self._members.values() if e.serving and e.model]

    def has_isolation_pool(self, model: str) -> bool:
        return any(e.isolates and e.model == model for e in self._members.values())

    def peers_median_ms(self, endpoint: Endpoint, now_ms: float) -> float | None:
        """Of first tokens, of those that serve the same model in the same pool, as it was at most `PEERS_MS` ago; None where too little is
        known of them or of itself, or where it is needed.
        """
        rules = self._rules()
        if len(endpoint.guard.state.ttfts_ms) + 1 < rules.min_latencies:
            return None
        pool = (endpoint.model, endpoint.pool)
        looked_at_ms, all_of_them, known = self._medians.get(pool, (-PEERS_MS, 0, {}))
        if now_ms - looked_at_ms >= PEERS_MS:
            members = [e for e in self._members.values() if (e.model, e.pool) == pool]
            closed = [e for e in members if e.guard.state.phase is breaking.Phase.CLOSED]
            medians = {e.node_id: breaking.median_ttft_ms(e.guard.state, rules, now_ms) for e in closed}
            all_of_them, known = len(members), dict(sorted(medians.items(), key=lambda each: each[1] or 0.0))
            self._medians[pool] = (now_ms, all_of_them, known)
        others = [ms for node_id, ms in known.items() if node_id != endpoint.node_id]
        return breaking.median_of_peers(len(others), all_of_them - 1, [ms for ms in others if ms is not None])

    def policy_changed(self) -> None:
        """Which pools are for what may be another matter now."""
        for e in self._members.values():
            e.isolates = self._isolates(e.pool)

    def models(self) -> dict[str, int]:
        """Served models, each with the smallest window among its workers; 0 means unknown."""
        found: dict[str, int] = {}
        for e in self._members.values():
            if e.model:
                known = [n for n in (found.get(e.model, 0), e.max_model_len) if n]
                found[e.model] = min(known, default=0)
        return found

    def states(self) -> Mapping[str, str]:
        """Each member's state in a word or two, for people."""
        return {e.node_id: _state(e) for e in self._members.values()}

    @property
    def can_serve(self) -> bool:
        return any(e.serving and e.model for e in self._members.values())

    @property
    def links_up(self) -> int:
        return sum(e.state is LinkState.UP for e in self._tasks)

    async def close(self) -> None:
        self.census.close()
        for handle in self._leaving.values():
            handle.cancel()
        for task in [*self._retirements, *self._tasks.values(), *((self._renewing,) if self._renewing else ())]:
            await rpc.cancel_and_wait(task)

    def _follow(self, view: control_pb2.FleetView) -> None:
        named = {(w.node_id, w.incarnation): w for w in view.workers}
        for worker in view.workers:
            # A static worker keeps its one link, whoever else names it.
            key = (worker.address, "") if worker.address in self._static else (worker.node_id, worker.incarnation)
            member = self._members.get(key)
            if member is None or member.address != worker.address:
                if member is not None:
                    self._retire(key)
                member = self._endpoint(worker.node_id, worker.address, incarnation=worker.incarnation)
                self._join(key, member)
            self._inform(member, worker)
            if handle := self._leaving.pop(key, None):
                handle.cancel()
        nodes = {worker.node_id for worker in view.workers}
        for key in [k for k in self._members if k not in named and k[1]]:
            if key[0] in nodes:
                self._retire(key)  # the same node has another incarnation
            elif key not in self._leaving:
                self._leaving[key] = asyncio.get_running_loop().call_later(self._leave_grace_s, self._leave, key)

    def _endpoint(self, node_id: str, address: str, *, incarnation: str = "", asks_model: bool = False) -> Endpoint:
        return Endpoint(
            node_id,
            address,
            gateway_id=self._gateway_id,
            incarnation=incarnation,
            asks_model=asks_model,
            on_dropped=self._on_dropped,
            on_moved=self._moved,
            on_tripped=self._on_tripped,
            rules=self._rules,
        )

    def _inform(self, member: Endpoint, worker: control_pb2.FleetWorker) -> None:
        """What the control plane says of it."""
        self._has_model(member, worker.model)
        was = member.serving
        member.model, member.max_model_len, member.pool = worker.model, worker.limits.max_model_len, worker.pool
        member.weight = worker.weight if worker.HasField("weight") else 1.0
        member.node_state, member.isolates = codec.decode_state(worker.state), self._isolates(worker.pool)
        if worker.HasField("breaker"):
            notice = worker.breaker
            if notice.gateway_id != self._gateway_id and notice.open_ms:
                member.guard.foreign(notice.trip, f"gateway {notice.gateway_id}: {notice.because}")
            forced = None
            if notice.forced:
                until = time.monotonic() * 1000.0 + notice.forced_ms
                forced = breaking.Forced(notice.forced == control_pb2.BREAKER_FORCE_CLOSED, until)
            member.guard.force(forced)
        else:
            member.guard.force(None)
        if member.serving and not was:
            self._moved(member)

    async def _renew(self, generation: int) -> None:
        """For ever."""
        while True:
            await rpc.renewal(generation)
            generation = rpc.generation()
            for key, member in list(self._members.items()):
                if member.state is LinkState.UP:  # one that is down takes the new certificate by itself
                    self._succeed(key, member)

    def _succeed(self, key: Key, member: Endpoint) -> None:
        """A second link to the same worker."""
        self._abandon(key)
        static = not key[1]
        successor = self._endpoint(member.node_id, member.address, incarnation=member.incarnation, asks_model=static)
        successor.guard = member.guard
        self._successors[key] = successor
        self._run(successor)

    def _take_over(self, key: Key, successor: Endpoint) -> None:
        """It is up: from now on it is the worker."""
        del self._successors[key]
        self._unrenewed.discard(key)
        old = self._members[key]
        _inherit(successor, old)
        self._members[key] = successor
        if old in self._models_of:
            self._models_of[successor] = self._models_of.pop(old)
        self._by_model.clear()
        log.info("link renewed", worker=old.node_id, address=old.address, open=old.open_requests)
        self._end(old)

    def _not_yet(self, key: Key, successor: Endpoint) -> None:
        """It could not connect, and tries again; the link that there is serves on."""
        if key not in self._unrenewed:
            self._unrenewed.add(key)
            log.warning("link stays with its old certificate", worker=successor.node_id, because=successor.why_down)

    def _abandon(self, key: Key) -> None:
        self._unrenewed.discard(key)
        if successor := self._successors.pop(key, None):
            self._end(successor)

    def _moved(self, member: Endpoint) -> None:
        if self._successors and (key := next((k for k, s in self._successors.items() if s is member), None)):
            if member.state is not LinkState.UP:
                self._not_yet(key, member)
                return
            self._take_over(key, member)
        if not member.retiring:
            self._has_model(member, member.model)  # a static worker has told it
        self._on_moved(member)

    def _has_model(self, member: Endpoint, model: str) -> None:
        before = self._models_of.get(member)
        if before != model:
            if before:
                self._left.add(before, time.monotonic())
            self._models_of[member] = model
            self._by_model.clear()

    def _leave(self, key: Key) -> None:
        """Its time is over. A view that nobody has kept up to date since it came proves nothing: the next one decides."""
        del self._leaving[key]
        if not self.control_connected():
            return
        self._retire(key)
        self._store(self._view)

    def _join(self, key: Key, member: Endpoint) -> None:
        self._members[key] = member
        member.life, self._joined = self._joined * LIVES, self._joined + 1
        self._by_model.clear()
        self._run(member)

    def _run(self, member: Endpoint) -> None:
        task = asyncio.create_task(member.run(), name=f"link {member.node_id}")
        self._tasks[member] = task
        task.add_done_callback(lambda _: self._tasks.pop(member, None))

    def _retire(self, key: Key) -> None:
        if handle := self._leaving.pop(key, None):
            handle.cancel()
        self._abandon(key)
        member = self._members.pop(key)
        self._by_model.clear()
        if model := self._models_of.pop(member, ""):
            self._left.add(model, time.monotonic())
        log.info("worker left", worker=member.node_id, address=member.address, open=member.open_requests)
        self._end(member)

    def _end(self, member: Endpoint) -> None:
        """With the last request on it."""
        member.retiring = True
        member.tell_wants(0)  # nothing more goes there
        task = asyncio.create_task(self._let_go(member), name=f"retire {member.node_id}")
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _let_go(self, member: Endpoint) -> None:
        await member.until_idle()
        if task := self._tasks.get(member):
            await rpc.cancel_and_wait(task)

    def _store(self, view: control_pb2.FleetView) -> None:
        """Whom to reach, not how they were: states are stale by the time this is read, and each link tells the truth. Not while somebody who
        is gone from the view keeps his place.
        """
        if self._leaving or self.census.falling:
            return
        kept = control_pb2.FleetView(workers=view.workers, gateways=view.gateways)
        for worker in kept.workers:
            worker.state = control_pb2.NODE_STATE_SERVING
            worker.ClearField("breaker")
            worker.ClearField("weight")
        data = kept.SerializeToString(deterministic=True)
        if self._cache is None or data == self._seen:
            return
        try:
            write_atomically(self._cache, data)
            self._seen = data
        except OSError as e:
            log.warning("fleet view not stored on disk", path=str(self._cache), error=str(e))

    def _load(self) -> control_pb2.FleetView | None:
        if self._cache is None or not self._cache.is_file():
            return None
        try:
            return control_pb2.FleetView.FromString(self._cache.read_bytes())
        except (OSError, DecodeError) as e:
            log.warning("fleet view on disk can't be read", path=str(self._cache), error=str(e))
            return None


def _inherit(successor: Endpoint, old: Endpoint) -> None:
    """It is the same worker: what is known of it stays so, and what routing remembers of it too."""
    successor.model, successor.max_model_len, successor.pool = old.model, old.max_model_len, old.pool
    successor.weight, successor.isolates, successor.node_state = old.weight, old.isolates, old.node_state
    successor.life = old.life


def _state(e: Endpoint) -> str:
    if e.state is not LinkState.UP:
        return f"no link: {e.why_down}"
    if e.hung or e.draining:
        return "hung" if e.hung else "draining"
    phase = e.guard.state.phase
    if e.node_state is NodeState.SERVING and phase is not breaking.Phase.CLOSED:
        return f"breaker {phase}: {e.guard.state.because}"
    return e.node_state.value
