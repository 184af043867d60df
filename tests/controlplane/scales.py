"""A control plane that says of pools what a test wants it to, on a real socket: GetScale, GetFleet and DrainNode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from controlplane.admin.client import AdminClient
from trimtab import codec
from trimtab.errors import TrimtabError
from trimtab.kit import rpc
from trimtab.messages import Hello, NodeState, Role
from trimtab.snapshot import Node
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2


class FakeControl(admin_pb2_grpc.AdminServiceServicer):
    """`wanted` is of pool `default`; None: it says nothing of it. `workers` are there, by name, each in a pool."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        self.most = 100
        self.surplus: tuple[str, ...] = ()
        self.leader = "control"
        self.error: TrimtabError | None = None
        self.workers: dict[str, str] = {}
        self.draining: set[str] = set()
        self.drained: list[admin_pb2.DrainNodeRequest] = []
        self.on_drain: Callable[[str], bool] = lambda name: True
        self.address = ""

    def pool(self, name: str = "default") -> list[str]:
        return [worker for worker, of in self.workers.items() if of == name]

    async def GetScale(self, request: Any, context: Any) -> admin_pb2.GetScaleResponse:
        if self.error is not None:
            await rpc.abort(context, self.error)
        pools = [admin_pb2.PoolScale(pool="other", wanted=9, running=1, max_workers=9)]
        if self.wanted is not None:
            pools.append(
                admin_pb2.PoolScale(
                    pool="default",
                    wanted=self.wanted,
                    running=len(self.pool()),
                    min_workers=1,
                    max_workers=self.most,
                    reason="the queue is long",
                    surplus=self.surplus,
                )
            )
        return admin_pb2.GetScaleResponse(pools=pools, leader_id=self.leader)

    async def GetFleet(self, request: Any, context: Any) -> admin_pb2.GetFleetResponse:
        nodes = [
            admin_pb2.FleetNode(
                hello=codec.encode_hello(Hello(Node(name, pool), "i1", Role.WORKER, "tiny")),
                report=control_pb2.Report(
                    state=codec.encode_state(NodeState.DRAINING if name in self.draining else NodeState.SERVING)
                ),
                connected=True,
            )
            for name, pool in self.workers.items()
        ]
        return admin_pb2.GetFleetResponse(nodes=nodes)

    async def DrainNode(self, request: admin_pb2.DrainNodeRequest, context: Any) -> admin_pb2.DrainNodeResponse:
        self.drained.append(request)
        done = self.on_drain(request.node_id)
        return admin_pb2.DrainNodeResponse(
            done=done, reason="" if done else "NO_ANSWER", message="" if done else "silence"
        )


@asynccontextmanager
async def a_control(control: FakeControl | None = None) -> AsyncIterator[tuple[FakeControl, AdminClient]]:
    control = control or FakeControl()
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(control, server)
    control.address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with AdminClient(control.address) as admin:
            yield control, admin
    finally:
        await server.stop(None)
