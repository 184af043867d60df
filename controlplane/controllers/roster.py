"""All controllers, in the order in which a tick steps them."""

from __future__ import annotations

from controlplane.controllers import (
    batch,
    blocks,
    clusters,
    degraded,
    heal,
    isolation,
    memory,
    oom,
    overload,
    priority,
    safe_batch_cap,
    scale,
)
from controlplane.controllers.decision import Controller

CONTROLLERS: tuple[Controller, ...] = (
    priority,
    batch,
    safe_batch_cap,
    memory,
    overload,
    degraded,
    oom,
    isolation,
    clusters,
    scale,
    blocks,
    heal,
)
