"""Alerts on a clock of the test's own, and at a webhook that is a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from controlplane.alerts import AGAIN_S, KEPT, TRIES, Alerts
from controlplane.controllers.decision import Alert, Severity
from controlplane.metrics import ControlMetrics
from controlplane.settings import ControlSettings
from trimtab.kit.process import free_port
from trimtab.kit.rpc import cancel_and_wait

PATIENCE_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def an_alert(key: str = "oom/w0", severity: Severity = Severity.WARNING, text: str = "w0 ran out of memory") -> Alert:
    return Alert(key, severity, text, "31 running, safe 12")


class Room:
    """Alerts, and what they said on the log."""

    def __init__(self, **given: Any) -> None:
        self.clock = Clock()
        self.metrics = ControlMetrics(CollectorRegistry())
        self.alerts = Alerts("m1", self.metrics, clock=self.clock, **given)

    def tell(self, *live: Alert, after_s: float = 1.0) -> list[dict[str, Any]]:
        self.clock.now += after_s
        with capture_logs() as said:
            self.alerts.tell(live)
        return list(said)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def events(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["event"], line["key"]) for line in said]


@pytest.fixture
def room() -> Room:
    return Room()


def test_an_alert_is_told_once_when_it_begins_and_once_when_it_is_over(room: Room) -> None:
    [line] = room.tell(an_alert())
    assert line["event"] == "alert" and line["log_level"] == "warning"
    assert (line["key"], line["severity"], line["evidence"]) == ("oom/w0", "warning", "31 running, safe 12")
    assert room.tell(an_alert()) == []
    assert events(room.tell()) == [("alert resolved", "oom/w0")]
    assert room.tell() == []


def test_while_it_lasts_it_is_told_again_each_ten_minutes(room: Room) -> None:
    told = [i for i in range(1, 1802) if room.tell(an_alert())]
    assert told == [1, 1 + int(AGAIN_S), 1 + 2 * int(AGAIN_S), 1 + 3 * int(AGAIN_S)]


def test_one_that_becomes_more_severe_is_told_at_once_and_its_end_once(room: Room) -> None:
    room.tell(an_alert())
    [line] = room.tell(an_alert(severity=Severity.CRITICAL))
    assert (line["event"], line["severity"]) == ("alert", "critical")
    assert room.tell(an_alert(severity=Severity.WARNING)) == []
    assert events(room.tell()) == [("alert resolved", "oom/w0")]


def test_of_two_with_one_key_the_more_severe_is_told(room: Room) -> None:
    [line] = room.tell(an_alert(severity=Severity.CRITICAL), an_alert(severity=Severity.INFO))
    assert line["severity"] == "critical"


def test_beyond_the_rate_the_most_severe_go_first_and_the_rest_wait_and_are_counted() -> None:
    room = Room(per_min=2)
    live = [an_alert(f"k{i}") for i in range(4)] + [an_alert("bad", Severity.CRITICAL)]
    said = room.tell(*live)
    assert events([line for line in said if line["event"] == "alert"]) == [("alert", "bad"), ("alert", "k0")]
    [held] = [line for line in said if line["event"] == "alerts held back"]
    assert (held["per_min"], held["first"]) == (2, "k1")
    assert room.tell(*live) == []
    [later] = room.tell(*live, after_s=30.0)
    assert (later["key"], later["suppressed"]) == ("k1", 3)
    [later] = room.tell(*live, after_s=30.0)
    assert (later["key"], later["suppressed"]) == ("k2", 0)


def test_an_end_that_had_to_wait_is_told_unless_it_began_again_meanwhile() -> None:
    room = Room(per_min=1)
    room.tell(an_alert("a"))
    assert [line["event"] for line in room.tell()] == ["alerts held back"]
    assert room.tell(an_alert("a")) == []
    assert events(room.tell(after_s=60.0)) == [("alert resolved", "a")]


def test_one_that_was_never_told_has_no_end_to_tell() -> None:
    room = Room(per_min=1)
    room.tell(an_alert("a"), an_alert("b"))
    assert events(room.tell(an_alert("a"), after_s=60.0)) == []
    assert events(room.tell(after_s=60.0)) == [("alert resolved", "a")]


def test_the_gauge_shows_what_lasts_by_severity_also_what_was_held_back() -> None:
    room = Room(per_min=1)
    assert room.metric("trimtab_control_alerts", severity="critical") == 0
    room.tell(an_alert("a"), an_alert("b"), an_alert("c", Severity.CRITICAL))
    assert room.metric("trimtab_control_alerts", severity="warning") == 2
    assert room.metric("trimtab_control_alerts", severity="critical") == 1
    room.tell()
    assert room.metric("trimtab_control_alerts", severity="warning") == 0


def test_a_replica_that_leads_no_longer_says_nothing_is_over_and_tells_anew_when_it_leads_again(room: Room) -> None:
    room.tell(an_alert())
    room.alerts.forget()
    assert room.metric("trimtab_control_alerts", severity="warning") == 0
    assert events(room.tell(an_alert())) == [("alert", "oom/w0")]


# ---- the webhook


class Hook:
    """A webhook that answers with `statuses` in turn, then 204; `got` has what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.got: list[dict[str, Any]] = []
        self.types: list[str] = []
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append(json.loads(await request.text()))
        self.types.append(request.content_type)
        self.changed.set()
        await self.open.wait()
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)

    async def until(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.got) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.got


