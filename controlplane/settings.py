"""A control plane replica's settings: fixed for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from trimtab.kit.config import check, refuse, setting, well_formed
from trimtab.kit.tls import TlsSettings, faults

MAX_STORE_WAIT_MS = 1000
"""Below what a command to the store gets in all."""
MAX_ALERTS_PER_MIN = 1000


@dataclass(frozen=True)
class ControlSettings(TlsSettings):
    mesh: str = setting("default", "mesh that this replica steers; names its keys in the store")
    listen: str = setting("127.0.0.1:7071", "gRPC address, for nodes and for the CLI")
    metrics: str = setting("127.0.0.1:7072", "address of the Prometheus endpoint")
    redis: str = setting(
        "redis://127.0.0.1:6379/0",
        "store: redis://, rediss:// (TLS), redis+sentinel://HOST:PORT,…/SERVICE, unix://, or memory:// (lost on exit)",
    )
    redis_password: str = setting("", "the store's password, as it is, where its URL names none; by the environment")
    store_replicas: int = setting(0, "the store's replicas that must have a write before it is called committed")
    store_wait_ms: int = setting(200, "milliseconds that they get for it")
    replica_id: str = setting("", "name of this replica among those of its mesh [default: made up at each start]")
    advertise: str = setting("", "host:port at which the other replicas reach this one [default: that of --listen]")
    access: str = setting("", "TOML file of who may do what; without one, plain text may do everything")
    lease_s: float = setting(3.0, "seconds that the loop leader's lease lasts without renewal")
    forget_s: float = setting(300.0, "seconds after which a lost node is dropped from the fleet")
    alert_webhook: str = setting("", "http:// or https:// address that alerts are posted to as JSON; empty posts none")
    alert_per_min: int = setting(10, "alerts that are told within a minute at most, on the log and to the webhook")
    log_level: str = setting("info", "debug, info, warning or error")
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor", for_people=False)

    def __post_init__(self) -> None:
        optional = tuple(key for key in ("advertise",) if getattr(self, key))
        names = tuple(key for key in ("mesh", "replica_id") if getattr(self, key) or key == "mesh")
        wrong = check(self, "control", addresses=("listen", "metrics", *optional), names=names)
        wrong += faults("control", self, well_formed(self.listen))
        if self.store_replicas < 0:
            wrong.append(f"control store_replicas must be 0 or more, not {self.store_replicas}")
        if not 1 <= self.store_wait_ms <= MAX_STORE_WAIT_MS:
            wrong.append(f"control store_wait_ms must be 1 to {MAX_STORE_WAIT_MS}, not {self.store_wait_ms}")
        if self.alert_webhook and not _takes_posts(self.alert_webhook):
            wrong.append("control alert_webhook must be an http:// or https:// address")
        if not 1 <= self.alert_per_min <= MAX_ALERTS_PER_MIN:
            wrong.append(f"control alert_per_min must be 1 to {MAX_ALERTS_PER_MIN}, not {self.alert_per_min}")
        if not 0.5 <= self.lease_s <= 60:
            wrong.append(f"control lease_s must be 0.5 to 60 seconds, not {self.lease_s:g}")
        if not self.forget_s > 0:
            wrong.append(f"control forget_s must be above 0, not {self.forget_s:g}")
        refuse(wrong)


def _takes_posts(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
