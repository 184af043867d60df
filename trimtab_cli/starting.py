"""What would keep a process with these settings from starting on this machine, as far as it shows without starting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from controlplane.settings import ControlSettings
from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from trimtab.kit.config import host_port
from trimtab_cli.settings import UpSettings


def worker(s: WorkerSettings) -> Iterator[str]:
    from services.worker import model

    yield from _twice("worker", listen=s.listen, metrics=s.metrics)
    if s.engine == "vllm" and model.is_path(s.model) and not Path(s.model).expanduser().exists():
        yield f"worker model: {s.model} does not exist"


def gateway(s: GatewaySettings) -> Iterator[str]:
    yield from _twice("gateway", listen=s.listen, http=s.http)


def control(s: ControlSettings) -> Iterator[str]:
    from controlplane.access import AccessFault, read_access

    yield from _twice("control", listen=s.listen, metrics=s.metrics)
    yield from _store("control", s.redis, s.mesh, s.store_replicas, s.store_wait_ms, s.redis_password)
    if s.access:
        try:
            read_access(Path(s.access))
        except AccessFault as e:
            yield f"control access: {e}"


def up(s: UpSettings) -> Iterator[str]:
    if s.redis:
        yield from _store("up", s.redis, s.mesh)


CHECKS: dict[type, Callable[..., Iterator[str]]] = {
    WorkerSettings: worker,
    GatewaySettings: gateway,
    ControlSettings: control,
    UpSettings: up,
}


def _twice(section: str, **addresses: str) -> Iterator[str]:
    """Of two that one process listens on; port 0 is any that is free."""
    (first, a), (second, b) = addresses.items()
    if a == b and host_port(a)[1]:
        yield f"{section} {first} and {second} must be two addresses, not both {a}"


def _store(
    section: str, url: str, mesh: str, replicas: int = 0, wait_ms: int = 200, password: str = ""
) -> Iterator[str]:
    """Connects to nothing."""
    from controlplane.store import open_store

    try:
        open_store(url, mesh, password=password, replicas=replicas, wait_ms=wait_ms)
    except ValueError as e:
        yield f"{section} redis: {e}"
