"""One replica of the control plane, put together: store, replica, fleet, and the gRPC server in front of them.

Health is NOT_SERVING until a policy is loaded; without a store the replica waits for it, and nodes may connect meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from controlplane.admin.server import AdminServicer
from controlplane.fleet import Fleet
from controlplane.metrics import ControlMetrics
from controlplane.push import ControlServicer
from controlplane.replica import Replica, unix_ms
from controlplane.store import PolicyStore, Stored
from trimtab.kit.rpc import SERVER_OPTIONS, bind, cancel_and_wait
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc

log = structlog.get_logger(__name__)

CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
STOP_GRACE_S = 1.0
"""What calls get to end after the control streams were ended."""


class ControlPlane:
    """`store` stays the caller's to close. PortTaken at construction when `listen` is in use."""

    def __init__(self, store: PolicyStore, listen: str, metrics: ControlMetrics, *, forget_s: float = 300.0) -> None:
        self.replica = Replica(store)
        # Above the views of an earlier process, so that versions rise across restarts too.
        self.fleet = Fleet(first_version=unix_ms())
        self.control = ControlServicer(self.replica, self.fleet, metrics, forget_s=forget_s)
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self.control, self._server)
        admin = AdminServicer(self.replica, self.fleet, self.control.answers, metrics, self.control.command)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (CONTROL, ADMIN, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = f"{listen.rsplit(':', 1)[0]}:{bind(self._server, listen)}"
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve. Returns at once; `loaded` says when there is a policy to serve."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        for name, work in (
            ("replica", self.replica.run),
            ("control", self.control.run),
            ("health", self._serve_once_loaded),
        ):
            self._tasks.append(asyncio.create_task(work(), name=name))

    async def loaded(self) -> Stored:
        async for stored in self.replica.newest.follow():
            if stored is not None:
                return stored
        raise AssertionError("a watch never ends")

    async def failed(self) -> None:
        """Returns never; raises what a background task died of."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        raise AssertionError("a background task ended by itself")

    async def stop(self) -> None:
        """Streams end; nodes look for another replica, or wait for this one to come back."""
        await self._health.enter_graceful_shutdown()
        self.control.close()
        await self._server.stop(STOP_GRACE_S)
        for task in self._tasks:
            await cancel_and_wait(task)

    async def _serve_once_loaded(self) -> None:
        await self.loaded()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        await asyncio.Event().wait()

    async def _set_health(self, status: Any) -> None:
        for name in ("", CONTROL, ADMIN):
            await self._health.set(name, status)
