"""The workers that this gateway knows: named by the control plane's FleetView, or static.

Losing the control plane freezes membership; the last view is on disk, so a gateway that starts without one serves. A worker that is gone from
the view gets no new requests, and what runs there goes on. Identity is the incarnation, not the address: a restarted worker is a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from services.gateway.endpoint import Endpoint, LinkState
from trimtab import codec
from trimtab.kit import rpc
from trimtab.kit.process import write_atomically
from trimtab.routing import Candidate
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)

LEAVE_GRACE_S = 5.0
"""A worker absent from a view for less than this keeps its place: after a restart of the control plane the view fills again one by one."""

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
        leave_grace_s: float = LEAVE_GRACE_S,
    ) -> None:
        self._gateway_id = gateway_id
        self._static = static
        self._cache = cache
        self._on_dropped = on_dropped
        self._leave_grace_s = leave_grace_s
        self._members: dict[Key, Endpoint] = {}
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._leaving: dict[Key, asyncio.TimerHandle] = {}
        self._retirements: set[asyncio.Task[None]] = set()
        self._seen = b""
        self._view = control_pb2.FleetView()
        self.control_connected: Callable[[], bool] = lambda: True
        """Whether the newest view is still kept up to date; while it is not, nobody leaves."""

    def start(self) -> None:
        for address in self._static:
            self._join((address, ""), Endpoint(
                address, address, gateway_id=self._gateway_id, asks_model=True, on_dropped=self._on_dropped
            ))  # fmt: skip
        view = self._load()
        if view is not None:
            log.info("fleet view loaded from disk", workers=len(view.workers))
            self._follow(view)

    def on_fleet(self, view: control_pb2.FleetView) -> None:
        """Take the newest view."""
        self._follow(view)
        self._view = view
        if not self._leaving:
            self._store(view)

    def get(self, node_id: str) -> Endpoint:
        return next(e for e in self._members.values() if e.node_id == node_id)

    def candidates(self) -> list[Candidate]:
        """Every member that has told its model; those that can't take work now are marked so."""
        return [
            Candidate(e.node_id, e.model, e.serving, e.load, e.open_requests) for e in self._members.values() if e.model
        ]

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
        for handle in self._leaving.values():
            handle.cancel()
        for task in [*self._retirements, *self._tasks.values()]:
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
                member = Endpoint(
                    worker.node_id, worker.address, gateway_id=self._gateway_id, on_dropped=self._on_dropped
                )
                self._join(key, member)
            member.model, member.max_model_len = worker.model, worker.limits.max_model_len
            member.node_state = codec.decode_state(worker.state)
            if handle := self._leaving.pop(key, None):
                handle.cancel()
        nodes = {worker.node_id for worker in view.workers}
        for key in [k for k in self._members if k not in named and k[1]]:
            if key[0] in nodes:
                self._retire(key)  # the same node has another incarnation
            elif key not in self._leaving:
                self._leaving[key] = asyncio.get_running_loop().call_later(self._leave_grace_s, self._leave, key)

    def _leave(self, key: Key) -> None:
        """Its time is over. A view that nobody has kept up to date since it came proves nothing: the next one decides."""
        del self._leaving[key]
        if not self.control_connected():
            return
        self._retire(key)
        if not self._leaving:
            self._store(self._view)

    def _join(self, key: Key, member: Endpoint) -> None:
        self._members[key] = member
        task = asyncio.create_task(member.run(), name=f"link {member.node_id}")
        self._tasks[member] = task
        task.add_done_callback(lambda _: self._tasks.pop(member, None))

    def _retire(self, key: Key) -> None:
        if handle := self._leaving.pop(key, None):
            handle.cancel()
        member = self._members.pop(key)
        log.info("worker left", worker=member.node_id, address=member.address, open=member.open_requests)
        member.retiring = True
        task = asyncio.create_task(self._let_go(member), name=f"retire {member.node_id}")
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _let_go(self, member: Endpoint) -> None:
        await member.until_idle()
        if task := self._tasks.get(member):
            await rpc.cancel_and_wait(task)

    def _store(self, view: control_pb2.FleetView) -> None:
        """Whom to reach, not how they were: states are stale by the time this is read, and each link tells the truth."""
        kept = control_pb2.FleetView(workers=view.workers)
        for worker in kept.workers:
            worker.state = control_pb2.NODE_STATE_SERVING
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


def _state(e: Endpoint) -> str:
    if e.state is not LinkState.UP:
        return f"no link: {e.why_down}"
    return e.node_state.value
