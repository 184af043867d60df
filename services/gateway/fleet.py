"""The workers of one model, as `routing` wants to see them: looked at when asked, not copied for each request; and models that were there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from services.gateway.endpoint import Endpoint
from trimtab.messages import Workload
from trimtab.routing import Candidate, Ring

REMEMBERED_S = 4 * 3600.0
"""A model whose last worker has left is known for so long: clients are told to come again, and not that there is no such model."""
REMEMBERED = 256
"""Models at most; the one that left first goes first."""


class Remembered:
    """Models of workers that have left. `now` is in seconds."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}

    def add(self, model: str, now: float) -> None:
        """A worker of this model has left."""
        self._left.pop(model, None)
        self._left[model] = now
        if len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]

    def knows(self, model: str, now: float) -> bool:
        return model in self._left and now - self._left[model] < REMEMBERED_S


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
