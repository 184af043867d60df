"""The gateway's side of the control stream: who it is, and what it reports."""

from __future__ import annotations

import os
import time
import uuid
from importlib.metadata import version

from services.control import PolicyKeeper
from services.gateway.admission import Admission
from services.gateway.endpoint import Endpoint
from services.gateway.metrics import GatewayMetrics
from trimtab import codec
from trimtab.breaking import Trip
from trimtab.messages import Load, NodeState, Report
from trimtab.policy import POLICY_SCHEMA
from trimtab.v1 import control_pb2


def breaker_tripped(endpoint: Endpoint, trip: Trip) -> control_pb2.NodeEvent:
    """What the others are to hear when a worker's breaker opens here."""
    event = control_pb2.BreakerTripped(
        node_id=endpoint.node_id,
        incarnation=endpoint.incarnation,
        dimension=trip.dimension.value,
        open_ms=int(trip.open_ms),
        because=trip.because,
    )
    return control_pb2.NodeEvent(breaker_tripped=event)


class Identification:
    """What this process says of itself to the control plane."""

    def __init__(
        self,
        node_id: str,
        address: str,
        metrics_address: str,
        keeper: PolicyKeeper,
        admission: Admission,
        metrics: GatewayMetrics,
    ) -> None:
        self._node_id = node_id
        self._address = address
        self._metrics_address = metrics_address
        self._keeper = keeper
        self._admission = admission
        self._metrics = metrics
        self._incarnation = uuid.uuid4().hex

    def hello(self) -> control_pb2.Hello:
        held = self._keeper.held
        return control_pb2.Hello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            role=control_pb2.ROLE_GATEWAY,
            build=version("trimtab"),
            policy_schema=POLICY_SCHEMA,
            held=codec.encode_identity(held) if held.epoch else None,
            address=self._address,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
        )

    def report(self) -> control_pb2.Report:
        """Load here means requests: running are those that a worker has accepted."""
        a = self._admission
        waiting = sum(a.unaccepted.values())
        state = NodeState.DRAINING if a.draining else NodeState.SERVING
        taken = self._metrics.intervals.take(time.monotonic())
        return codec.encode_report(
            Report(
                sequence=0,  # the link numbers them
                state=state,
                load=Load(running=len(a.live) - waiting, waiting=waiting),
                counters=self._metrics.counters,
                gauges=a.gauges(),
                sketches=taken.sketches,
                interval_ms=taken.interval_ms,
            )
        )
