"""What a broken or hostile peer sends: it is refused with the right code, and everybody else is served on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from controlplane.claims import HIGHEST
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.kit.rpc import MAX_MESSAGE_BYTES, channel
from trimtab.v1 import admin_pb2, control_pb2, policy_pb2

CONNECT = "/trimtab.v1.ControlService/Connect"
ADMIN = [m.name for m in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods]
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,  # gRPC's own word for a message that can't be decoded
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
}


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with a_mesh() as made:
        await made.start_node(FakeNode(made.address, "good")).holds(1, 1)
        yield made


@pytest.fixture
async def link(mesh: Mesh) -> AsyncIterator[grpc.aio.Channel]:
    async with channel(mesh.address, "control") as opened:
        yield opened


async def well(mesh: Mesh) -> None:
    """The mesh serves, and its node takes changes."""
    answer = await mesh.admin.set_policy({"batch.active": "9"}, author="ada", wait_ms=10_000)
    assert [n.node_id for n in answer.nodes if n.applied == answer.identity] == ["good"]


async def sent(link: grpc.aio.Channel, *messages: bytes) -> grpc.StatusCode:
    """How the control stream ends on these."""
    call: Any = link.stream_stream(CONNECT)()
    try:
        async with asyncio.timeout(PATIENCE_S):
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
            return await call.code()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return await call.code()


def hello(**fields: Any) -> control_pb2.ConnectRequest:
    facts: dict[str, Any] = {"node_id": "bad", "incarnation": "i", "role": control_pb2.ROLE_WORKER}
    return control_pb2.ConnectRequest(hello=control_pb2.Hello(**{**facts, **fields}))


def noise(rng: random.Random, most: int) -> bytes:
    return rng.randbytes(rng.randint(1, most))


@pytest.mark.parametrize("seed", range(5))
async def test_random_bytes_to_the_control_stream(mesh: Mesh, link: grpc.aio.Channel, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        whole = hello().SerializeToString()
        after = [noise(rng, 200) for _ in range(rng.randint(0, 3))]
        flipped = bytearray(whole)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        for messages in ([noise(rng, 500)], [whole, *after], [bytes(flipped), *after]):
            await sent(link, *messages)
    await well(mesh)


@pytest.mark.parametrize("method", ADMIN)
async def test_random_bytes_to_the_admin_service(mesh: Mesh, link: grpc.aio.Channel, method: str) -> None:
    rng = random.Random(method)
    # A message may happen to decode, and to ask for something harmless; it must not be the server's fault.
    for _ in range(20):
        call: Any = link.unary_unary(f"/trimtab.v1.AdminService/{method}")(noise(rng, 300), timeout=PATIENCE_S)
        assert await call.code() in {*REFUSED, grpc.StatusCode.OK}
    await well(mesh)


async def test_a_message_beyond_the_limit_is_refused(mesh: Mesh) -> None:
    huge = hello(model="x" * (MAX_MESSAGE_BYTES + 1)).SerializeToString()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(mesh.address, options=options) as unbounded:
        assert await sent(unbounded, huge) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await well(mesh)


@pytest.mark.parametrize(
    "said",
    [
        {"node_id": "x" * 5000},
        {"model": "a\nb"},
        {"labels": {f"k{i}": "v" for i in range(1000)}},
        {"labels": {"k": "v" * 5000}},
        {"limits": control_pb2.EngineLimits(engine="x" * 5000)},
        {"role": 9},
    ],
)
async def test_a_node_that_says_too_much_of_itself_is_refused(mesh: Mesh, link: grpc.aio.Channel, said: Any) -> None:
    assert await sent(link, hello(**said).SerializeToString()) is grpc.StatusCode.INVALID_ARGUMENT
    assert "good" in {m.node_id for m in mesh.plane.fleet}
    assert len(list(mesh.plane.fleet)) == 1


@pytest.mark.parametrize(
    "report",
    [
        control_pb2.Report(counters={f"c{i}": 1 for i in range(10_000)}),
        control_pb2.Report(sketches={f"s{i}": b"x" for i in range(100)}),
        control_pb2.Report(sketches={"s": b"x" * (1 << 20)}),
    ],
)
async def test_a_report_that_would_fill_the_memory_ends_its_stream(
    mesh: Mesh, link: grpc.aio.Channel, report: control_pb2.Report
) -> None:
    said = control_pb2.ConnectRequest(report=report).SerializeToString()
    assert await sent(link, hello().SerializeToString(), said) is grpc.StatusCode.INVALID_ARGUMENT
    await well(mesh)


async def test_a_second_hello_ends_the_stream(mesh: Mesh, link: grpc.aio.Channel) -> None:
    whole = hello().SerializeToString()
    assert await sent(link, whole, whole) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_epoch_that_nobody_can_have_written_changes_nothing(mesh: Mesh, link: grpc.aio.Channel) -> None:
    held = policy_pb2.SnapshotIdentity(epoch=HIGHEST + 1, revision=1, sha256=b"x" * 32)
    await sent(link, hello(held=held).SerializeToString())
    await well(mesh)
    assert (await mesh.admin.get_policy()).snapshot.identity.epoch == 1


async def test_a_replayed_answer_changes_nothing(mesh: Mesh, link: grpc.aio.Channel) -> None:
    """A node says that it applied what it was never sent, of an older epoch and of a place beyond the newest."""
    for place in ((0, 5), (1, 0)):
        identity = policy_pb2.SnapshotIdentity(epoch=place[0], revision=place[1], sha256=b"x" * 32)
        result = control_pb2.PolicyResult(identity=identity, applied=control_pb2.PolicyApplied())
        said = control_pb2.ConnectRequest(policy_result=result).SerializeToString()
        await sent(link, hello().SerializeToString(), said)
    await well(mesh)
    assert (await mesh.admin.get_policy()).snapshot.identity.epoch == 1


async def test_streams_that_never_say_who_they_are_are_ended(
    mesh: Mesh, link: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.stream.HELLO_S", 0.1)
    calls = [link.stream_stream(CONNECT)() for _ in range(50)]
    codes: list[Callable[[], Any]] = [c.code for c in calls]
    async with asyncio.timeout(PATIENCE_S):
        assert {await code() for code in codes} == {grpc.StatusCode.INVALID_ARGUMENT}
    await well(mesh)
