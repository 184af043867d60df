"""What `trimtab up` will run: one Spec for each process, with its command line and addresses, decided before anything
starts.

Every process listens where its own settings say; a port that is taken is replaced by the next free one, and the plan
says so.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.settings import ControlSettings
from services.gateway.settings import GatewaySettings
from services.worker.engines.cores import threads_each, usable
from services.worker.settings import WorkerSettings
from trimtab.kit.config import ConfigError, host_port
from trimtab.kit.process import port_is_free
from trimtab_cli.settings import UpSettings
from trimtab_cli.valkey import embedded

PORTS_TRIED = 200
CONTROL_PORTS = 2
"""That a replica of the control plane has, one beside the other: gRPC and metrics. The next replica's come after them."""


class Tier(enum.IntEnum):
    """Who leans on whom: the lower ends later, so that streams drain through everything they need."""

    STORE = 0
    CONTROL = 1
    WORKER = 2
    GATEWAY = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """One process. It is healthy when its gRPC health, or the store on its Unix socket, answers at `address`."""

    name: str
    tier: Tier
    argv: tuple[str, ...]
    address: str
    metrics: str = ""
    drain_s: float = 5.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """`control` is what `--control` takes: the replicas' addresses, with commas between them."""

    specs: tuple[Spec, ...]
    gateway: str
    http: str
    control: str
    workers: tuple[str, ...]
    store: str
    notes: tuple[str, ...]
    metrics: str = ""
    """Of the gateway, where that is not its HTTP door."""


@dataclass(frozen=True, slots=True)
class Sections:
    """What the mesh's processes will read, loaded here too, so that a fault shows before anything starts."""

    up: UpSettings
    worker: WorkerSettings
    gateway: GatewaySettings
    control: ControlSettings
    worker_flags: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None


class _Ports:
    """Hands out addresses that nobody listens on, each once."""

    def __init__(self, given: Iterable[int] = ()) -> None:
        self.notes: list[str] = []
        self._given = set(given)

    def take(self, address: str, what: str, offset: int = 0) -> str:
        host, port_wanted = host_port(address)
        wanted = port_wanted + offset
        for port in range(wanted, min(wanted + PORTS_TRIED, 65536)):
            if port not in self._given and port_is_free(port, host):
                break
        else:
            raise ConfigError([f"no free port for the {what} in {wanted} to {wanted + PORTS_TRIED - 1} on {host}"])
        if port != wanted:
            self.notes.append(f"port {wanted} is taken; the {what} listens on {port}")
        self._given.add(port)
        return f"{host}:{port}"


def make(sections: Sections, state_dir: Path) -> Plan:
    """The plan for this machine at this moment. ConfigError and ValkeyMissing say what is in the way."""
    up, ports = sections.up, _Ports()
    gateway = ports.take(sections.gateway.listen, "gateway")
    http = ports.take(sections.gateway.http, "gateway's HTTP door")
    controls = [_control(sections.control, ports, i) for i in range(up.controls)]
    control = ",".join(replica.listen for replica in controls)
    common = _common(sections)
    specs: list[Spec] = []
    # A store that the control plane's own settings name is not passed over for an empty one of ours.
    named = up.redis or (sections.control.redis if sections.control.redis != ControlSettings().redis else "")
    if named.startswith("memory://") and up.controls > 1:
        raise ConfigError([f"{up.controls} replicas of the control plane need a store that they share, not {named}"])
    if named:
        store = named
    else:
        valkey = embedded(state_dir / "valkey", os.getpid())
        store = valkey.url
        specs.append(Spec("valkey", Tier.STORE, valkey.argv, str(valkey.socket)))
    for replica in controls:
        argv = _module("controlplane", *common, *replica.flags)
        # Not as a flag: a store's URL may hold a password, and everybody on the machine can read command lines.
        env = {"TRIMTAB_CONTROL_REDIS": store}
        specs.append(Spec(replica.name, Tier.CONTROL, argv, replica.listen, replica.metrics, env=env))
    workers = [_worker(sections, control, i, up.workers, ports) for i in range(up.workers)]
    specs += workers
    where = ["--node-id", "g0", "--listen", gateway, "--http", http, "--control", control]
    scraped = ports.take(sections.gateway.metrics, "gateway's metrics") if sections.gateway.metrics else ""
    if scraped:
        where += ["--metrics", scraped]
    argv = _module("services.gateway", *common, *where)
    specs.append(Spec("gateway", Tier.GATEWAY, argv, gateway, http, sections.gateway.drain_s))
    served_at = tuple(w.address for w in workers)
    return Plan(tuple(specs), gateway, http, control, served_at, store, tuple(ports.notes), scraped)


def another_worker(sections: Sections, plan: Plan, i: int, beside: Sequence[Spec]) -> tuple[Spec, tuple[str, ...]]:
    """Worker w`i`, to be started beside those that are there; and what is to be said of its ports. ConfigError where none is free."""
    taken = (
        host_port(address)[1]
        for spec in beside
        if spec.tier is not Tier.STORE
        for address in (spec.address, spec.metrics)
    )
    ports = _Ports(taken)
    running = sum(spec.tier is Tier.WORKER for spec in beside)
    return _worker(sections, plan.control, i, running + 1, ports), tuple(ports.notes)


def worker_name(i: int) -> str:
    return f"w{i}"


def _common(sections: Sections) -> list[str]:
    words = ["--mesh", sections.up.mesh, "--parent-pid", str(os.getpid())]
    return words if sections.file is None else [*words, "--config", sections.file]


def _worker(sections: Sections, control: str, i: int, of: int, ports: _Ports) -> Spec:
    """One of so many on this machine."""
    name, settings = worker_name(i), sections.worker
    address = ports.take(settings.listen, f"worker {name}", i)
    metrics = ports.take(settings.metrics, f"metrics of worker {name}", i)
    where = ["--node-id", name, "--listen", address, "--metrics", metrics, "--control", control]
    argv = _module("services.worker", *_common(sections), *where, *_flags(sections.worker_flags))
    cores = _cores_each(of, usable(), os.environ)
    return Spec(name, Tier.WORKER, argv, address, metrics, settings.drain_s, env=cores)


@dataclass(frozen=True, slots=True)
class _Control:
    """One replica of the control plane."""

    name: str
    listen: str
    metrics: str
    flags: tuple[str, ...]


def _control(settings: ControlSettings, ports: _Ports, i: int) -> _Control:
    """What the settings give to one replica alone is the first one's; the others get their own."""
    name = f"control{i}" if i else "control"
    what, offset = f"control plane {i}" if i else "control plane", i * CONTROL_PORTS
    listen = ports.take(settings.listen, what, offset)
    metrics = ports.take(settings.metrics, f"{what}'s metrics", offset)
    flags = ["--listen", listen, "--metrics", metrics]
    if i and settings.replica_id:
        flags += ["--replica-id", f"{settings.replica_id}-{i}"]
    if i and settings.advertise:
        flags += ["--advertise", f"{host_port(settings.advertise)[0]}:{host_port(listen)[1]}"]
    return _Control(name, listen, metrics, tuple(flags))


def _cores_each(workers: int, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What several engines need in their environment so that they compute beside each other: threads that share a core wait by spinning.

    `cores` are those that all of them may keep busy together, by affinity and by the quota that they share with whoever starts them.
    """
    if workers < 2 or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(threads_each(cores, workers))}


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *words)


def _flags(given: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
