"""The workers of one model, as `routing` wants to see them: looked at when asked, not copied for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from services.gateway.endpoint import Endpoint
from trimtab.messages import Workload
from trimtab.routing import Candidate, Ring


class Workers:
    """Made anew when a worker of the model joins or leaves."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self.ring = Ring([e.node_id for e in endpoints])
        self.by_id = {e.node_id: e for e in endpoints}

    def seen(self, workload: Workload, now_ms: float) -> View:
        return View(self.endpoints, workload, now_ms)


class View(Sequence[Candidate]):
    """Candidates for one request at one moment."""

    def __init__(self, endpoints: Sequence[Endpoint], workload: Workload, now_ms: float) -> None:
        self._endpoints = endpoints
        self._workload = workload
        self._now_ms = now_ms

    def __len__(self) -> int:
        return len(self._endpoints)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [e.candidate(self._workload, self._now_ms) for e in self._endpoints[index]]
        return self._endpoints[index].candidate(self._workload, self._now_ms)
