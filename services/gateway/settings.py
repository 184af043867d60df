"""A gateway's settings: fixed for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.kit.config import check, setting
from trimtab.kit.tls import TlsSettings, faults


@dataclass(frozen=True)
class GatewaySettings(TlsSettings):
    node_id: str = setting("g0", "name of this gateway, unique in the mesh")
    mesh: str = setting("default", "mesh that this gateway belongs to; names its state directory")
    listen: str = setting("127.0.0.1:7070", "gRPC address")
    http: str = setting("127.0.0.1:7080", "HTTP address: OpenAI-compatible API, /health and /metrics")
    control: tuple[str, ...] = setting(("127.0.0.1:7071",), "control plane replicas, host:port")
    workers: tuple[str, ...] = setting((), "static workers, host:port, beside those that the control plane names")
    default_workload: str = setting("realtime", "workload of requests that name none: realtime or batch")
    realtime_deadline_s: float = setting(120.0, "deadline of REALTIME requests that set none")
    batch_deadline_s: float = setting(86_400.0, "deadline of BATCH requests that set none")
    client_certs: bool = setting(False, "with TLS: clients of both doors need a certificate of the mesh's authority")
    max_body_bytes: int = setting(8 << 20, "HTTP bodies above this are refused")
    drain_s: float = setting(30.0, "seconds that running streams get to finish on shutdown")
    log_level: str = setting("info", "debug, info, warning or error")
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor")

    def __post_init__(self) -> None:
        check(self, "gateway", addresses=("listen", "http", "control", "workers"), names=("node_id", "mesh"))
        if wrong := faults("gateway", self, (self.listen, self.http)):
            raise ValueError("\n".join(wrong))
        if min(self.realtime_deadline_s, self.batch_deadline_s) <= 0:
            raise ValueError("gateway realtime_deadline_s and batch_deadline_s must be above 0")
        # A body becomes a message on a link that many streams share (kit/rpc.py), and must fit there.
        if not 1 <= self.max_body_bytes <= 12 << 20:
            raise ValueError(f"gateway max_body_bytes must be between 1 and {12 << 20}, not {self.max_body_bytes}")
        if self.default_workload not in ("realtime", "batch"):
            raise ValueError(f"gateway default_workload must be realtime or batch, not {self.default_workload!r}")
