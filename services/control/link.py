"""A node's side of the control stream, for workers and gateways alike.

The link opens a session with one control plane replica after another until one answers, and does so for ever: a node runs on without it.
Handlers never hold up the stream: pushes are handled one at a time outside it, newest first, and an apply that has begun is never cut off
by a lost session; its answer goes out in the next one. A new session starts with what the node holds, so nothing needs replaying.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog

from trimtab.codec import decode_snapshot
from trimtab.errors import PolicyRefused
from trimtab.kit.rpc import cancel_and_wait, channel, tls_fault
from trimtab.kit.tls import CertificateError, Tls
from trimtab.snapshot import Snapshot
from trimtab.v1 import control_pb2, control_pb2_grpc

log = structlog.get_logger(__name__)

BACKOFF_S = (0.1, 2.0)
CONNECT_S = 3.0
"""A replica that has not answered Hello by then is passed over."""
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
        """One stream, from Hello to its end, and why it ended."""
        try:
            opened = channel(address, "control", tls=self._tls)
        except CertificateError as e:
            # Certificates that are just being renewed, or that somebody took away.
            return str(e)
        async with opened as link:
            call = control_pb2_grpc.ControlServiceStub(link).Connect()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await call.write(control_pb2.ConnectRequest(hello=self._hello()))
                    # The control plane sends its headers once it has taken the Hello; it may have nothing else to say for hours.
                    await call.initial_metadata()
                    if call.done():
                        # A refusal has headers too.
                        await call.read()
                log.info("control plane connected", control=address)
                self._sessions += 1
                self.connected = True
                return await self._talk(call)
            except grpc.aio.AioRpcError as e:
                said = e.details() or e.code().name
                return tls_fault(said, "control", tls=self._tls) or said
            except TimeoutError:
                return f"no answer within {CONNECT_S:.0f} s"
            finally:
                self.connected = False
                # Leaving the call's iterator does not end it (ECOSYSTEM §2).
                call.cancel()

    async def _talk(self, call: Call) -> str:
        """Both directions, until the stream ends. What breaks in the node's own callables is not held back."""
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(self._write(call))
            try:
                async for response in call:
                    self._hear(response)
                because = "the control plane ended the stream"
            except grpc.aio.AioRpcError as e:
                because = e.details() or e.code().name
            writer.cancel()
        return because

    async def _write(self, call: Call) -> None:
        """Answers and events as they come, a report each interval, the first at once."""
        loop = asyncio.get_running_loop()
        next_report = loop.time()
        while True:
            while self._outbox:
                message = self._outbox.popleft()
                if not await self._wrote(call, message):
                    return
            self._said.set()
            if loop.time() >= next_report:
                next_report = loop.time() + self._report_interval_s
                report = self._report()
                self._sequence += 1
                report.sequence = self._sequence
                if not await self._wrote(call, control_pb2.ConnectRequest(report=report)):
                    return
            self._due.clear()
            if not self._outbox:
                timer = loop.call_at(next_report, self._due.set)
                await self._due.wait()
                timer.cancel()

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
