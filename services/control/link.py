"""A node's side of the control stream, for workers and gateways alike.

The link opens a session with one control plane replica after another until one answers, and does so for ever: a node runs on without it.
Handlers never hold up the stream: pushes are handled one at a time outside it, newest first, and an apply that has begun is never cut off
by a lost session; its answer goes out in the next one. A new session starts with what the node holds, so nothing needs replaying.
Once the node's certificate was renewed the session moves to a connection that shows the new one; the old one ends when the replica has
answered on the other, so that the node is never away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from trimtab.codec import decode_snapshot
from trimtab.errors import PolicyRefused
from trimtab.kit.rpc import cancel_and_wait, channel, generation, renewal, tls_fault
from trimtab.kit.tls import RENEW_S, CertificateError, Tls
from trimtab.snapshot import Snapshot
from trimtab.v1 import control_pb2, control_pb2_grpc

log = structlog.get_logger(__name__)

BACKOFF_S = (0.1, 2.0)
CONNECT_S = 3.0
"""A replica that has not answered Hello by then is passed over."""
MOVE_S = 1.5
"""The same for a stream that is to replace one that works: nothing is said meanwhile, and a node that is silent for 2.5 s is taken for lost."""
STEADY_S = 2.0
"""A session that lived this long was a good one: the next attempt is not delayed by earlier failures."""
PARTING_S = 0.1
"""Between the last message and the stream's end: a stream that is cut takes what is still on its way with it."""
MAX_PENDING = 64
"""Events and answers kept for a control plane that is away; the newest stay."""

Call = grpc.aio.StreamStreamCall[control_pb2.ConnectRequest, control_pb2.ConnectResponse]
OnPush = Callable[[Snapshot, int, str], Awaitable[control_pb2.PolicyResult | None]]
OnFleet = Callable[[control_pb2.FleetView], None]
OnCommand = Callable[[control_pb2.Command], Awaitable[control_pb2.CommandResult | None]]


@dataclass(slots=True, eq=False)
class _Wire:
    """One stream and its channel."""

    link: grpc.aio.Channel
    call: Call
    generation: int
    """Of the certificate that it was opened with."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Who says something here, or moves elsewhere."""
    moving: bool = False

    async def close(self) -> None:
        # Leaving the call's iterator does not end it (ECOSYSTEM §2).
        self.call.cancel()
        await self.link.close()


