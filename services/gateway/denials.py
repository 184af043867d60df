"""Calls that are turned away because nobody knows who makes them: each counted, and a line for some of them.

Whoever has no key costs nothing to try, so the log takes a line a second of it; the next line says how many went without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from services.gateway.metrics import GatewayMetrics
from trimtab.tenant import Bucket, spend

LINES_PER_S = 1.0
SHOWN = 80
"""Characters of what a stranger says of himself."""

log = structlog.get_logger(__name__)


class Denials:
    """Belongs to one event loop."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lines: Bucket | None = None
        self._unsaid = 0

    def count(self, door: str, *, method: str, peer: str, because: str, identity: str = "") -> None:
        """`door` is grpc or http. No key may be in what is said here, nor its hash."""
        self._metrics.denied(door)
        self._lines, wait_s = spend(self._lines, LINES_PER_S, 1.0, self._clock())
        if wait_s > 0.0:
            self._unsaid += 1
            return
        facts: dict[str, Any] = {"identity": identity[:SHOWN]} if identity else {}
        if self._unsaid:
            facts["unsaid"] = self._unsaid
        log.warning("denied", door=door, method=method[:SHOWN], peer=peer, because=because, **facts)
        self._unsaid = 0
