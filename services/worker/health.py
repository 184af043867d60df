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
from trimtab.progress import Progress, Pulse, judge

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
        self._stuck: Pulse | None = None
        """Where the engine stood when it was found hung; it is until it shows life."""
        self._stuck_since = 0.0
        self._ping: asyncio.Task[None] | None = None
        self._services: tuple[str, ...] = SERVICES
        self.servicer = aio.HealthServicer()
        self.state = NodeState.STARTING

    def also(self, service: str) -> None:
        """The same is said of this service, from the next state on; for a door that is not always there."""
        self._services = (*self._services, service)

    def judge(self, now: float) -> NodeState:
        """The state at `now`, seconds of time.monotonic()."""
        # What the engine owes, not what readers have left unread: a slow reader is no stuck engine.
        busy = self._engine.owes() > 0
        if not busy:
            self._work_since = 0.0
        elif not self._work_since:
            self._work_since = now
        pulse = self._engine.pulse()
        moving = judge(pulse, work_waiting=busy, idle_since=self._work_since, now=now)
        if moving is Progress.HUNG:
            if self._stuck is None:
                self._stuck_since = now
            self._stuck = pulse
        elif self._stuck is not None and (pulse != self._stuck or (not busy and self._answers())):
            self._stuck = self._ping = None
        if self._draining():
            return NodeState.DRAINING
        return NodeState.SERVING if self._stuck is None else NodeState.HUNG

    @property
    def hung(self) -> bool:
        """As judged last; a worker that drains may be hung too."""
        return self._stuck is not None

    def hung_s(self, now: float) -> float:
        """For how long it has been found hung; 0.0 while it moves."""
        return 0.0 if self._stuck is None else max(0.0, now - self._stuck_since)

    def _answers(self) -> bool:
        """Whether an engine that was hung has answered since. When its work has gone elsewhere there is no step by which it could show it."""
        if self._ping is None or (self._ping.done() and self._ping.exception() is not None):
            self._ping = asyncio.create_task(self._engine.ping())
        return self._ping.done()

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
        for service in self._services:
            await self.servicer.set(service, status)
