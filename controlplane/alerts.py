"""Alerts that reach people: of what controllers hold now, each is told once when it begins, again while it lasts, and once when it is over.

The loop gives all live alerts each tick and goes on at once; a task of its own posts them to a webhook. What the rate limit holds back
is not lost while it lasts: it waits for its turn, the most severe first, and the next one that is told says how many waited. A new leader
knows nothing of what the old one told, and tells it again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog

from controlplane.controllers.decision import Alert, Severity
from controlplane.metrics import ControlMetrics

log = structlog.get_logger(__name__)

AGAIN_S = 600.0
"""An alert that lasts is told again so often at most."""
TIMEOUT_S = 5.0
"""What one try gets."""
TRIES = 3
PAUSE_S = 0.5
"""Before the second try; twice as long before each further one."""
KEPT = 100
"""Messages that wait for the webhook; beyond this the oldest are given up."""
RANKS = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
FIRING, RESOLVED = "firing", "resolved"
PASSING = (408, 425, 429)
"""Statuses below 500 that another try may turn."""


@dataclass(slots=True)
class _Known:
    """An alert that lasts, or whose end is to be told (`over`).

    `told_at` is None before it was ever told; `worse` once it is more severe than when it was. `counted` once it is among those held back.
    """

    alert: Alert
    told_at: float | None = None
    worse: bool = False
    counted: bool = False
    over: bool = False


class Alerts:
    """`clock` is monotonic seconds. Nothing that a webhook does is felt by `tell`."""

    def __init__(
        self,
        mesh: str,
        metrics: ControlMetrics,
        *,
        webhook: str = "",
        per_min: int = 10,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._mesh = mesh
        self._metrics = metrics
        self._webhook = webhook
        self._per_s = per_min / 60
        self._room = float(per_min)
        self._clock = clock
        self._pause_s = pause_s
        self._tokens = self._room
        self._filled_at = clock()
        self._known: dict[str, _Known] = {}
        self._held_back = 0
        self._queue: deque[dict[str, Any]] = deque()
        self._waiting = asyncio.Event()
        self._count()

    def tell(self, live: Iterable[Alert]) -> None:
        """These are all that last now; of two with one key the more severe counts. Never waits."""
        now = self._clock()
        self._take(live)
        self._fill(now)
        due = [k for k in self._known.values() if self._due(k, now)]
        for known in sorted(due, key=lambda k: (k.over, RANKS[k.alert.severity], k.alert.key)):
            if self._tokens >= 1:
                self._tokens -= 1
                self._say(known, now)
            elif not known.counted:
                known.counted = True
                self._hold_back(known.alert)
        self._count()

    def forget(self) -> None:
        """This replica leads no longer: whoever does tells what lasts, and nothing is over for it."""
        self._known.clear()
        self._count()

    @property
    def firing(self) -> tuple[Alert, ...]:
        return tuple(k.alert for k in self._known.values() if not k.over)

    def _take(self, live: Iterable[Alert]) -> None:
        worst: dict[str, Alert] = {}
        for alert in sorted(live, key=lambda a: RANKS[a.severity], reverse=True):
            worst[alert.key] = alert
        for key, alert in worst.items():
            known = self._known.get(key)
            if known is None or known.over:
                # Back before its end was told: then neither the end nor a new beginning is.
                self._known[key] = _Known(alert, known.told_at if known else None)
                continue
            if RANKS[alert.severity] < RANKS[known.alert.severity]:
                known.worse, known.counted = True, False
            known.alert = alert
        for key, known in list(self._known.items()):
            if key not in worst and known.told_at is None:
                del self._known[key]
            elif key not in worst and not known.over:
                known.over, known.counted = True, False

    def _due(self, known: _Known, now: float) -> bool:
        return known.over or known.worse or known.told_at is None or now - known.told_at >= AGAIN_S

    def _fill(self, now: float) -> None:
        self._tokens = min(self._room, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now

    def _say(self, known: _Known, now: float) -> None:
        alert = known.alert
        state = RESOLVED if known.over else FIRING
        facts = {
            "key": alert.key,
            "severity": alert.severity.value,
            "text": alert.text,
            "evidence": alert.evidence,
        }
        held_back, self._held_back = self._held_back, 0
        write = log.info if known.over or alert.severity is Severity.INFO else log.warning
        write("alert resolved" if known.over else "alert", **facts, suppressed=held_back)
        self._post({"mesh": self._mesh, **facts, "state": state, "at": _clock_text(), "suppressed": held_back})
        if known.over:
            del self._known[alert.key]
        else:
            known.told_at, known.worse, known.counted = now, False, False

    def _hold_back(self, alert: Alert) -> None:
        if not self._held_back:
            log.warning("alerts held back", per_min=round(self._room), first=alert.key)
        self._held_back += 1

    def _count(self) -> None:
        for severity in Severity:
            firing = sum(a.severity is severity for a in self.firing)
            self._metrics.alerts.labels(severity.value).set(firing)

    # ---- the webhook

    def _post(self, message: dict[str, Any]) -> None:
        if not self._webhook:
            return
        if len(self._queue) >= KEPT:
            given_up = self._queue.popleft()
            self._failed(given_up, f"{KEPT} newer ones wait")
        self._queue.append(message)
        self._waiting.set()

    async def run(self) -> None:
        """Posts what is told, one after another, for the life of the process."""
        if not self._webhook:
            return
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            while True:
                await self._waiting.wait()
                while self._queue:
                    await self._send(session, self._queue.popleft())
                self._waiting.clear()

    async def _send(self, session: aiohttp.ClientSession, message: dict[str, Any]) -> None:
        why = ""
        for nth in range(TRIES):
            if nth:
                await asyncio.sleep(self._pause_s * 2 ** (nth - 1))
            try:
                # Without following: a redirect makes a GET of it, which tells nobody anything.
                async with session.post(self._webhook, data=_body(message), headers=JSON, allow_redirects=False) as got:
                    if 200 <= got.status < 300:
                        return
                    why = f"status {got.status}"
                    if got.status < 500 and got.status not in PASSING:
                        break
            except TimeoutError:
                why = f"no answer within {TIMEOUT_S:g} s"
            except Exception as e:
                # Nothing that a webhook does ends the control plane. Its words may hold the address, and that a secret.
                why = type(e).__name__
        self._failed(message, why)

    def _failed(self, message: dict[str, Any], why: str) -> None:
        self._metrics.alert_webhook_failures.inc()
        host = urlsplit(self._webhook).hostname
        log.warning("alert webhook failed", key=message["key"], state=message["state"], host=host, error=why)


JSON = {"Content-Type": "application/json"}


def _body(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode()


def _clock_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
