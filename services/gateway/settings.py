"""A gateway's settings: fixed for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.gateway import key_file
from trimtab.kit.config import check, refuse, setting, well_formed
from trimtab.kit.tls import TlsSettings, faults, is_loopback, process_of

MAX_PROCESSES = 64


@dataclass(frozen=True)
class GatewaySettings(TlsSettings):
    node_id: str = setting("g0", "name of this gateway, unique in the mesh")
    mesh: str = setting("default", "mesh that this gateway belongs to; names its state directory")
    listen: str = setting("127.0.0.1:7070", "gRPC address")
    http: str = setting("127.0.0.1:7080", "HTTP address: OpenAI-compatible API, /health and /metrics")
    metrics: str = setting("", "address of /metrics, plain HTTP; empty: at the HTTP door, for whoever reaches that")
    control: tuple[str, ...] = setting(("127.0.0.1:7071",), "control plane replicas, host:port")
    workers: tuple[str, ...] = setting((), "static workers, host:port, beside those that the control plane names")
    default_workload: str = setting("realtime", "workload of requests that name none: realtime or batch")
    realtime_deadline_s: float = setting(120.0, "deadline of REALTIME requests that set none")
    batch_deadline_s: float = setting(86_400.0, "deadline of BATCH requests that set none")
    client_certs: bool = setting(False, "with TLS: clients of both doors need a certificate of the mesh's authority")
    keys: str = setting("", "key file, YAML: the tenants, their keys and what each may; read anew when it changes")
    max_body_bytes: int = setting(8 << 20, "HTTP bodies above this are refused")
    coalesce_ms: int = setting(
        0, "under load a stream's tokens of so many milliseconds travel in one message; 0 sends each as it comes"
    )
    drain_s: float = setting(30.0, "seconds that running streams get to finish on shutdown")
    processes: int = setting(1, "processes that share this gateway's two ports, a core for each")
    log_level: str = setting("info", "debug, info, warning or error")
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor", for_people=False)
    process: int | None = setting(
        None, "which of the processes this is; set by the one that started them", for_people=False
    )
    siblings: str = setting("", "directory of their sockets; set by the one that started them", for_people=False)

    def __post_init__(self) -> None:
        addresses = ("listen", "http", "control", "workers", *(("metrics",) if self.metrics else ()))
        wrong = check(self, "gateway", addresses=addresses, names=("node_id", "mesh"))
        wrong += faults("gateway", self, well_formed(self.listen, self.http)) + self._faults_of_callers()
        if not (self.realtime_deadline_s > 0 and self.batch_deadline_s > 0):
            wrong.append("gateway realtime_deadline_s and batch_deadline_s must be above 0")
        if not self.drain_s >= 0:
            wrong.append(f"gateway drain_s must be 0 or more, not {self.drain_s:g}")
        # A body becomes a message on a link that many streams share (kit/rpc.py), and must fit there.
        if not 1 <= self.max_body_bytes <= 12 << 20:
            wrong.append(f"gateway max_body_bytes must be between 1 and {12 << 20}, not {self.max_body_bytes}")
        if not 0 <= self.coalesce_ms <= 1000:
            wrong.append(f"gateway coalesce_ms must be between 0 and 1000, not {self.coalesce_ms}")
        if not 1 <= self.processes <= MAX_PROCESSES:
            wrong.append(f"gateway processes must be between 1 and {MAX_PROCESSES}, not {self.processes}")
        if process_of(self.node_id):
            wrong.append(
                f"gateway node_id must not end in a dot and a number, as the names of a gateway's processes do: {self.node_id!r}"
            )
        if self.process is not None and not (1 <= self.process <= self.processes and self.siblings):
            wrong.append("gateway process and siblings are set by the process that starts them; set processes alone")
        if self.default_workload not in ("realtime", "batch"):
            wrong.append(f"gateway default_workload must be realtime or batch, not {self.default_workload!r}")
        refuse(wrong)

    @property
    def name(self) -> str:
        """In the mesh, where each of several processes is a node of its own."""
        return self.node_id if self.process is None else f"{self.node_id}.{self.process}"

    @property
    def asks_for_certificates(self) -> bool:
        """Whether the doors tell clients apart by their certificates."""
        return self.client_certs and bool(self.tls_cert)

    def _faults_of_callers(self) -> list[str]:
        """What is wrong with how callers are told apart: the key file's faults, or that strangers get in."""
        if self.client_certs and not self.tls_cert:
            return ["gateway client_certs: clients show certificates over TLS alone; set tls_ca, tls_cert and tls_key"]
        if self.keys:
            try:
                key_file.read(Path(self.keys))
            except key_file.KeyFileFault as e:
                return [f"gateway keys: {self.keys}: {fault}" for fault in e.faults]
            return []
        if self.asks_for_certificates:
            return []
        return [
            f"gateway: whoever reaches {address} could use the mesh; set keys to a key file (trimtab keys new makes keys), or with TLS "
            "client_certs = true, or listen on 127.0.0.1 alone"
            for address in well_formed(self.listen, self.http)
            if not is_loopback(address)
        ]
