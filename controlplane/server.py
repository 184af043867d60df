"""One replica of the control plane, put together: store, replica, fleet, leader, peers, and the gRPC server in front of them.

Health is NOT_SERVING until a policy is loaded; without a store the replica waits for it, and nodes may connect meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from controlplane.access import NEEDS, Grant, Role
from controlplane.actuators import Actuators
from controlplane.admin.blocks import Blocks
from controlplane.admin.checks import MAX_AUTHOR_CHARS
from controlplane.admin.restarts import Restarts
from controlplane.admin.rollouts import Rollouts
from controlplane.admin.server import AdminServicer
from controlplane.admin.steering import steer
from controlplane.admin.telemetry import TelemetryAdmin
from controlplane.admin.workers import Workers
from controlplane.alerts import Alerts
from controlplane.controllers.decision import Controller
from controlplane.controllers.roster import CONTROLLERS
from controlplane.exchange import Exchange
from controlplane.fleet import Fleet
from controlplane.gatekeeper import AccessFile, Gatekeeper
from controlplane.keda import KedaScaler
from controlplane.keda import register as register_scaler
from controlplane.leader import Leader
from controlplane.loop import TelemetryLoop
from controlplane.metrics import ControlMetrics
from controlplane.peers import Peers
from controlplane.push import ControlServicer
from controlplane.replica import Replica, unix_ms
from controlplane.rollouts.driver import RolloutDriver
from controlplane.rollouts.keeper import Keeper
from controlplane.store import Entry, PolicyStore, Stored, WriteKind
from controlplane.telemetry import Telemetry
from trimtab.errors import StoreUnavailable
from trimtab.kit.rpc import SERVER_OPTIONS, bind, cancel_and_wait
from trimtab.kit.tls import Tls
from trimtab.snapshot import Identity
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc

log = structlog.get_logger(__name__)

CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
LEASE_S = 3.0
"""With the pace of renewals: a leader that dies is replaced within 4 s."""
STORE = "store"
"""A health service by that name is SERVING while changes can be written. NOT_SERVING beside a serving "" is degraded."""
STORE_HEALTH_S = 0.25
STOP_GRACE_S = 1.0
"""What calls get to end after the control streams were ended."""


class ControlPlane:
    """`store` stays the caller's to close. PortTaken at construction when `listen` is in use."""

    def __init__(
        self,
        store: PolicyStore,
        listen: str,
        metrics: ControlMetrics,
        *,
        forget_s: float = 300.0,
        lease_s: float = LEASE_S,
        replica_id: str = "",
        advertise: str = "",
        mesh: str = "default",
        tls: Tls | None = None,
        access: AccessFile | None = None,
        controllers: Sequence[Controller] = CONTROLLERS,
        alerts: Alerts | None = None,
    ) -> None:
        replica_id = replica_id or f"control-{uuid.uuid4().hex[:8]}"
        self.metrics = metrics
        self.replica = Replica(store)
        # Above the views of an earlier process, so that versions rise across restarts too.
        self.fleet = Fleet(first_version=unix_ms())
        self.leader = Leader(self.replica, replica_id, lease_s=lease_s)
        self.control = ControlServicer(
            self.replica, self.fleet, metrics, forget_s=forget_s, on_moved=lambda: self.peers.changed()
        )
        self._health = health_aio.HealthServicer()
        gatekeeper = Gatekeeper(
            access or AccessFile(None), metrics, mesh, self._denied, lambda said: self.peers.speaks(said)
        )
        self._server = grpc.aio.server(interceptors=[gatekeeper], options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self.control, self._server)
        self.peers = Peers(
            store,
            self.fleet,
            self.leader,
            replica_id=replica_id,
            address=advertise,
            newest=lambda: self.replica.newest.value.identity if self.replica.newest.value else Identity(),
            on_change=self.control.fleet_changed,
            tls=tls,
        )
        workers = Workers(self.fleet, self.control.breakers, store, self.peers, self.control.command_one)
        self.telemetry = Telemetry(time.monotonic())
        self.blocks = Blocks(self.fleet, self.telemetry, store, self.peers, self.control.command_one, self.leader)
        self._exchange = Exchange(self.fleet, self.telemetry, self.peers)
        self.control.on_report = self._exchange.reported
        self.control.on_out_of_memory = self._exchange.ran_out_of_memory
        self._alerts = alerts or Alerts(mesh, metrics)
        actuators = Actuators(
            workers,
            lambda request: steer(request, self.control.command, self.fleet, self.peers),
            store,
            self.blocks,
        )
        self.loop = TelemetryLoop(
            self.replica, self.fleet, self.telemetry, self.leader, controllers, actuators, self._alerts, metrics
        )
        breakers = self.control.breakers
        self.restarts = Restarts(
            self.replica, self.fleet, self.telemetry, self.loop, self.leader, self.peers, workers, breakers.notice
        )
        self.loop.restarting = self.restarts.restarting
        self._kept_rollouts = Keeper(store, self.control.noticed)
        self.control.weigh(self._kept_rollouts.weight)
        self.loop.carry_on = RolloutDriver(self._kept_rollouts, self.replica, self.fleet).tick
        rollouts = Rollouts(self._kept_rollouts, self.replica, self.fleet, self.leader, self.restarts.rollouts)
        telling = TelemetryAdmin(self.fleet, self.telemetry, self.loop, self._exchange, self.peers, breakers)
        actuators.propose = rollouts.propose
        actuators.keeps, self.restarts.tried = self.restarts.keeps, self._kept_rollouts
        admin = AdminServicer(
            self.replica,
            self.fleet,
            self.control.answers,
            metrics,
            self.control.command,
            self.peers,
            self.leader,
            self.control.log,
            workers,
            telling,
            self.blocks,
            self.restarts,
            rollouts,
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        scaler = register_scaler(KedaScaler(telling.scale), self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (CONTROL, ADMIN, scaler, health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = f"{listen.rsplit(':', 1)[0]}:{bind(self._server, listen, tls)}"
        self.peers.address = advertise or self.address
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve. Returns at once; `loaded` says when there is a policy to serve."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        for name, work in (
            ("replica", self.replica.run),
            ("control", self.control.run),
            ("leader", self.leader.run),
            ("peers", self.peers.run),
            ("exchange", self._exchange.run),
            ("loop", self.loop.run),
            ("rollouts", self._kept_rollouts.run),
            ("restarts", self.restarts.run),
            ("alerts", self._alerts.run),
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
        await self.leader.resign()
        await self.peers.close()

    async def _denied(self, method: str, grant: Grant, words: str, request: Any) -> None:
        """A change that somebody may not make stands in the history, as one that the policy did not take does."""
        newest = self.replica.newest.value
        if newest is None or NEEDS.get(method, Role.ADMIN) < Role.OPERATOR or not hasattr(request, "author"):
            return
        entry = Entry(
            newest.identity,
            newest.spec_version,
            grant.caller.name[:MAX_AUTHOR_CHARS],
            "",
            unix_ms(),
            refused_because=f"denied: {words}",
            kind=WriteKind.REFUSED,
        )
        with contextlib.suppress(StoreUnavailable):
            await self.replica.store.record_refused(entry)

    async def _serve_once_loaded(self) -> None:
        await self.loaded()
        # Until it has looked for the others it knows only its own nodes, and would check a change against those alone.
        await self.peers.looked.wait()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        shown: bool | None = None
        while True:
            # Without its store a replica serves on from memory, and takes no writes: that is a health of its own.
            good = self.replica.store.state.connected and self.replica.store.state.writable
            if good != shown:
                shown = good
                up, down = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
                await self._health.set(STORE, up if good else down)
            await asyncio.sleep(STORE_HEALTH_S)

    async def _set_health(self, status: Any) -> None:
        for name in ("", CONTROL, ADMIN):
            await self._health.set(name, status)
        if status == health_pb2.HealthCheckResponse.NOT_SERVING:
            await self._health.set(STORE, status)
