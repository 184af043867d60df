"""The control plane process: `python -m controlplane`. Composition root; exit codes 0 stopped, 1 died, 2 settings or a taken port."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controlplane.settings import ControlSettings
from trimtab.kit.config import ConfigError, find_file, load, options
from trimtab.kit.tls import Tls

if TYPE_CHECKING:
    from trimtab.kit.notify import Notifier


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", metavar="FILE", help="Settings file. [default: ./trimtab.toml, else /etc/trimtab/trimtab.toml]"
)
@options(ControlSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run one replica of the control plane: it keeps the policy, pushes it to nodes, and answers `trimtab policy` and `trimtab fleet`."""
    import uvloop

    from controlplane.access import AccessFault
    from controlplane.gatekeeper import AccessFile
    from controlplane.store import open_store
    from trimtab.kit.rpc import PortTaken
    from trimtab.kit.tls import check_own, tls_of

    try:
        settings = load(ControlSettings, "control", flags=flags, file=find_file(config))
        tls = tls_of(settings, settings.mesh)
        check_own("control", "", tls)
        store = open_store(
            settings.redis,
            settings.mesh,
            password=settings.redis_password,
            replicas=settings.store_replicas,
            wait_ms=settings.store_wait_ms,
        )
    except ConfigError as e:
        sys.exit(_usage(e.faults))
    except ValueError as e:
        sys.exit(_usage([f"redis: {e}"]))
    try:
        access = AccessFile(Path(settings.access) if settings.access else None)
    except AccessFault as e:
        sys.exit(_usage([f"access: {e}"]))
    try:
        uvloop.run(serve(settings, store, access, tls))
    except PortTaken as e:
        sys.exit(_usage([str(e)]))


def _usage(faults: list[str]) -> int:
    for fault in faults:
        click.secho(f"error: {fault}", fg="red", err=True)
    return 2


async def serve(settings: ControlSettings, store: Any, access: Any, tls: Tls | None) -> None:
    """Until SIGTERM or SIGINT."""
    from prometheus_client import CollectorRegistry

    from controlplane.alerts import Alerts
    from controlplane.metrics import ControlMetrics
    from controlplane.server import ControlPlane
    from trimtab.kit.notify import from_environment
    from trimtab.kit.process import die_with_parent, spare_collections, state_dir
    from trimtab.kit.rpc import PortTaken, cancel_and_wait, port_taken, use_tls
    from trimtab.kit.scrape import serve_metrics
    from trimtab.kit.telemetry import setup_logging, setup_tracing
    from trimtab.kit.tls import warn

    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid, signal.SIGTERM)
    setup_logging("control", level=settings.log_level)
    tracing = setup_tracing("control", state_dir(settings.mesh))
    stopping = asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stopping.set)
    use_tls(tls)
    warn((settings.listen,), tls, metrics=settings.metrics)
    metrics = ControlMetrics(CollectorRegistry())
    plane = ControlPlane(
        store,
        settings.listen,
        metrics,
        forget_s=settings.forget_s,
        lease_s=settings.lease_s,
        replica_id=settings.replica_id,
        advertise=settings.advertise,
        mesh=settings.mesh,
        tls=tls,
        access=access,
        alerts=Alerts(settings.mesh, metrics, webhook=settings.alert_webhook, per_min=settings.alert_per_min),
    )
    try:
        httpd = serve_metrics(settings.metrics, metrics.registry)
    except OSError as e:
        raise PortTaken(port_taken(settings.metrics)) from e
    notifier = from_environment()
    await plane.start()
    spare_collections()
    notifier.ready("waits for its store")
    host = settings.metrics.rsplit(":", 1)[0]
    announcing = asyncio.create_task(_announce(plane, f"{host}:{httpd.server_port}", store, notifier))
    pinging = asyncio.create_task(notifier.pings())
    dying = asyncio.create_task(plane.failed())
    ended = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((dying, ended), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            dying.result()
    finally:
        notifier.stopping("stops")
        for task in (announcing, pinging, dying, ended):
            await cancel_and_wait(task)
        await plane.stop()
        await store.close()
        httpd.shutdown()
        with contextlib.suppress(OSError):
            httpd.server_close()
        tracing.shutdown()


async def _announce(plane: Any, metrics: str, store: Any, notifier: Notifier) -> None:
    """One line, once there is a policy to serve; on a terminal and in a journal alike."""
    import structlog

    stored = await plane.loaded()
    structlog.get_logger(__name__).info(
        f"control plane ready: grpc {plane.address}, metrics http://{metrics}/metrics, "
        f"policy {stored.identity}, store {store.state.description}"
    )
    notifier.status(f"serves policy {stored.identity} at {plane.address}")


if __name__ == "__main__":
    main()
