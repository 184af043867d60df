"""A request's search for a worker: which were tried, which may be tried again, and how long it waits where there is none."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

from services.gateway.endpoint import Endpoint
from services.gateway.line import wake
from trimtab import routing
from trimtab.errors import ModelNotFound, NoWorker, QueueFull
from trimtab.messages import Request, Workload

if TYPE_CHECKING:
    from services.gateway.dispatch import Dispatch

AGAIN_S = 0.1
"""A worker that failed, and lives, is asked again after so long where there is nobody else."""

Life = tuple[str, int]
"""(node id, life) of a worker: restarted, it is another one."""
Nobody = NoWorker | QueueFull | ModelNotFound


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What those who wait alike have in common. `tenant` is whose share it takes from, None where it has its part of that already."""

    tenant: str | None
    need: routing.Need
    tried: frozenset[Life]

    def suits(self, worker: Endpoint) -> bool:
        """Whether this worker may take it."""
        fits = self.need is routing.Need.ANY or worker.isolates
        return fits and (worker.node_id, worker.life) not in self.tried


class Search:
    """`place` is the request's in every line."""

    def __init__(self, dispatch: Dispatch, request: Request, workload: Workload, tenant: str) -> None:
        self._dispatch = dispatch
        self._request = request
        self._workload = workload
        self._tenant = tenant
        self._place = next(dispatch.places)
        self._tried: set[Life] = set()
        self._spared: set[Life] = set()
        self._apart = False
        """A worker has said that another pool must take it."""
        self._need = routing.Need.ANY
        self._queued = False
        """It has a place among those who wait for room."""
        self._until: float | None = None
        """When a wait for a worker, other than for its room, is over."""
        self._woken: asyncio.Future[bool] | None = None

    def failed(self, worker: Life, *, again: bool, misplaced: bool = False) -> None:
        """It had the request, and no longer has. `again`: it may be asked once more, for want of another one. `misplaced`: another pool must
        take it.
        """
        self._tried.add(worker)
        if again:
            self._spared.add(worker)
        else:
            self._queued = False
        self._apart = self._apart or misplaced

    def wake(self) -> None:
        """Somebody who waits is to look at what has become of the request."""
        if self._woken is not None:
            wake(self._woken)

    def look(self, *, served: bool) -> tuple[Endpoint, routing.Pick] | None:
        """A worker that takes it now; None where it is not its turn (`served`: it was told that it is). NoWorker, ModelNotFound and QueueFull
        as `routing.pick` has them.
        """
        want = self._dispatch.want(self._request, self._workload, apart=self._apart)
        self._need = want.need
        if self._workload is Workload.BATCH and not self._may_begin(served):
            return None
        found = self._dispatch.pick(self._request.model, dataclasses.replace(want, avoid=frozenset(self._tried)))
        self._until = None
        self._queued = False
        return found

    def _may_begin(self, served: bool) -> bool:
        """It is its turn, or nobody was here before; and its tenant's share has room, or it has its part of that already."""
        if not served and self._dispatch.anybody_before(self._workload, self._request.model, self._place):
            return False
        return self._share is None or self._dispatch.admission.may_start(self._share)

    @property
    def _share(self) -> str | None:
        counted = self._dispatch.admission.has_started(self._request.request_id)
        return None if counted else self._tenant

    async def wait(self, nobody: Nobody | None, *, promised: bool) -> bool:
        """Until there may be a worker: True when it is this request's turn in its line. Raises `nobody` where it is not to wait (any longer).

        BATCH waits for room as long as its time allows, also while nobody is there for a moment; what a worker had taken on (`promised`) waits
        for another one, as long as `resume.wait_ms` says; who lives and may be asked again is, after a moment.
        """
        within_s: float | None = None
        if self._spared:
            within_s = AGAIN_S
        elif nobody is not None and not (self._queued or self._waits_for_room(nobody)):
            within_s = self._left() if promised else 0.0
            if within_s <= 0.0:
                raise nobody
        self._queued = self._queued or nobody is None or self._waits_for_room(nobody)
        kind = Kind(self._share, self._need, frozenset(self._tried))
        self._woken = asyncio.get_running_loop().create_future()
        try:
            turn = await self._dispatch.wait(
                self._workload, self._request.model, self._place, kind, self._woken, within_s
            )
        finally:
            self._woken = None
        if not turn:
            self._tried -= self._spared
            self._spared.clear()
        return turn

    def _waits_for_room(self, nobody: Nobody) -> bool:
        return self._workload is Workload.BATCH and isinstance(nobody, QueueFull)

    def _left(self) -> float:
        """Of the time that it waits for another worker."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._dispatch.policy().resume.wait_ms / 1000.0
        return self._until - now
