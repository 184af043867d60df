"""A control plane replica's settings: fixed for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.kit.config import check, setting


@dataclass(frozen=True)
class ControlSettings:
    mesh: str = setting("default", "mesh that this replica steers; names its keys in the store")
    listen: str = setting("127.0.0.1:7071", "gRPC address, for nodes and for the CLI")
    metrics: str = setting("127.0.0.1:7072", "address of the Prometheus endpoint")
    redis: str = setting("redis://127.0.0.1:6379/0", "store: redis://, rediss://, unix://, or memory:// (lost on exit)")
    forget_s: float = setting(300.0, "seconds after which a lost node is dropped from the fleet")
    log_level: str = setting("info", "debug, info, warning or error")
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor")

    def __post_init__(self) -> None:
        check(self, "control", addresses=("listen", "metrics"), names=("mesh",))
