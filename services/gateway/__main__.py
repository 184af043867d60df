"""A gateway process: settings → links to workers → gRPC and HTTP → control link; SIGTERM drains. `python -m services.gateway --help`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_reflection.v1alpha import reflection

from services.control import ControlLink, PolicyKeeper
from services.gateway import server as grpc_door
from services.gateway.admission import Admission
from services.gateway.coalesce import Coalescer
from services.gateway.control import Identification, breaker_tripped
from services.gateway.denials import Denials
from services.gateway.dispatch import Dispatch
from services.gateway.endpoint import Endpoint
from services.gateway.endpoints import Endpoints
from services.gateway.http_server import HttpServer
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import OpenAiDoor
from services.gateway.processes import supervise
from services.gateway.scrape_door import ScrapeDoor
from services.gateway.settings import GatewaySettings
from services.gateway.siblings import Siblings
from services.gateway.tenants import Tenants
from trimtab import scheduling
from trimtab.breaking import Trip
from trimtab.errors import Draining
from trimtab.kit import config, notify, process, rpc, telemetry
from trimtab.kit.config import host_port
from trimtab.kit.tasks import vital
from trimtab.kit.tls import check_own, tls_of, warn
from trimtab.messages import Workload
from trimtab.policy import Isolation, Policy
from trimtab.snapshot import Node

log = structlog.get_logger(__name__)

EXIT_USAGE = 2
HEALTH_INTERVAL_S = 0.2
LOOK_S = 0.05
LINKED_S = 3.0
"""What one of several processes waits for a worker before it listens."""


class Gateway:
    """What one process is made of."""

    def __init__(self, s: GatewaySettings, on_failure: Callable[[], None] = lambda: None) -> None:
        state = process.state_dir(s.mesh)
        self.settings = s
        self._on_failure = on_failure
        self.metrics = GatewayMetrics()
        self.keeper = PolicyKeeper(Node(s.name), self._obey, state / f"policy-{s.name}.json")
        self.endpoints = Endpoints(
            s.name,
            s.workers,
            cache=state / f"fleet-{s.name}.binpb",
            on_dropped=self.metrics.dropped,
            on_moved=lambda endpoint: self.dispatch.moved(endpoint),
            on_tripped=self._tell_trip,
            rules=lambda: self.policy.breaker,
            isolates=self._isolates,
            gateways=s.processes,
        )
        self.admission = Admission(
            lambda: self.policy,
            self.metrics,
            serving=self._serving_now,
            realtime_use=self._realtime_use,
            gateways=lambda: self.endpoints.census.gateways,
        )
        self.dispatch = Dispatch(
            self.endpoints,
            self.metrics,
            self.admission,
            policy=lambda: self.policy,
            default_workload=Workload(s.default_workload),
            deadline_s={Workload.REALTIME: s.realtime_deadline_s, Workload.BATCH: s.batch_deadline_s},
        )
        self._link: ControlLink | None = None
        self._looked_at, self._used, self._serving = 0.0, 0.0, 0
        self.metrics.watch(self.admission.in_flight, lambda: self.endpoints.links_up, self.admission.gauges)
        self.health = aio.HealthServicer()
        shares = s.process is not None
        self.grpc = grpc.aio.server(options=rpc.sharing(rpc.CLIENT_DOOR_OPTIONS) if shares else rpc.CLIENT_DOOR_OPTIONS)
        denials = Denials(self.metrics)
        keys = Path(s.keys) if s.keys else None
        self.tenants = Tenants(keys, denials, mesh=s.mesh, by_certificate=s.asks_for_certificates)
        self.coalescer = Coalescer(s.coalesce_ms)
        door = OpenAiDoor(
            self.dispatch,
            self.tenants,
            self.coalescer,
            max_body_bytes=s.max_body_bytes,
            shows_metrics=not s.metrics,
        )
        self.http = HttpServer(
            door.handle,
            s.http,
            max_body_bytes=s.max_body_bytes,
            tls=tls_of(s, s.mesh),
            clients_need_one=s.client_certs,
            denials=denials,
            shares=shares,
        )
        self.scraped: HttpServer | None = None
        if s.metrics:
            scrape = ScrapeDoor(lambda: self.metrics.scraped())
            self.scraped = HttpServer(scrape.handle, s.metrics, max_body_bytes=s.max_body_bytes, shares=shares)
        self._siblings: Siblings | None = None
        if s.process is not None:
            self._siblings = Siblings(Path(s.siblings), s.process, s.processes, self.metrics.text)
            self.metrics.scraped = self._siblings.text
        self._background: list[asyncio.Task[None]] = []
        self.grpc_port = 0

    async def start(self) -> None:
        """PortTaken when a port is; nothing is left running then. One of several processes takes no connection before it can do something
        with it: the others take them, and a client's channel stays where it got.
        """
        shares = self._siblings is not None
        if not shares:
            await self._listen()
        await self.keeper.start()
        self.endpoints.start()
        inference = grpc_door.register(self.dispatch, self.tenants, self.coalescer, self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = (
            inference,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self.grpc)
        self._background = [
            vital(self._publish_health(("", inference)), "health", self._on_failure),
            vital(self.admission.watch_readers(), "stuck readers", self._on_failure),
            vital(self.dispatch.sweep(), "waiting requests", self._on_failure),
            vital(self.tenants.watch(), "key file", self._on_failure),
        ]
        if self.coalescer.wanted:
            self._background.append(vital(self.coalescer.watch(), "loop lag", self._on_failure))
        if self.settings.control:
            self._report()
        if shares:
            await self._linked()
            await self._listen()
        await self.grpc.start()
        if self._siblings is not None:
            await self._siblings.start()

    async def _listen(self) -> None:
        tls = tls_of(self.settings, self.settings.mesh)
        self.grpc_port = rpc.bind(self.grpc, self.settings.listen, tls, clients_need_one=self.settings.client_certs)
        await self.http.start()
        if self.scraped is not None:
            try:
                await self.scraped.start()
            except BaseException:
                await self.http.stop()
                raise

    async def _linked(self) -> None:
        """Until it can serve, or until it is no use to wait longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINKED_S):
                while not self.endpoints.can_serve:
                    await asyncio.sleep(LOOK_S)

    def _report(self) -> None:
        """To the control plane, from now on. Of several processes the ports are known before they listen."""
        host, port = host_port(self.settings.listen)
        scraped = self.scraped or self.http
        scraped_host, scraped_port = host_port(self.settings.metrics or self.settings.http)
        me = Identification(
            self.settings.name,
            f"{host}:{self.grpc_port or port}",
            f"{scraped_host}:{scraped.port or scraped_port}",
            self.keeper,
            self.admission,
            self.metrics,
        )
        link = ControlLink(
            self.settings.control,
            me.hello,
            me.report,
            on_push=self.keeper.on_push,
            on_fleet=self.endpoints.on_fleet,
            on_unsent=self.metrics.intervals.give_back,
        )
        self._link = link
        self.endpoints.control_connected = lambda: link.connected
        self._background.append(vital(link.run(), "control link", self._on_failure))

    @property
    def policy(self) -> Policy:
        return self.keeper.resolved.policy

    async def _obey(self, policy: Policy) -> int:
        """Bounds and rules are read at each request; what pools are for is worked out when the policy changes."""
        # The keeper holds the new document only once this has returned.
        asyncio.get_running_loop().call_soon(self.endpoints.policy_changed)
        return 0

    def _isolates(self, pool: str) -> bool:
        """Whether this pool takes requests that the mesh at large sends elsewhere."""
        if self.policy.isolate.action != Isolation.POOL or not pool:
            return False
        return self.keeper.resolved_for(Node("", pool)).isolate.action != Isolation.POOL

    def _realtime_use(self) -> float:
        """As it was at most `LOOK_S` ago: among many workers a look costs more than a request is worth."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            bound = scheduling.handover_bound(self.policy, Workload.REALTIME) + self.policy.admission.realtime_queue
            serving = self.endpoints.serving()
            rooms = [e.room(Workload.REALTIME) for e in serving]
            self._serving = len(serving)
            self._used = max(0.0, 1.0 - max(rooms, default=bound) / max(1, bound))
        return self._used

    def _serving_now(self) -> int:
        self._realtime_use()
        return self._serving

    def _tell_trip(self, endpoint: Endpoint, trip: Trip) -> None:
        """Others hear of it at once."""
        self.metrics.tripped(trip.dimension.value)
        if self._link is not None and endpoint.incarnation:
            self._link.send_event(breaker_tripped(endpoint, trip))

    async def drain(self) -> None:
        """No new requests; what runs gets `drain_s` to finish, and is then cut with its count."""
        # Whoever asks for health before he sends hears of it before anybody is refused.
        await self.health.enter_graceful_shutdown()
        self.admission.draining = True
        log.info("draining", unfinished=len(self.admission.live), deadline_s=self.settings.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                await self.admission.idle.wait()
        self.admission.end_all(lambda: Draining("this gateway has shut down"))

    async def stop(self) -> None:
        for task in self._background:
            await rpc.cancel_and_wait(task)
        if self._siblings is not None:
            await self._siblings.stop()
        for server in (self.http, self.scraped):
            if server is not None:
                await server.stop()
        await self.grpc.stop(0.5)
        await self.endpoints.close()

    async def _publish_health(self, services: tuple[str, ...]) -> None:
        """SERVING while some worker can take requests."""
        shown: bool | None = None
        while True:
            good = self.endpoints.can_serve and not self.admission.draining
            if good != shown:
                shown = good
                status = health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
                for service in services:
                    await self.health.set(service, status)
            await asyncio.sleep(HEALTH_INTERVAL_S)


async def serve(s: GatewaySettings) -> int:
    """Until SIGTERM or SIGINT, or until a part that it can't live without has failed; the exit code."""
    stopping = asyncio.Event()
    failed = False

    def fail() -> None:
        nonlocal failed
        failed = True
        stopping.set()

    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stopping.set)
    notifier = notify.from_environment()
    gateway = Gateway(s, fail)
    await gateway.start()
    pings = vital(notifier.pings(), "watchdog", fail)
    log.info("gateway ready", node=s.name, listen=s.listen, http=s.http)
    notifier.ready(f"gRPC {s.listen}, HTTP {s.http}")
    await stopping.wait()
    notifier.stopping("draining")
    await gateway.drain()
    await gateway.stop()
    await rpc.cancel_and_wait(pings)
    log.info("gateway stopped", node=s.name)
    return int(failed)


