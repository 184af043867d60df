"""The fleet as gateways get it: one message for all of them, made anew when its content has changed."""

from __future__ import annotations

from controlplane.fleet import Fleet, View
from trimtab import codec
from trimtab.v1 import control_pb2


class GatewayView:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._made: control_pb2.FleetView | None = None

    def now(self) -> control_pb2.FleetView:
        if self._made is None or self._made.version != self._fleet.version:
            self._made = encode_view(self._fleet.view)
        return self._made


def encode_view(view: View) -> control_pb2.FleetView:
    return control_pb2.FleetView(
        version=view.version,
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
            )
            for w in view.workers
        ],
    )
