"""The admin client with several replicas: any of them that serves will do, and a call is sent once."""

from __future__ import annotations

import socket

import pytest
from grpc_health.v1 import health_pb2

from controlplane.admin.client import AdminClient
from tests.controlplane.mesh import a_mesh
from trimtab.client import Unreachable
from trimtab.kit.process import free_port


def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_a_dead_replica_is_passed_over() -> None:
    async with a_mesh() as mesh, AdminClient(f"{nowhere()}, {mesh.address}") as client:
        assert (await client.fleet()).desired.revision == 1
        answer = await client.set_policy({"batch.active": "8"}, author="ada")
        assert answer.identity.revision == 2
        assert len((await client.history()).entries) == 2, "written once"


@pytest.mark.slow
async def test_a_replica_that_hangs_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with a_mesh() as mesh, AdminClient(f"127.0.0.1:{mute.getsockname()[1]},{mesh.address}") as client:
            assert (await client.fleet()).desired.revision == 1


async def test_a_replica_without_a_policy_is_asked_only_where_none_has_one() -> None:
    async with a_mesh() as fresh, a_mesh() as mesh:
        await fresh.plane._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        async with AdminClient(f"{fresh.address},{mesh.address}") as client:
            assert (await client.fleet()).replica_id == mesh.plane.peers.replica_id
        async with AdminClient(f"{nowhere()},{fresh.address}") as client:
            assert (await client.fleet()).replica_id == fresh.plane.peers.replica_id


async def test_the_one_in_use_is_left_when_it_ends() -> None:
    async with a_mesh() as other:
        async with a_mesh() as mesh:
            client = AdminClient(f"{mesh.address},{other.address}")
            assert (await client.fleet()).replica_id == mesh.plane.peers.replica_id
        assert (await client.fleet()).replica_id == other.plane.peers.replica_id
        await client.close()


@pytest.mark.slow
async def test_when_none_answers_all_are_named() -> None:
    first, second = nowhere(), nowhere()
    async with AdminClient(f"{first},{second}") as client:
        with pytest.raises(Unreachable, match=f"at {first} or {second}: nothing answers there"):
            await client.fleet()
