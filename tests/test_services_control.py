"""A node's side of the control stream, against a server that says what the test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.control.link import MAX_PENDING, ControlLink
from tests.controlplane.mesh import PATIENCE_S, a_snapshot
from trimtab import codec
from trimtab.errors import PolicyRefused
from trimtab.kit.process import free_port
from trimtab.kit.rpc import SERVER_OPTIONS, bind, cancel_and_wait
from trimtab.snapshot import Snapshot
from trimtab.v1 import control_pb2, control_pb2_grpc


class Script(control_pb2_grpc.ControlServiceServicer):
    """Keeps what nodes say, by kind, and says what the test puts in `down`."""

    def __init__(self) -> None:
        self.down: asyncio.Queue[control_pb2.ConnectResponse] = asyncio.Queue()
        self.heard: dict[str, asyncio.Queue[Any]] = {
            kind: asyncio.Queue() for kind in ("hello", "report", "policy_result", "node_event", "command_result")
        }

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[control_pb2.ConnectResponse]:
        await context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self.down.get()
        finally:
            await cancel_and_wait(reader)

    async def _read(self, requests: AsyncIterator[control_pb2.ConnectRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("event") or ""
            self.heard[kind].put_nowait(getattr(request, kind))

    async def next(self, kind: str) -> Any:
        return await asyncio.wait_for(self.heard[kind].get(), PATIENCE_S)


class Served:
    """The script on a socket; `stop` cuts every stream, `start` serves on the same port again."""

    def __init__(self) -> None:
        self.script = Script()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self.script, self._server)
        self.address = f"127.0.0.1:{bind(self._server, self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served()
    await server.start()
    yield server
    await server.stop()


class Node:
    """A link whose handlers wait for `ready`."""

    def __init__(self, *addresses: str, commands: bool = False, interval_s: float = 0.05) -> None:
        self.taken: list[int] = []
        self.raises: Exception | None = None
        self.ready = asyncio.Event()
        self.ready.set()
        self.began = asyncio.Event()
        self.link = ControlLink(
            addresses,
            lambda: control_pb2.Hello(node_id="w0", incarnation="i1", role=control_pb2.ROLE_WORKER),
            lambda: control_pb2.Report(state=control_pb2.NODE_STATE_SERVING),
            on_push=self._on_push,
            on_command=self._on_command if commands else None,
            report_interval_s=interval_s,
        )

    async def _on_push(self, snapshot: Snapshot, sent_unix_ms: int, traceparent: str) -> control_pb2.PolicyResult:
        self.began.set()
        await self.ready.wait()
        if self.raises is not None:
            raise self.raises
        self.taken.append(snapshot.identity.revision)
        return control_pb2.PolicyResult(applied=control_pb2.PolicyApplied(step_no=sent_unix_ms))

    async def _on_command(self, command: control_pb2.Command) -> control_pb2.CommandResult | None:
        if command.HasField("resume"):
            return None
        await self.ready.wait()
        return control_pb2.CommandResult(ok=True)

    async def __aenter__(self) -> Node:
        self._task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._task)


def a_push(revision: int, *, broken: bool = False) -> control_pb2.ConnectResponse:
    snapshot = codec.encode_snapshot(a_snapshot(1, revision, batch__active=revision))
    if broken:
        snapshot.document += b"\x00"
    push = control_pb2.PolicyPush(snapshot=snapshot, sent_unix_ms=7, traceparent=f"trace-{revision}")
    return control_pb2.ConnectResponse(policy_push=push)


async def test_a_session_begins_with_hello_and_a_report_and_goes_on_reporting(served: Served) -> None:
    async with Node(served.address) as node:
        assert (await served.script.next("hello")).node_id == "w0"
        assert [(await served.script.next("report")).sequence for _ in range(3)] == [1, 2, 3]
        assert node.link.connected


async def test_a_push_is_answered_with_its_identity_and_trace(served: Served) -> None:
    async with Node(served.address):
        served.script.down.put_nowait(a_push(3))
        result = await served.script.next("policy_result")
        assert result.applied.step_no == 7
        assert codec.decode_identity(result.identity) == a_snapshot(1, 3, batch__active=3).identity
        assert result.traceparent == "trace-3"


async def test_while_an_apply_runs_reports_go_on_and_of_further_pushes_the_newest_is_taken(served: Served) -> None:
    async with Node(served.address) as node:
        node.ready.clear()
        served.script.down.put_nowait(a_push(1))
        await asyncio.wait_for(node.began.wait(), PATIENCE_S)
        for revision in range(2, 6):
            served.script.down.put_nowait(a_push(revision))
        command = control_pb2.Command(command_id="last", drain=control_pb2.DrainCommand())
        served.script.down.put_nowait(control_pb2.ConnectResponse(command=command))
        # The stream is ordered: once the command is answered, every push before it was read.
        assert (await served.script.next("command_result")).command_id == "last"
        assert (await served.script.next("report")).sequence
        node.ready.set()
        assert [(await served.script.next("policy_result")).identity.revision for _ in range(2)] == [1, 5]
        assert node.taken == [1, 5]


async def test_a_snapshot_that_does_not_match_its_digest_is_refused_before_the_handler(served: Served) -> None:
    async with Node(served.address) as node:
        served.script.down.put_nowait(a_push(2, broken=True))
        result = await served.script.next("policy_result")
        assert result.refused.reason == "DIGEST_MISMATCH"
        assert node.taken == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PolicyRefused("no", reason="ABOVE_ENGINE_LIMIT", field="batch.active"), "ABOVE_ENGINE_LIMIT"),
        (OSError("x"), "INTERNAL"),
    ],
)
async def test_what_the_handler_raises_is_a_refusal_and_the_link_lives(
    served: Served, error: Exception, reason: str
) -> None:
    async with Node(served.address) as node:
        node.raises = error
        served.script.down.put_nowait(a_push(2))
        assert (await served.script.next("policy_result")).refused.reason == reason
        node.raises = None
        served.script.down.put_nowait(a_push(3))
        assert (await served.script.next("policy_result")).HasField("applied")


@pytest.mark.parametrize("handled", [True, False])
async def test_a_command_that_nobody_handles_is_answered_so(served: Served, handled: bool) -> None:
    async with Node(served.address, commands=handled):
        command = control_pb2.Command(command_id="c1", resume=control_pb2.ResumeCommand())
        served.script.down.put_nowait(control_pb2.ConnectResponse(command=command))
        result = await served.script.next("command_result")
        assert (result.command_id, result.ok, result.reason) == ("c1", False, "UNSUPPORTED")


async def test_a_slow_command_holds_up_nothing(served: Served) -> None:
    async with Node(served.address, commands=True) as node:
        node.ready.clear()
        for i, event in enumerate(({"drain": control_pb2.DrainCommand()}, {"resume": control_pb2.ResumeCommand()})):
            command = control_pb2.Command(command_id=f"c{i}", **event)
            served.script.down.put_nowait(control_pb2.ConnectResponse(command=command))
        assert (await served.script.next("command_result")).command_id == "c1"
        node.ready.set()
        result = await served.script.next("command_result")
        assert (result.command_id, result.ok) == ("c0", True)


async def test_after_a_cut_the_node_comes_back_and_counts_its_reports_on(served: Served) -> None:
    async with Node(served.address) as node:
        await served.script.next("hello")
        last = (await served.script.next("report")).sequence
        await served.stop()
        # What the first session reported meanwhile does not count for the second one.
        while not served.script.heard["report"].empty():
            last = (await served.script.next("report")).sequence
        await served.start()
        await served.script.next("hello")
        assert (await served.script.next("report")).sequence > last
        async with asyncio.timeout(PATIENCE_S):
            while not node.link.connected:
                await asyncio.sleep(0.005)


async def test_an_apply_that_has_begun_outlives_the_session_and_is_answered_in_the_next(served: Served) -> None:
    async with Node(served.address) as node:
        await served.script.next("hello")
        node.ready.clear()
        served.script.down.put_nowait(a_push(4))
        await asyncio.wait_for(node.began.wait(), PATIENCE_S)
        await served.stop()
        node.ready.set()
        await served.start()
        assert (await served.script.next("policy_result")).identity.revision == 4
        assert node.taken == [4]


async def test_a_replica_that_is_away_is_passed_over(served: Served) -> None:
    async with Node(f"127.0.0.1:{free_port()}", served.address):
        await served.script.next("hello")


async def test_events_that_wait_for_a_session_are_bounded_and_the_newest_kept(served: Served) -> None:
    node = Node(served.address)
    for i in range(MAX_PENDING + 5):
        node.link.send_event(control_pb2.NodeEvent(drain_begun=control_pb2.DrainBegun(deadline_ms=i)))
    async with node:
        heard = [(await served.script.next("node_event")).drain_begun.deadline_ms for _ in range(MAX_PENDING)]
    assert heard == list(range(5, MAX_PENDING + 5))


async def test_a_report_that_is_wanted_soon_goes_out_at_once_behind_the_event(served: Served) -> None:
    async with Node(served.address, interval_s=3600.0) as node:
        assert (await served.script.next("report")).sequence == 1
        node.link.send_event(control_pb2.NodeEvent(limits_changed=control_pb2.LimitsChanged()))
        node.link.report_soon()
        assert (await served.script.next("report")).sequence == 2
        assert served.script.heard["node_event"].get_nowait().HasField("limits_changed"), "it came before"


async def test_a_stopped_link_leaves_no_session_behind(served: Served) -> None:
    async with Node(served.address, interval_s=0.01) as node:
        await served.script.next("report")
    assert not node.link.connected


async def test_a_report_that_could_not_leave_is_said_to_be_unsent(served: Served) -> None:
    """Its figures go into the next one."""
    node, unsent = Node(served.address), 0

    def on_unsent() -> None:
        nonlocal unsent
        unsent += 1

    class Broken:
        async def write(self, message: control_pb2.ConnectRequest) -> None:
            raise asyncio.InvalidStateError

    node.link._on_unsent = on_unsent
    assert not await node.link._wrote_all(Broken())  # type: ignore[arg-type]
    assert unsent == 1
    node.link.send_event(control_pb2.NodeEvent(drain_begun=control_pb2.DrainBegun(deadline_ms=1)))
    assert not await node.link._wrote_all(Broken())  # type: ignore[arg-type]
    assert unsent == 1
    async with node:
        assert (await served.script.next("node_event")).drain_begun.deadline_ms == 1
        await served.script.next("report")
    assert unsent == 1


async def test_a_link_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Node()


async def test_a_broken_report_is_not_held_back(served: Served) -> None:
    node = Node(served.address)

    def broken() -> control_pb2.Report:
        raise ZeroDivisionError

    node.link._report = broken
    running = asyncio.create_task(node.link.run())
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, PATIENCE_S)
    assert caught.group_contains(ZeroDivisionError)
