"""The fleet as gateways get it: one message for all of them, made anew when its content has changed, or when a time in it has run on."""

from __future__ import annotations

import time
from collections.abc import Callable

from controlplane.breakers import Notice, Side
from controlplane.fleet import Fleet, View
from trimtab import codec
from trimtab.v1 import control_pb2

Notices = Callable[[str, str], Notice | None]
"""What gateways are to know of a worker's breaker, by node id and incarnation."""
Weight = Callable[[str], float]
"""What a worker gets of new work, by node id, next to what it would get by itself."""
SIDES = {Side.OPEN: control_pb2.BREAKER_FORCE_OPEN, Side.CLOSED: control_pb2.BREAKER_FORCE_CLOSED}
SAME_S = 0.1
"""A view with times in it that is so young is sent as it is."""


class GatewayView:
    def __init__(self, fleet: Fleet, notices: Notices) -> None:
        self._fleet = fleet
        self._notices = notices
        self.weight: Weight = lambda node_id: 1.0
        self._made: control_pb2.FleetView | None = None
        self._made_at = 0.0
        self._timed = False

    def now(self) -> control_pb2.FleetView:
        old = self._timed and time.monotonic() - self._made_at > SAME_S
        if self._made is None or self._made.version != self._fleet.version or old:
            self._made = encode_view(self._fleet.view, self._notices, self.weight)
            self._made_at = time.monotonic()
            self._timed = any(worker.HasField("breaker") for worker in self._made.workers)
        return self._made


def encode_view(view: View, notices: Notices, weight: Weight = lambda node_id: 1.0) -> control_pb2.FleetView:
    return control_pb2.FleetView(
        version=view.version,
        gateways=view.gateways,
        workers=[
            control_pb2.FleetWorker(
                node_id=w.node.node_id,
                incarnation=w.incarnation,
                address=w.address,
                pool=w.node.pool,
                model=w.model,
                labels=w.node.labels,
                limits=codec.encode_limits(w.node.limits),
                state=codec.encode_state(w.state),
                breaker=encode_notice(notices(w.node.node_id, w.incarnation)),
                weight=share if (share := weight(w.node.node_id)) != 1.0 else None,
            )
            for w in view.workers
        ],
    )


def encode_notice(notice: Notice | None) -> control_pb2.BreakerNotice | None:
    if notice is None:
        return None
    pb = control_pb2.BreakerNotice(forced_ms=notice.forced_ms)
    if notice.side is not None:
        pb.forced = SIDES[notice.side]
    if (trip := notice.trip) is not None:
        pb.gateway_id, pb.dimension, pb.because = trip.gateway_id, trip.dimension, trip.because
        pb.trip, pb.open_ms = trip.stamp, notice.open_ms
    return pb
