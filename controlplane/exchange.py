"""Reports between replicas: each keeps the newest that its own nodes sent, and asks the others for theirs once a second.

So every replica folds the whole mesh's telemetry, whoever leads: a new leader sees at once what the old one saw, and any replica answers
`trimtab top`. A replica that is alone keeps nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from controlplane.fleet import Fleet
from controlplane.peers import Peers
from controlplane.telemetry import Telemetry
from trimtab.codec import decode_report
from trimtab.errors import InvalidRequest
from trimtab.messages import Hello, Report
from trimtab.v1 import admin_pb2, control_pb2

log = structlog.get_logger(__name__)

EVERY_S = 1.0
KEEP_S = 10.0
"""A replica that asks less often misses some: their counters come with later ones, their sketches are lost."""
MAX_BYTES = 2 << 20
"""Of one answer; the rest comes with the next."""


@dataclass(frozen=True, slots=True)
class _Kept:
    ordinal: int
    hello: Hello
    at: float
    report: control_pb2.Report | None


class Exchange:
    """Belongs to one event loop; `run` must be running."""

    def __init__(
        self, fleet: Fleet, telemetry: Telemetry, peers: Peers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._peers = peers
        self._clock = clock
        self._kept: deque[_Kept] = deque()
        self._ordinal = 0
        self._read: dict[str, int] = {}
        self._asked = 0.0

    def reported(self, hello: Hello, report: Report, sent: control_pb2.Report) -> None:
        """One of this replica's nodes has sent it."""
        self._telemetry.reported(hello, report, self._clock())
        self._keep(hello, sent)

    def ran_out_of_memory(self, hello: Hello) -> None:
        self._telemetry.ran_out_of_memory(hello, self._clock())
        self._keep(hello, None)

    def _keep(self, hello: Hello, report: control_pb2.Report | None) -> None:
        now = self._clock()
        if now - self._asked > KEEP_S:
            # Nobody asks: the replica is alone, or the others are away.
            self._kept.clear()
            return
        self._ordinal += 1
        self._kept.append(_Kept(self._ordinal, hello, now, report))
        while now - self._kept[0].at > KEEP_S:
            self._kept.popleft()

    def after(self, ordinal: int) -> admin_pb2.ListReportsResponse:
        """Those that came after that one."""
        now = self._asked = self._clock()
        answer = admin_pb2.ListReportsResponse(newest=self._ordinal)
        size = 0
        for kept in self._kept:
            if kept.ordinal <= ordinal:
                continue
            row = admin_pb2.KeptReport(
                ordinal=kept.ordinal,
                node_id=kept.hello.node.node_id,
                incarnation=kept.hello.incarnation,
                age_s=now - kept.at,
                report=kept.report,
                out_of_memory=kept.report is None,
            )
            size += row.ByteSize()
            if size > MAX_BYTES:
                answer.newest = kept.ordinal - 1
                break
            answer.reports.append(row)
        return answer

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            # Where this replica leads its controllers look anyway.
            self._telemetry.look(self._fleet, self._clock())
            requests = {name: admin_pb2.ListReportsRequest(after=self._read.get(name, 0)) for name in self._peers.names}
            self._read = {name: at for name, at in self._read.items() if name in requests}
            for name, answer in (await self._peers.ask_each("ListReports", requests)).items():
                if isinstance(answer, admin_pb2.ListReportsResponse):
                    self._take(name, answer)

    def _take(self, name: str, answer: admin_pb2.ListReportsResponse) -> None:
        now = self._clock()
        for row in answer.reports:
            member = self._fleet.member(row.node_id)
            if member is None or member.hello.incarnation != row.incarnation:
                # It is told who is connected elsewhere within half a second; what it said until then is missed.
                continue
            try:
                if row.out_of_memory:
                    self._telemetry.ran_out_of_memory(member.hello, now - row.age_s)
                else:
                    self._telemetry.reported(member.hello, decode_report(row.report), now - row.age_s)
            except InvalidRequest as e:
                log.warning("a replica has a report that this one does not understand", replica=name, because=e.message)
        # A replica that began anew counts from the start.
        self._read[name] = answer.newest
