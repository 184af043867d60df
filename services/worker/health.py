"""Health by progress: SERVING while idle or moving, NOT_SERVING while starting, draining, hung or dead.

A stuck engine is found by its step counter on the board, within `progress.HUNG_AFTER_MS` or a multiple of the step's predicted time; a
process that merely answers proves nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

from services.worker.engines import Engine
from trimtab.messages import NodeState
from trimtab.progress import Progress, judge

log = structlog.get_logger(__name__)

INTERVAL_S = 0.5
SERVICES = ("", "trimtab.v1.InferenceService")


class Health:
    """Judges every half second and publishes on the gRPC health service."""

    def __init__(self, engine: Engine, draining: Callable[[], bool], on_death: Callable[[], None]) -> None:
        self._engine = engine
        self._draining = draining
        self._on_death = on_death
        self._work_since = 0.0
        self.servicer = aio.HealthServicer()
        self.state = NodeState.STARTING

    def judge(self, now: float) -> NodeState:
        """The state at `now`, seconds of time.monotonic()."""
        # What the engine owes, not what readers have left unread: a slow reader is no stuck engine.
        busy = self._engine.owes() > 0
        if not busy:
            self._work_since = 0.0
        elif not self._work_since:
            self._work_since = now
        if self._draining():
            return NodeState.DRAINING
        moving = judge(self._engine.pulse(), work_waiting=busy, idle_since=self._work_since, now=now)
        return NodeState.HUNG if moving is Progress.HUNG else NodeState.SERVING

    async def run(self) -> None:
        """For the life of the process."""
        await self._publish(health_pb2.HealthCheckResponse.NOT_SERVING)
        while True:
            if self._engine.dead:
                await self._publish(health_pb2.HealthCheckResponse.NOT_SERVING)
                self._on_death()
                return
            state = self.judge(time.monotonic())
            if state is not self.state:
                log.warning("state", state=state.value, was=self.state.value)
                self.state = state
                good = state is NodeState.SERVING
                await self._publish(
                    health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
                )
            await asyncio.sleep(INTERVAL_S)

    async def _publish(self, status: Any) -> None:
        for service in SERVICES:
            await self.servicer.set(service, status)