@click.command()
@click.option("--config", "config_file", default=None, metavar="FILE", help="settings file")
@config.options(GatewaySettings)
def main(config_file: str | None, **flags: Any) -> None:
    """One gateway: gRPC and OpenAI-compatible HTTP in front of the workers."""
    try:
        s = config.load(GatewaySettings, "gateway", flags=flags, file=config.find_file(config_file))
        tls = tls_of(s, s.mesh)
        check_own("gateway", s.node_id, tls)
    except config.ConfigError as e:
        click.echo("\n".join(e.faults), err=True)
        sys.exit(EXIT_USAGE)
    if s.parent_pid is not None:
        process.die_with_parent(s.parent_pid, signal.SIGTERM)
    telemetry.setup_logging(f"gateway {s.name}", level=s.log_level)
    rpc.use_tls(tls)
    warn((s.listen, s.http), tls, metrics=s.metrics)
    provider = telemetry.setup_tracing(f"gateway-{s.name}", process.state_dir(s.mesh))
    code = 0
    try:
        alone = s.processes == 1 or s.process is not None
        code = uvloop.run(serve(s) if alone else supervise(s, sys.argv[1:]))
    except config.ConfigError as e:
        click.echo("\n".join(e.faults), err=True)
        code = EXIT_USAGE
    except rpc.PortTaken as e:
        click.echo(f"gateway {s.name}: {e}", err=True)
        code = EXIT_USAGE
    finally:
        provider.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