class ControlLink:
    """`hello` and `report` are asked anew each time. `on_push` gets (snapshot, sent_unix_ms, traceparent) and answers what became of it;
    what it raises is answered as a refusal. `on_fleet` gets each view as it comes;
    the first ones after a control plane's start are partial. `on_command` answers None for what it does not know.
    `on_unsent` is told that the report asked for last has not left, so that its figures can go into the next one. `tls` is for a process
    that is several nodes; one node's is the process's.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: Callable[[], control_pb2.Hello],
        report: Callable[[], control_pb2.Report],
        *,
        on_push: OnPush,
        on_fleet: OnFleet | None = None,
        on_command: OnCommand | None = None,
        on_unsent: Callable[[], None] | None = None,
        report_interval_s: float = 0.8,
        tls: Tls | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("the control link needs at least one address")
        self._addresses = tuple(addresses)
        self._hello = hello
        self._report = report
        self._on_push = on_push
        self._on_fleet = on_fleet
        self._on_command = on_command
        self._on_unsent = on_unsent
        self._report_interval_s = report_interval_s
        self._tls = tls
        self._sequence = 0
        self._next_report = 0.0
        """Of the loop's clock."""
        self._sessions = 0
        self._outbox: deque[control_pb2.ConnectRequest] = deque(maxlen=MAX_PENDING)
        self._due = asyncio.Event()
        self._said = asyncio.Event()
        self._push: control_pb2.PolicyPush | None = None
        self._pushed = asyncio.Event()
        self._commands: set[asyncio.Task[None]] = set()
        self.connected = False
        """Whether a replica has answered Hello and the session lives."""

    def send_event(self, event: control_pb2.NodeEvent) -> None:
        """At once when connected, else at the next session's start; the oldest go when too many wait."""
        self._send(control_pb2.ConnectRequest(node_event=event))

    def report_soon(self) -> None:
        """The next report goes out at once, behind the events before it: they say something that it has to agree with."""
        self._next_report = 0.0
        self._due.set()

    async def said(self, within_s: float) -> None:
        """Once all that was to be sent has left this process, or the time is over: for one that ends. At once while nobody listens."""
        if not self.connected:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._said.wait()
            await asyncio.sleep(min(within_s, PARTING_S))

    async def run(self) -> None:
        """Until cancelled."""
        pusher = asyncio.create_task(self._handle_pushes())
        try:
            await self._stay_connected()
        finally:
            await cancel_and_wait(pusher)
            for task in list(self._commands):
                await cancel_and_wait(task)

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        attempt, wait_s, said = random.randrange(len(self._addresses)), BACKOFF_S[0], ""
        while True:
            address = self._addresses[attempt % len(self._addresses)]
            began, opened = loop.time(), self._sessions
            because = await self._session(address)
            attempt += 1
            if loop.time() - began >= STEADY_S:
                wait_s = BACKOFF_S[0]
            if because != said or self._sessions > opened:
                log.warning("control plane away", control=address, because=because)
                said = because
            await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _session(self, address: str) -> str:
        """One session, from Hello to its end, and why it ended. It may move from one stream to another on its way."""
        wire: _Wire | None = None
        try:
            wire = await self._open(address, CONNECT_S)
            log.info("control plane connected", control=address)
            self._sessions += 1
            self.connected = True
            while True:
                found = await self._talk(wire, address)
                if isinstance(found, str):
                    return found
                await wire.close()
                wire = found
                log.info("control stream moved to a renewed certificate", control=address)
        except (CertificateError, grpc.aio.AioRpcError, TimeoutError) as e:
            return self._why(e)
        finally:
            self.connected = False
            if wire is not None:
                await wire.close()

    async def _open(self, address: str, within_s: float) -> _Wire:
        """A stream whose Hello is answered. CertificateError for certificates that are just being renewed, or that somebody took away;
        AioRpcError, TimeoutError.
        """
        now = generation(self._tls)
        link = channel(address, "control", tls=self._tls)
        wire = _Wire(link, control_pb2_grpc.ControlServiceStub(link).Connect(), now)
        try:
            async with asyncio.timeout(within_s):
                await wire.call.write(control_pb2.ConnectRequest(hello=self._hello()))
                # The control plane sends its headers once it has taken the Hello; it may have nothing else to say for hours.
                await wire.call.initial_metadata()
                if wire.call.done():
                    # A refusal has headers too.
                    await wire.call.read()
        except BaseException:
            await wire.close()
            raise
        return wire

    def _why(self, error: Exception) -> str:
        if isinstance(error, grpc.aio.AioRpcError):
            said = error.details() or error.code().name
            return tls_fault(said, "control", tls=self._tls) or said
        return str(error) or "no answer in time"

    async def _talk(self, wire: _Wire, address: str) -> str | _Wire:
        """Both directions, until the stream ends, and why, or until the session has moved to another stream. What breaks in the node's own
        callables is not held back."""
        moved: list[_Wire] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(wire.call))
                mover = tasks.create_task(self._move(wire, address, moved.append))
                work = (tasks.create_task(self._write(wire)), reader, mover)
                await asyncio.wait((reader, mover), return_when=asyncio.FIRST_COMPLETED)
                # The replica ends this stream as soon as it has the other one, which counts: a move under way is seen through.
                async with wire.turn:
                    for task in work:
                        task.cancel()
        except BaseException:
            for each in moved:
                await each.close()
            raise
        return moved[0] if moved else reader.result()

    async def _read(self, call: Call) -> str:
        try:
            async for response in call:
                self._hear(response)
        except grpc.aio.AioRpcError as e:
            return e.details() or e.code().name
        return "the control plane ended the stream"

    async def _move(self, wire: _Wire, address: str, moved: Callable[[_Wire], None]) -> None:
        """To a stream with the certificate that there is then. While that can't be, this one goes on."""
        said = ""
        while True:
            await renewal(wire.generation, tls=self._tls)
            # Nothing is said meanwhile: what goes out on a stream that was replaced is heard by nobody.
            async with wire.turn:
                wire.moving = True
                try:
                    moved(await self._open(address, MOVE_S))
                    return
                except (CertificateError, grpc.aio.AioRpcError, TimeoutError) as e:
                    wire.moving = False
                    because = self._why(e)
            if because != said:
                log.warning("control stream stays with its old certificate", control=address, because=because)
                said = because
            await asyncio.sleep(RENEW_S)

    async def _write(self, wire: _Wire) -> None:
        """Answers and events as they come, a report each interval, the first at once."""
        loop = asyncio.get_running_loop()
        self._next_report = 0.0
        while True:
            async with wire.turn:
                if wire.moving or not await self._wrote_all(wire.call):
                    return
            self._due.clear()
            if not self._outbox:
                timer = loop.call_at(self._next_report, self._due.set)
                await self._due.wait()
                timer.cancel()

    async def _wrote_all(self, call: Call) -> bool:
        while self._outbox:
            message = self._outbox.popleft()
            if not await self._wrote(call, message):
                return False
        self._said.set()
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_report:
            self._next_report = loop.time() + self._report_interval_s
            report = self._report()
            self._sequence += 1
            report.sequence = self._sequence
            return await self._wrote(call, control_pb2.ConnectRequest(report=report))
        return True

    async def _wrote(self, call: Call, message: control_pb2.ConnectRequest) -> bool:
        """False when the call is over; the reader says why. What may not have arrived goes out again in the next session."""
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._keep(message)
            return False
        except asyncio.CancelledError:
            self._keep(message)
            raise
        return True

    def _keep(self, message: control_pb2.ConnectRequest) -> None:
        if message.HasField("report"):
            if self._on_unsent is not None:
                self._on_unsent()
        elif len(self._outbox) < MAX_PENDING:
            self._outbox.appendleft(message)
            self._said.clear()

    def _send(self, message: control_pb2.ConnectRequest) -> None:
        self._outbox.append(message)
        self._said.clear()
        self._due.set()

    def _hear(self, response: control_pb2.ConnectResponse) -> None:
        match response.WhichOneof("event"):
            case "policy_push":
                self._push = response.policy_push
                self._pushed.set()
            case "fleet_view" if self._on_fleet is not None:
                self._on_fleet(response.fleet_view)
            case "command":
                self._begin(response.command)

    async def _handle_pushes(self) -> None:
        while True:
            await self._pushed.wait()
            self._pushed.clear()
            push, self._push = self._push, None
            if push is not None:
                result = await self._take(push)
                if result is not None:
                    result.identity.CopyFrom(push.snapshot.identity)
                    result.traceparent = push.traceparent
                    self._send(control_pb2.ConnectRequest(policy_result=result))

    async def _take(self, push: control_pb2.PolicyPush) -> control_pb2.PolicyResult | None:
        try:
            return await self._on_push(decode_snapshot(push.snapshot), push.sent_unix_ms, push.traceparent)
        except PolicyRefused as e:
            refused = control_pb2.PolicyRefused(reason=e.cause, field=e.field, message=e.message)
        except Exception as e:
            # Whatever broke, the control plane must hear that this node did not take the policy, and the link must live.
            log.exception("policy push failed")
            refused = control_pb2.PolicyRefused(reason="INTERNAL", message=f"{type(e).__name__}: {e}")
        return control_pb2.PolicyResult(refused=refused)

    def _begin(self, command: control_pb2.Command) -> None:
        if self._on_command is None:
            self._send(control_pb2.ConnectRequest(command_result=_not_done(command, "UNSUPPORTED")))
        elif len(self._commands) >= MAX_PENDING:
            self._send(control_pb2.ConnectRequest(command_result=_not_done(command, "OVERLOADED")))
        else:
            task = asyncio.create_task(self._do(self._on_command, command))
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    async def _do(self, on_command: OnCommand, command: control_pb2.Command) -> None:
        try:
            result = await on_command(command)
        except Exception as e:
            log.exception("command failed", command=command.WhichOneof("command"))
            result = control_pb2.CommandResult(ok=False, reason="INTERNAL", message=f"{type(e).__name__}: {e}")
        if result is None:
            result = _not_done(command, "UNSUPPORTED")
        result.command_id = command.command_id
        self._send(control_pb2.ConnectRequest(command_result=result))


def _not_done(command: control_pb2.Command, reason: str) -> control_pb2.CommandResult:
    kind = command.WhichOneof("command") or "this command"
    why = "is not handled by this node" if reason == "UNSUPPORTED" else "came while too many commands were running"
    return control_pb2.CommandResult(command_id=command.command_id, ok=False, reason=reason, message=f"{kind} {why}")
