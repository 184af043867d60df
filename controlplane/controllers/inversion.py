"""Does REALTIME wait longer than BATCH at a worker? By the means of those that were first scheduled of late."""

from __future__ import annotations

from controlplane.controllers.decision import PolicyOf
from controlplane.controllers.recent import since
from controlplane.seen import NodeSeen, Window, counted
from trimtab.measures import BATCH_WAIT_MS, BATCH_WAITS, REALTIME_WAIT_MS, REALTIME_WAITS
from trimtab.policy import Mode

LEAST = 10
"""Requests of each workload; fewer say nothing."""
LEAST_MS = 100.0
"""A shorter wait hurts nobody."""
MARGIN = 1.5
"""Times what BATCH waits: most of its waiting is done in gateways, and a loaded worker has both wait about as long."""


def inverted(n: NodeSeen, policy: PolicyOf) -> str:
    """The figures, of the windows of `heal.inversion_s`; empty where it is as it should be, or too few requests say."""
    if not n.windows or not _waits_long(n.windows[-1]):
        return ""
    people = policy(n.node)
    if people.scheduler.mode != Mode.TRIMTAB:
        # Who wants order of arrival wants REALTIME to wait its turn.
        return ""
    windows = _spanning(n, people.heal.inversion_s)
    realtime, batch = counted(windows, REALTIME_WAITS), counted(windows, BATCH_WAITS)
    if min(realtime, batch) < LEAST:
        return ""
    realtime_ms = counted(windows, REALTIME_WAIT_MS) / realtime
    batch_ms = counted(windows, BATCH_WAIT_MS) / batch
    if realtime_ms <= max(MARGIN * batch_ms, LEAST_MS):
        return ""
    return (
        f"mean wait {realtime_ms:.0f} ms of {realtime} REALTIME requests, {batch_ms:.0f} ms of {batch} BATCH ones, "
        f"within {len(windows)} windows"
    )


def _waits_long(window: Window) -> bool:
    """It goes on: most windows end the question here."""
    waited_ms = window.counters.get(REALTIME_WAIT_MS, 0)
    return waited_ms > LEAST_MS * window.counters.get(REALTIME_WAITS, 0)


def _spanning(n: NodeSeen, span_s: float) -> list[Window]:
    """The newest windows that make up so much time; none where there is less."""
    ended = n.windows[-1].ended
    found = []
    for window in since(n, float("-inf")):
        found.append(window)
        if ended - window.begun >= span_s:
            return found
    return []
