"""Looks at the fleet twice a second: who has been silent for too long is lost, who has been lost for long is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from controlplane.fleet import Fleet
from controlplane.metrics import ControlMetrics
from controlplane.store import PolicyStore
from trimtab.messages import Role

log = structlog.get_logger(__name__)

SILENCE_S = 2.5
"""A node that said nothing for so long is lost. With the tick below: within 3 s, as the CLI promises."""
TICK_S = 0.45


async def watch_fleet(
    fleet: Fleet,
    store: PolicyStore,
    metrics: ControlMetrics,
    *,
    forget_s: float,
    on_lost: Callable[[], None],
    on_forgotten: Callable[[int], None],
) -> None:
    """For ever. `on_forgotten` gets the session of a node that is dropped; its stream may still be open."""
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        lost = fleet.expire(now, silence_s=SILENCE_S)
        for member in lost:
            log.warning("node silent", node=member.node_id, silent_s=round(now - member.heard_at, 1))
        if lost:
            on_lost()
        for member in fleet.forget(now, after_s=forget_s):
            on_forgotten(member.session)
        metrics.store_up.set(store.state.connected)
        for role in Role:
            metrics.nodes.labels(role.value).set(len(fleet.connected(role)))
