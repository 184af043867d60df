"""The control stream as the control plane serves it: the newest policy and commands down, answers and telemetry up.

Each stream compares what it has sent with what is newest, and sends the next once the last was answered: whatever a slow node missed is
skipped and nothing queues up for it (commands do, for the seconds that somebody waits for their answers). What nodes say goes into the
fleet; what they hold goes to the replica, which mends a store that is behind them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from controlplane.answers import Answers
from controlplane.breaker_keeper import BreakerKeeper
from controlplane.commands import ask_all
from controlplane.fleet import Fleet, Refusal
from controlplane.gatekeeper import granted
from controlplane.metrics import ControlMetrics
from controlplane.pace import Pace
from controlplane.replica import Replica, unix_ms
from controlplane.store import Answer, Stored
from controlplane.stream import Stream, first_hello
from controlplane.view import GatewayView, Weight
from controlplane.watchdog import watch_fleet
from trimtab import codec
from trimtab.errors import Conflict, Draining, InvalidRequest, PermissionDenied, PolicyRefused, QueueFull, TrimtabError
from trimtab.kit.rpc import cancel_and_wait, guarded
from trimtab.kit.tls import speaks_for
from trimtab.kit.watch import Watch
from trimtab.messages import Hello, Report, Role
from trimtab.snapshot import Identity
from trimtab.v1 import control_pb2, control_pb2_grpc

log = structlog.get_logger(__name__)

MAX_NODES = 20_000
"""Streams at once; each costs memory for as long as it is open."""
MAX_SAID = 2000
"""Characters of a node's own words that are kept."""
AT_ONCE = 25
"""Pushes between two turns of everything else."""
UNANSWERED_S = 10.0
"""Longer than any engine step that is worth waiting for."""
MAX_TRACED = 8
"""Pushes of one change that have spans of their own: enough to see where time goes, few enough for a thousand nodes."""
SAME_MS = 100
"""A push that is so young is sent as it is."""
DIGEST_CLASH = "DIGEST_CLASH"
"""A node's reason for refusing a snapshot whose numbers it holds already, with other content."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """`answers` wakes whoever waits for nodes to answer a push. `on_moved` is called when who is connected here, or its state, changed.
    `run` must be running.
    """

    def __init__(
        self,
        replica: Replica,
        fleet: Fleet,
        metrics: ControlMetrics,
        *,
        forget_s: float = 300.0,
        on_moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_report: Callable[[Hello, Report, control_pb2.Report], None] = lambda hello, report, sent: None
        """Called with each report of a node that is connected here, and with what was sent; set before `run`."""
        self.on_out_of_memory: Callable[[Hello], None] = lambda hello: None
        self._on_moved = on_moved
        self.log = Answers(replica.store)
        self.answers: Watch[None] = Watch(None)
        self._replica = replica
        self._fleet = fleet
        self._metrics = metrics
        self._forget_s = forget_s
        self._streams: dict[int, Stream] = {}
        self._changed_at = time.monotonic()
        self._viewed = 0
        self.breakers = BreakerKeeper(replica.store, self.noticed)
        self._view = GatewayView(fleet, self.breakers.notice)
        self._pushing: tuple[Identity, control_pb2.ConnectResponse] | None = None
        self._traced = 0
        self._behind: dict[int, None] = {}
        self._any_behind = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce())
            tasks.create_task(self._push_behind())
            tasks.create_task(self._give_up_waiting())
            tasks.create_task(self.log.run())
            tasks.create_task(self.breakers.run())
            tasks.create_task(
                watch_fleet(
                    self._fleet,
                    self._replica.store,
                    self._metrics,
                    forget_s=self._forget_s,
                    on_lost=self.fleet_changed,
                    on_forgotten=self._forgotten,
                )
            )

    def weigh(self, weight: Weight) -> None:
        """What gateways are told that workers get of new work."""
        self._view.weight = weight

    def close(self) -> None:
        """End every stream, so that nodes look for another replica."""
        for stream in self._streams.values():
            stream.end(Draining("this control plane stops"))

    async def command(
        self, command: control_pb2.Command, *, within_s: float, only: frozenset[str] = frozenset()
    ) -> dict[str, control_pb2.CommandResult]:
        """What became of it at every worker whose stream is open, or at those of `only`, by node id; what has not answered in time says so
        too."""
        calls = {
            s.hello.node.node_id: s.calls
            for s in self._streams.values()
            if s.hello.role is Role.WORKER
            and self._fleet.current(s.session) is not None
            and (not only or s.hello.node.node_id in only)
        }
        return await ask_all(calls, command, within_s=within_s)

    async def command_one(
        self, node_id: str, command: control_pb2.Command, *, within_s: float
    ) -> control_pb2.CommandResult | None:
        """What became of it at this one; None where it is not connected to this replica."""
        member = self._fleet.member(node_id)
        stream = self._streams.get(member.session) if member is not None and not member.replica else None
        if stream is None:
            return None
        return (await ask_all({node_id: stream.calls}, command, within_s=within_s))[node_id]

    async def _announce(self) -> None:
        async for stored in self._replica.newest.follow():
            if stored is None:
                continue
            self._changed_at = time.monotonic()
            self._metrics.epoch.set(stored.identity.epoch)
            self._metrics.revision.set(stored.identity.revision)
            self._behind.update(dict.fromkeys(s.session for s in self._streams.values() if self._wants(s)))
            self._any_behind.set()

    def _wants(self, stream: Stream) -> bool:
        """It has answered all that it was sent, and there is something newer."""
        stored = self._replica.newest.value
        return stream.open and stream.awaiting is None and stored is not None and stored.identity > stream.pushed

    async def _push_behind(self) -> None:
        """Wakes those that are behind, a few at a time, so that calls are answered in between."""
        pace = Pace()
        while True:
            await self._any_behind.wait()
            self._any_behind.clear()
            while self._behind:
                sessions = list(itertools.islice(self._behind, AT_ONCE))
                for session in sessions:
                    del self._behind[session]
                    if session in self._streams:
                        self._streams[session].due.set(None)
                await asyncio.sleep(pace.took(len(sessions), time.monotonic()))

    async def _give_up_waiting(self) -> None:
        """A node that answers no push for long gets the next one all the same: its answer may come never."""
        while True:
            await asyncio.sleep(UNANSWERED_S / 5)
            long_ago = time.monotonic() - UNANSWERED_S
            for stream in self._streams.values():
                if stream.awaiting is not None and stream.awaiting_since < long_ago:
                    stream.awaiting = None
                    if self._wants(stream):
                        self._behind[stream.session] = None
            if self._behind:
                self._any_behind.set()

    def fleet_changed(self) -> None:
        """Somebody joined or was lost, here or at another replica."""
        self._on_moved()
        self.answers.set(None)
        self._publish()

    def noticed(self) -> None:
        """Gateways are to be told something else of workers."""
        self._fleet.touched()
        self._publish()

    def _forgotten(self, session: int) -> None:
        if session in self._streams:
            self._streams[session].end(Conflict("the node was silent for too long; connect again"))

    def _publish(self) -> None:
        """Wake gateways when their view changed."""
        if self._fleet.version != self._viewed:
            self._viewed = self._fleet.version
            self._on_moved()
            for stream in self._streams.values():
                if stream.hello.role is Role.GATEWAY:
                    stream.due.set(None)

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[control_pb2.ConnectResponse]:
        async with guarded(context):
            requests = aiter(request_iterator)
            hello = await first_hello(requests)
            caller = granted().caller
            if not speaks_for(caller, hello.role.value, hello.node.node_id):
                words = f"{caller.kind} {caller.name!r} is not {hello.role.value} {hello.node.node_id!r}: the certificate names another node"
                log.warning("denied", method="Connect", identity=caller.name, kind=caller.kind, node=hello.node.node_id)
                self._metrics.denied.labels("Connect").inc()
                raise PermissionDenied(words)
            if self._fleet.member(hello.node.node_id) is None and len(self._streams) >= MAX_NODES:
                raise QueueFull(f"this control plane has {MAX_NODES} nodes; connect to another replica")
            stream = self._join(hello)
            reader = asyncio.create_task(self._read(stream, requests))
            try:
                # The node takes this as "connected"; a session may have nothing else to say for hours.
                await context.send_initial_metadata(())
                async for response in self._responses(stream):
                    yield response
                if stream.because is not None:
                    raise stream.because
                if reader.done():
                    reader.result()
            finally:
                try:
                    await cancel_and_wait(reader)
                finally:
                    self._leave(stream)

    def _join(self, hello: Hello) -> Stream:
        session, replaced = self._fleet.joined(hello, time.monotonic())
        stream = Stream(hello, session)
        self._streams[session] = stream
        old = self._streams.get(replaced) if replaced is not None else None
        if old is not None:
            twice = "" if old.hello.incarnation == hello.incarnation else "; if both run, give each its own --node-id"
            old.end(Conflict(f"another stream of node {hello.node.node_id} replaced this one{twice}"))
        log.info(
            "node joined", node=hello.node.node_id, incarnation=hello.incarnation, role=hello.role.value, address=hello.address,
            holds=str(hello.held) if hello.held.epoch else "none", replaced=old.hello.incarnation if old else None,
        )  # fmt: skip
        self._replica.seen(hello.held, hello.node.node_id)
        self.fleet_changed()
        return stream

    def _leave(self, stream: Stream) -> None:
        stream.close_push("lost")
        stream.calls.close()
        del self._streams[stream.session]
        if self._fleet.current(stream.session) is not None:
            log.info("node left", node=stream.hello.node.node_id, incarnation=stream.hello.incarnation)
        self._fleet.lost(stream.session, time.monotonic())
        self.fleet_changed()

    async def _responses(self, stream: Stream) -> AsyncIterator[control_pb2.ConnectResponse]:
        """What is newest whenever it is not what was sent last, until the stream ends."""
        async for _ in stream.due.follow():
            if not stream.open:
                return
            for command in stream.calls.unsent():
                yield control_pb2.ConnectResponse(command=command)
            stored = self._replica.newest.value
            if stored is not None and self._wants(stream):
                yield self._push_for(stream, stored)
            if stream.hello.role is Role.GATEWAY and self._fleet.version != stream.viewed:
                view = self._view.now()
                stream.viewed = view.version
                yield control_pb2.ConnectResponse(fleet_view=view)

    def _push_for(self, stream: Stream, stored: Stored) -> control_pb2.ConnectResponse:
        """The first of each change carry spans of their own; all others get the same message, under the put's span."""
        if self._pushing is None or self._pushing[0] != stored.identity:
            push = control_pb2.PolicyPush(
                snapshot=codec.encode_snapshot(stored.snapshot), sent_unix_ms=unix_ms(), traceparent=stored.traceparent
            )
            self._pushing = (stored.identity, control_pb2.ConnectResponse(policy_push=push))
            self._traced = 0
        traced = self._traced < MAX_TRACED
        self._traced += traced
        parent = stream.begin_push(stored, traced=traced)
        whole = self._pushing[1]
        # A node counts expiry from when this was sent to it.
        if not traced and unix_ms() - whole.policy_push.sent_unix_ms < SAME_MS:
            return whole
        response = control_pb2.ConnectResponse()
        response.CopyFrom(whole)
        response.policy_push.sent_unix_ms, response.policy_push.traceparent = unix_ms(), parent
        return response

    async def _read(self, stream: Stream, requests: AsyncIterator[control_pb2.ConnectRequest]) -> None:
        error: TrimtabError | None = None
        try:
            async for request in requests:
                self._hear(stream, request)
        except TrimtabError as e:
            error = e
        finally:
            stream.end(error)

    def _hear(self, stream: Stream, request: control_pb2.ConnectRequest) -> None:
        now = time.monotonic()
        match request.WhichOneof("event"):
            case "report":
                report = codec.decode_report(request.report)
                self._fleet.reported(stream.session, dataclasses.replace(report, sketches={}, outliers=()), now)
                if self._fleet.current(stream.session) is not None:
                    self.on_report(stream.hello, report, request.report)
            case "policy_result":
                self._fleet.heard(stream.session, now)
                self._answered(stream, request.policy_result, now)
            case "command_result" if stream.calls.answered(request.command_result):
                # Whoever asked says what came of it.
                self._fleet.heard(stream.session, now)
            case "hello":
                raise InvalidRequest("Hello comes once, as the first message of a stream")
            case kind:
                self._fleet.heard(stream.session, now)
                if kind is not None and self._fleet.current(stream.session) is not None:
                    said = str(getattr(request, kind)).replace("\n", " ").strip()[:MAX_SAID]
                    log.info(kind.replace("_", " "), node=stream.hello.node.node_id, said=said)
                    self._happened(stream, request.node_event)
        self._publish()

    def _happened(self, stream: Stream, event: control_pb2.NodeEvent) -> None:
        match event.WhichOneof("event"):
            case "breaker_tripped" if stream.hello.role is Role.GATEWAY:
                trip = event.breaker_tripped
                worker = self._fleet.member(trip.node_id)
                # One that is gone, or runs anew, is not blamed for what another process did.
                if worker is not None and worker.hello.incarnation == trip.incarnation:
                    said = (trip.dimension, trip.open_ms, trip.because)
                    self.breakers.tripped(stream.hello.node.node_id, trip.node_id, trip.incarnation, *said)
                    self._metrics.tripped(trip.dimension)
            case "drain_begun":
                self._fleet.draining(stream.session)
            case "limits_changed":
                changed = self._fleet.limits_changed(stream.session, codec.decode_limits(event.limits_changed.limits))
                stream.hello = changed or stream.hello
            case "engine_died" if event.engine_died.out_of_memory:
                self.on_out_of_memory(stream.hello)

    def _answered(self, stream: Stream, result: control_pb2.PolicyResult, now: float) -> None:
        """One node's answer to one push: into the fleet, the trace, the metrics and the log."""
        identity, kind = codec.decode_identity(result.identity), result.WhichOneof("result")
        node_id, member = stream.hello.node.node_id, self._fleet.current(stream.session)
        if kind is None or member is None:
            return
        said: dict[str, Any] = {}
        match kind:
            case "applied":
                apply_ms = result.applied.apply_ms
                said = {"apply_ms": round(apply_ms, 3), "step": result.applied.step_no}
                self._fleet.applied(stream.session, identity, apply_ms)
                self._replica.seen(identity, node_id)
                stream.applied(identity, apply_ms, now)
                if stream.answered(identity, kind) and member.hello.role is Role.WORKER:
                    self._metrics.convergence.observe(now - max(self._changed_at, member.joined_at))
            case "refused":
                r = result.refused
                for name in ("reason", "field", "message"):
                    setattr(r, name, getattr(r, name)[:MAX_SAID])
                said = {"reason": r.reason, "field": r.field, "because": r.message}
                self._fleet.refused(stream.session, Refusal(identity, r.reason, r.field, r.message))
                if r.reason == DIGEST_CLASH:
                    # Other bytes in the same place: only a higher epoch gets past both.
                    self._replica.seen(dataclasses.replace(identity, sha256=b""), node_id)
                stream.answered(identity, kind, refused=PolicyRefused(r.message), cause=r.reason)
            case "ignored_holding":
                held = codec.decode_identity(result.ignored_holding)
                said = {"holds": str(held)}
                self._fleet.applied(stream.session, held, 0.0)
                self._replica.seen(held, node_id)
                stream.answered(identity, kind)
        if self._wants(stream):
            self._behind[stream.session] = None
            self._any_behind.set()
        self._metrics.results.labels(kind).inc()
        why = (result.refused.reason, result.refused.message) if kind == "refused" else ("", "")
        self.log.add(
            Answer(
                node_id, stream.hello.incarnation, identity, kind, unix_ms(), round(result.applied.apply_ms, 3), *why
            )
        )
        if kind == "refused" or self._traced < MAX_TRACED:
            # Refusals are news; a thousand nodes that applied are a figure, and one by one in `trimtab why`.
            trace_id = result.traceparent[3:35]
            log.info("policy answer", node=node_id, identity=str(identity), result=kind, trace_id=trace_id, **said)
        self.answers.set(None)
