"""How a worker presents itself to the control plane: who it is, what it can do, how it fares."""

from __future__ import annotations

import os
import time
import uuid
from importlib.metadata import version

from services.control import ControlLink, PolicyKeeper
from services.worker.commands import Commands
from services.worker.engines import Engine
from services.worker.engines.death import Death
from services.worker.health import Health
from services.worker.measuring import Measuring
from services.worker.serving import Serving
from services.worker.settings import WorkerSettings
from services.worker.standing import Standing
from trimtab import codec
from trimtab.messages import NodeState, Report
from trimtab.policy import POLICY_SCHEMA
from trimtab.scheduling import NOW
from trimtab.snapshot import Node
from trimtab.v1 import control_pb2


def node_of(s: WorkerSettings, engine: Engine) -> Node:
    """This worker as policies are resolved for it."""
    return Node(s.node_id, s.pool, dict(label.split("=", 1) for label in s.labels), engine.limits, POLICY_SCHEMA)


class Membership:
    """The worker's control link, and what it says on it. A new incarnation for each process."""

    def __init__(
        self,
        settings: WorkerSettings,
        address: str,
        engine: Engine,
        keeper: PolicyKeeper,
        serving: Serving,
        health: Health,
        measuring: Measuring,
        standing: Standing,
        commands: Commands,
    ) -> None:
        self._settings = settings
        self._address = address
        self._engine = engine
        self._keeper = keeper
        self._serving = serving
        self._health = health
        self._measuring = measuring
        self._standing = standing
        self._told = commands.told.in_force if commands.told is not None else {}
        self._incarnation = uuid.uuid4().hex
        self._said = engine.limits
        """What the control plane has been told that the engine can do."""
        self._link = ControlLink(
            settings.control,
            self._hello,
            self.report,
            on_push=keeper.on_push,
            on_command=commands.obey,
            on_unsent=measuring.intervals.give_back,
        )

    async def run(self) -> None:
        """For the life of the process."""
        await self._link.run()

    def say_draining(self, deadline_s: float) -> None:
        event = control_pb2.DrainBegun(deadline_ms=int(deadline_s * 1000))
        self._link.send_event(control_pb2.NodeEvent(drain_begun=event))

    async def said(self, within_s: float) -> None:
        """Once the control plane has been told all of it, or the time is over."""
        await self._link.said(within_s)

    def say_engine_died(self, death: Death) -> None:
        died = control_pb2.EngineDied(message=death.words, out_of_memory=death.out_of_memory)
        self._link.send_event(control_pb2.NodeEvent(engine_died=died))

    def say_limits(self) -> None:
        """The engine can do something else than before: everybody who keeps what it can do is told at once."""
        limits = self._engine.limits
        if limits == self._said:
            return
        self._said = limits
        self._keeper.node = node_of(self._settings, self._engine)
        event = control_pb2.LimitsChanged(limits=codec.encode_limits(limits))
        self._link.send_event(control_pb2.NodeEvent(limits_changed=event))
        # Blocks are counted in another size now: a load of before would be read in the wrong one.
        self._link.report_soon()

    def _hello(self) -> control_pb2.Hello:
        s, node = self._settings, node_of(self._settings, self._engine)
        held = self._keeper.held
        return control_pb2.Hello(
            node_id=s.node_id,
            incarnation=self._incarnation,
            role=control_pb2.ROLE_WORKER,
            pool=s.pool,
            labels=node.labels,
            model=self._engine.model,
            build=version("trimtab"),
            policy_schema=POLICY_SCHEMA,
            limits=codec.encode_limits(self._engine.limits),
            held=codec.encode_identity(held) if held.epoch else None,
            address=self._address,
            metrics_address=s.metrics,
            pid=os.getpid(),
            told=self._told,
        )

    def _scheduler_counters(self) -> dict[str, int]:
        """Running totals and high-water marks of the scheduler, under its own prefix: what never falls."""
        return {f"scheduler_{k}": int(v) for k, v in self._engine.stats().items() if k not in NOW}

    def report(self) -> control_pb2.Report:
        """How it fares now, and what was measured since it was asked before."""
        # An engine that changed by itself is told of here.
        self.say_limits()
        # Health looks twice a second; whoever drains must not be said to serve meanwhile.
        state = NodeState.DRAINING if self._serving.draining else self._health.state
        now = time.monotonic()
        taken = self._measuring.intervals.take(now)
        return codec.encode_report(
            Report(
                sequence=0,  # the link numbers them
                state=state,
                load=self._serving.load,
                steps=self._engine.pulse().step_no,
                counters={**self._measuring.counters, **self._scheduler_counters()},
                gauges=self._standing.report(now),
                sketches=taken.sketches,
                outliers=taken.outliers,
                interval_ms=taken.interval_ms,
            )
        )
