"""What a process tells systemd: through a real socket, in the words of sd_notify(3)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.units import Manager
from trimtab.kit import notify
from trimtab.kit.notify import Notifier, from_environment

MORE_TIME = f"EXTEND_TIMEOUT_USEC={int(notify.PATIENCE_S * 1e6)}"


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@trimtab-test-{os.getpid()}"
    manager = Manager(address)
    yield manager
    manager.close()


def of(manager: Manager, **more: str) -> Notifier:
    return from_environment({"NOTIFY_SOCKET": manager.address, **more}, pid=7)


def test_it_says_that_it_is_ready_and_what_it_does(manager: Manager) -> None:
    of(manager).ready("serves m")
    assert manager.read() == ["READY=1", "STATUS=serves m"]


def test_the_first_ping_comes_with_ready(manager: Manager) -> None:
    of(manager, WATCHDOG_USEC="3000000", WATCHDOG_PID="7").ready("serves m")
    assert manager.read() == ["READY=1", "STATUS=serves m", "WATCHDOG=1"]


def test_without_progress_there_is_no_ping_and_the_reason_is_told_once(manager: Manager) -> None:
    notifier = of(manager, WATCHDOG_USEC="3000000")
    for moves in (True, False, False, True):
        notifier.ping(moves)
    assert manager.read() == ["WATCHDOG=1"]
    assert manager.read() == ["STATUS=no progress: the watchdog gets no ping"]
    assert manager.read() == ["STATUS=moves again", "WATCHDOG=1"]


def test_each_ping_of_one_that_stops_asks_for_more_time(manager: Manager) -> None:
    notifier = of(manager)
    notifier.ping(True)  # neither watchdog nor stop: nothing to say
    notifier.stopping("draining")
    notifier.ping(True)
    assert manager.read() == ["STOPPING=1", "STATUS=draining", MORE_TIME]
    assert manager.read() == [MORE_TIME]


async def test_pings_come_three_times_as_often_as_the_watchdog_wants_them(manager: Manager) -> None:
    notifier = of(manager, WATCHDOG_USEC="300000")
    assert notifier.pace_s == pytest.approx(0.1)
    assert of(manager, WATCHDOG_USEC="60000000").pace_s == notify.PACE_S
    pinging = asyncio.create_task(notifier.pings())
    for _ in range(2):
        assert await asyncio.to_thread(manager.read) == ["WATCHDOG=1"]
    pinging.cancel()


def test_another_process_s_watchdog_is_not_ours(manager: Manager) -> None:
    notifier = of(manager, WATCHDOG_USEC="3000000", WATCHDOG_PID="8")
    notifier.ping(True)
    notifier.status("here")
    assert manager.read() == ["STATUS=here"]


def test_no_child_inherits_the_socket() -> None:
    env = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    from_environment(env)
    assert env == {"HOME": "/"}


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "/"])
async def test_without_a_socket_of_this_machine_nothing_is_said(address: str) -> None:
    notifier = from_environment({"NOTIFY_SOCKET": address})
    notifier.ready("x")
    async with asyncio.timeout(60):
        await notifier.pings()


def test_a_manager_that_is_gone_is_no_reason_to_end(tmp_path: Path) -> None:
    notifier = from_environment({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "3000000"})
    notifier.ready("x")
    manager = Manager(str(tmp_path / "nobody"))
    notifier.ping(True)
    assert manager.read() == ["WATCHDOG=1"]
    manager.close()