@asynccontextmanager
async def a_hook(*statuses: int) -> AsyncIterator[Hook]:
    hook = Hook(*statuses)
    app = web.Application()
    app.router.add_post("/hook", hook.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    hook.url = f"http://127.0.0.1:{port}/hook"
    try:
        yield hook
    finally:
        hook.open.set()
        await runner.cleanup()


@asynccontextmanager
async def posting(url: str, **given: Any) -> AsyncIterator[Room]:
    room = Room(webhook=url, pause_s=0.01, **given)
    task = asyncio.create_task(room.alerts.run())
    try:
        yield room
    finally:
        await cancel_and_wait(task)


async def failures(room: Room, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while room.metric("trimtab_control_alert_webhook_failures_total") != count:
            await asyncio.sleep(0.01)


async def test_the_webhook_gets_what_fires_and_what_is_over_in_order() -> None:
    async with a_hook() as hook, posting(hook.url) as room:
        room.tell(an_alert())
        room.tell()
        first, second = await hook.until(2)
        assert hook.types == ["application/json"] * 2
    at = first.pop("at")
    assert at.endswith("Z") and len(at) == len("2026-01-01T00:00:00Z")
    assert first == {
        "mesh": "m1",
        "key": "oom/w0",
        "severity": "warning",
        "text": "w0 ran out of memory",
        "evidence": "31 running, safe 12",
        "state": "firing",
        "suppressed": 0,
    }
    assert (second["key"], second["state"]) == ("oom/w0", "resolved")


async def test_a_webhook_that_stumbles_is_tried_again_and_one_that_refuses_is_not() -> None:
    async with a_hook(503, 429, 204, 404) as hook, posting(hook.url) as room:
        room.tell(an_alert("a"))
        assert [m["key"] for m in await hook.until(TRIES)] == ["a"] * TRIES
        room.tell(an_alert("a"), an_alert("b"), an_alert("c"))
        await failures(room, 1)
        await hook.until(TRIES + 2)
    assert [m["key"] for m in hook.got[TRIES:]] == ["b", "c"]


async def test_one_that_stays_broken_counts_as_a_failure_and_the_log_does_not_give_its_address_away() -> None:
    async with a_hook(*[500] * TRIES) as hook, posting(hook.url + "?token=secret") as room:
        with capture_logs() as said:
            room.alerts.tell([an_alert()])
            await failures(room, 1)
    assert len(hook.got) == TRIES
    [line] = [x for x in said if x["event"] == "alert webhook failed"]
    assert (line["host"], line["error"], "secret" in str(line)) == ("127.0.0.1", "status 500", False)


async def test_nobody_at_the_webhook_is_a_failure_and_the_next_one_is_tried() -> None:
    async with posting(f"http://127.0.0.1:{free_port()}/") as room:
        room.tell(an_alert("a"))
        await failures(room, 1)
        room.tell(an_alert("a"), an_alert("b"))
        await failures(room, 2)


async def test_a_webhook_that_hangs_never_holds_up_who_tells_and_what_waits_for_it_is_bounded() -> None:
    async with a_hook() as hook, posting(hook.url, per_min=1000) as room:
        hook.open.clear()
        room.tell(an_alert("first"))
        await hook.until(1)
        # The hook holds its answer back meanwhile: were it waited for, this would never come to its end.
        room.tell(an_alert("first"), *(an_alert(f"k{i:03}") for i in range(KEPT + 20)))
        assert room.metric("trimtab_control_alert_webhook_failures_total") == 20
        hook.open.set()
        got = await hook.until(1 + KEPT)
    assert [m["key"] for m in got[1:3]] == ["k020", "k021"]


async def test_without_a_webhook_nothing_is_posted_and_the_task_ends() -> None:
    room = Room()
    room.tell(an_alert())
    await asyncio.wait_for(room.alerts.run(), PATIENCE_S)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alert_webhook": "ftp://x"}, "alert_webhook must be an http:// or https:// address"),
        ({"alert_webhook": "http://"}, "alert_webhook must be"),
        ({"alert_webhook": "http://h:99999/"}, "alert_webhook must be"),
        ({"alert_per_min": 0}, "alert_per_min must be 1 to 1000"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="control alert") as e:
        ControlSettings(**given)
    assert says in str(e.value)
    ControlSettings(alert_webhook="https://hooks.example.org/T1/x", alert_per_min=1)
