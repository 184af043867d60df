"""The supervisor, over small stand-ins for the mesh's processes: they answer the store's health probe and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trimtab_cli import supervisor as supervising
from trimtab_cli.child import Child
from trimtab_cli.plan import Spec, Tier
from trimtab_cli.progress import Screen
from trimtab_cli.supervisor import GaveUp, StartFailed, Supervisor

ANSWERS_PING = """
import os, signal, socket, subprocess, sys
path, order = sys.argv[1:3]
def stop(*_):
    with open(order, "a") as f: f.write(os.path.basename(path) + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(9))
if "grandchild" in sys.argv:
    print("grandchild", subprocess.Popen(["sleep", "600"]).pid)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists(path): os.unlink(path)
with socket.socket(socket.AF_UNIX) as s:
    s.bind(path); s.listen()
    print("listening")
    while True:
        peer, _ = s.accept()
        peer.recv(64); peer.sendall(b"+PONG\\r\\n"); peer.close()
"""
DIES = "import sys; print('cannot open the thing'); sys.exit(7)"


class Recorder(Screen):
    """Keeps the events; wakes who waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.news = asyncio.Event()

    def event(self, kind: str, text: str, **facts: Any) -> None:
        self.events.append((kind, facts))
        self.news.set()

    def changed(self, name: str, state: Any, took_s: float) -> None:
        self.event(f"{name} {state.value}", "")

    async def until(self, kind: str, times: int = 1) -> dict[str, Any]:
        while True:
            found = [facts for seen, facts in self.events if seen == kind]
            if len(found) >= times:
                return found[-1]
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 10.0)


def a_spec(tmp_path: Path, name: str, tier: Tier = Tier.STORE, *words: str, script: str = ANSWERS_PING) -> Spec:
    path = tmp_path / name
    argv = (sys.executable, "-c", script, str(path), str(tmp_path / "order"), *words)
    return Spec(name, tier, argv, str(path), drain_s=0.0)


@asynccontextmanager
async def supervised(tmp_path: Path, *specs: Spec, ready_s: float = 10.0) -> AsyncIterator[tuple[Supervisor, Recorder]]:
    screen = Recorder()
    it = Supervisor(specs, tmp_path / "logs", screen, ready_s=ready_s, on_change=lambda: screen.event("changed", ""))
    try:
        yield it, screen
    finally:
        await it.drain(patience_s=1.0)


@pytest.fixture(autouse=True)
def _everyone_answers_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins speak the store's probe, whatever tier they play."""
    from trimtab_cli import probe

    async def until_healthy(spec: Spec) -> None:
        await probe._until(probe._pong, spec.address)

    monkeypatch.setattr(supervising, "until_healthy", until_healthy)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_a_control_plane_whose_store_never_answers_is_given_up_early_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.kit.process import free_port

    monkeypatch.setattr(supervising, "STORE_S", 6.0)
    argv = (sys.executable, "-m", "controlplane", "--redis", "redis://127.0.0.1:1")
    argv += ("--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}")
    spec = Spec("control", Tier.CONTROL, argv, str(tmp_path / "nobody"), drain_s=0.0)
    async with supervised(tmp_path, spec, ready_s=100.0) as (it, _):
        with pytest.raises(StartFailed, match=r"not healthy after 6 s: its store does not answer: .*--redis") as failed:
            await it.start()
    assert any(line.startswith(supervising.NO_STORE) for line in failed.value.tail)


def test_the_last_words_of_one_that_waits_are_its_warning(tmp_path: Path) -> None:
    control = Child(a_spec(tmp_path, "control", Tier.CONTROL), tmp_path)
    control.log.write_text(
        json.dumps({"level": "warning", "event": "policy not loaded yet", "because": "refused"})
        + "\n" + json.dumps({"level": "info", "event": "node joined"}) + "\n"
    )  # fmt: skip
    assert supervising.last_words(control) == "warning policy not loaded yet because=refused"


async def test_it_starts_all_and_drains_gateways_first_and_the_store_last(tmp_path: Path) -> None:
    tiers = {"store": Tier.STORE, "control": Tier.CONTROL, "w0": Tier.WORKER, "gateway": Tier.GATEWAY}
    async with supervised(tmp_path, *(a_spec(tmp_path, n, t) for n, t in tiers.items())) as (it, screen):
        await it.start()
        pids = it.pids
        assert set(pids) == set(tiers)
        assert all(exists(p) for p in pids.values())
        kinds = [kind for kind, _ in screen.events]
        assert kinds.index("store ready") < kinds.index("control starting")
        await it.drain()
    assert (tmp_path / "order").read_text().split() == ["gateway", "w0", "control", "store"]
    assert not any(exists(p) for p in pids.values())


async def test_a_child_that_cannot_start_shows_its_last_lines(tmp_path: Path) -> None:
    bad = a_spec(tmp_path, "w0", Tier.WORKER, script=DIES)
    async with supervised(tmp_path, a_spec(tmp_path, "store"), bad) as (it, _):
        with pytest.raises(StartFailed, match=r"w0 ended before it was ready \(exit code 7\)") as e:
            await it.start()
        assert e.value.tail == ["cannot open the thing"]
    assert not any(exists(p) for p in it.pids.values())


async def test_a_child_that_never_becomes_healthy_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    mute = a_spec(tmp_path, "w0", script="import signal; signal.pause()")
    async with supervised(tmp_path, mute, ready_s=0.2) as (it, _):
        with pytest.raises(StartFailed, match=r"was not healthy after 0\.2 s"):
            await it.start()


async def test_a_child_that_dies_is_reported_and_brought_back(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "w0")) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        first = it.pids["w0"]
        os.kill(first, signal.SIGKILL)
        died = await screen.until("died")
        assert (died["name"], died["how"], died["tail"]) == ("w0", "killed by SIGKILL", ["listening"])
        await screen.until("changed")
        assert it.pids["w0"] != first
        assert exists(it.pids["w0"])
        watching.cancel()


async def test_a_worker_that_was_told_to_end_stays_away_and_the_rest_goes_on(tmp_path: Path) -> None:
    names = {"control": Tier.CONTROL, "w0": Tier.WORKER, "w1": Tier.WORKER}
    async with supervised(tmp_path, *(a_spec(tmp_path, n, t) for n, t in names.items())) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        os.kill(it.pids["w0"], signal.SIGTERM)
        assert (await screen.until("left"))["name"] == "w0"
        await screen.until("changed")
        assert set(it.pids) == {"control", "w1"}
        assert "no_worker_left" not in [kind for kind, _ in screen.events]
        os.kill(it.pids["w1"], signal.SIGKILL)
        await screen.until("died")
        await screen.until("changed", 2)
        os.kill(it.pids["w1"], signal.SIGTERM)
        await screen.until("no_worker_left")
        os.kill(it.pids["control"], signal.SIGTERM)
        assert (await screen.until("restarting", 2))["name"] == "control"
        await screen.until("changed", 4)
        assert not watching.done()
        assert set(it.pids) == {"control"}
        watching.cancel()


async def test_what_a_dead_child_left_behind_is_ended(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.STORE, "grandchild")) as (it, screen):
        await it.start()
        log = (tmp_path / "logs" / "w0.log").read_text()
        grandchild = int(log.split("grandchild ")[1].split()[0])
        watching = asyncio.create_task(it.watch())
        os.kill(it.pids["w0"], signal.SIGKILL)
        await screen.until("died")
        await _gone(grandchild)
        watching.cancel()


async def test_a_child_that_dies_again_and_again_ends_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.001)
    async with supervised(tmp_path, a_spec(tmp_path, "w0")) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        for death in range(1, supervising.RESTARTS + 2):
            os.kill(it.pids["w0"], signal.SIGKILL)
            await screen.until("died", death)
            if death <= supervising.RESTARTS:
                await screen.until("changed", death)
        with pytest.raises(GaveUp, match=r"w0 died 6 times within 60 s"):
            await watching


async def test_a_commanded_restart_is_no_death_and_comes_at_once(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.WORKER)) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        pids = {it.pids["w0"]}
        for restart in range(1, supervising.RESTARTS + 3):
            os.kill(it.pids["w0"], signal.SIGUSR1)
            told = await screen.until("restarting", restart)
            assert (told["name"], told["in_s"], told["commanded"]) == ("w0", 0, True)
            await screen.until("changed", restart)
            pids.add(it.pids["w0"])
        assert len(pids) == supervising.RESTARTS + 3
        assert "died" not in [kind for kind, _ in screen.events]
        assert not watching.done()
        watching.cancel()


async def test_a_worker_that_only_ever_says_restart_is_dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.001)
    flag = tmp_path / "broken"
    script = f"import os, sys\nif os.path.exists({str(flag)!r}): sys.exit(75)\n" + ANSWERS_PING
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.WORKER, script=script)) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        flag.touch()
        os.kill(it.pids["w0"], signal.SIGUSR1)
        with pytest.raises(GaveUp):
            await watching
        assert len([f for kind, f in screen.events if kind == "restarting" and f.get("commanded")]) == 1
        assert [f["how"] for kind, f in screen.events if kind == "died"] == ["exit code 75"] * 6


async def test_only_a_worker_restarts_by_command(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "control", Tier.CONTROL)) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        os.kill(it.pids["control"], signal.SIGUSR1)
        assert (await screen.until("died"))["how"] == "exit code 75"
        watching.cancel()


async def test_a_worker_that_joins_is_tended_like_the_others_and_ends_before_the_store(tmp_path: Path) -> None:
    tiers = {"store": Tier.STORE, "w0": Tier.WORKER, "gateway": Tier.GATEWAY}
    async with supervised(tmp_path, *(a_spec(tmp_path, n, t) for n, t in tiers.items())) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        await asyncio.sleep(0)
        await it.add(a_spec(tmp_path, "w1", Tier.WORKER))
        assert it.workers == ["w0", "w1"]
        first = it.pids["w1"]
        os.kill(first, signal.SIGKILL)
        assert (await screen.until("died"))["name"] == "w1"
        await screen.until("changed", 2)
        assert exists(it.pids["w1"]) and it.pids["w1"] != first
        watching.cancel()
        await it.drain()
    order = (tmp_path / "order").read_text().split()
    assert (order[0], sorted(order[1:3]), order[3]) == ("gateway", ["w0", "w1"], "store")


async def test_a_worker_that_can_not_join_leaves_nothing_behind_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.WORKER)) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        await asyncio.sleep(0)
        with pytest.raises(StartFailed, match=r"w1 ended before it was ready \(exit code 7\)"):
            await it.add(a_spec(tmp_path, "w1", Tier.WORKER, script=DIES))
        assert (it.workers, set(it.pids)) == (["w0"], {"w0"})
        assert not watching.done()
        assert "changed" not in [kind for kind, _ in screen.events]
        watching.cancel()


async def test_a_worker_that_joined_and_dies_again_and_again_is_given_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.001)
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.WORKER)) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        await asyncio.sleep(0)
        await it.add(a_spec(tmp_path, "w1", Tier.WORKER))
        for death in range(1, supervising.RESTARTS + 2):
            os.kill(it.pids["w1"], signal.SIGKILL)
            await screen.until("died", death)
            if death <= supervising.RESTARTS:
                await screen.until("changed", death + 1)
        assert (await screen.until("worker_given_up"))["name"] == "w1"
        await screen.until("changed", supervising.RESTARTS + 2)
        assert (it.workers, watching.done()) == (["w0"], False)
        await it.add(a_spec(tmp_path, "w1", Tier.WORKER))
        assert it.workers == ["w0", "w1"], "the name is free again"
        watching.cancel()


async def test_a_worker_that_was_dismissed_stays_away_however_it_ends(tmp_path: Path) -> None:
    async with supervised(tmp_path, *(a_spec(tmp_path, n, Tier.WORKER) for n in ("w0", "w1", "w2"))) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        await asyncio.sleep(0)
        it.dismiss("w1", 600.0)
        assert it.workers == ["w0", "w2"]
        os.kill(it.pids["w1"], signal.SIGUSR2)
        assert (await screen.until("left"))["name"] == "w1"
        it.dismiss("w2", 0.01)
        assert (await screen.until("killed"))["name"] == "w2"
        assert (await screen.until("left", 2))["name"] == "w2"
        assert (set(it.pids), watching.done()) == ({"w0"}, False)
        assert "died" not in [kind for kind, _ in screen.events]
        watching.cancel()


async def test_a_restart_that_fails_counts_as_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.001)
    flag = tmp_path / "broken"
    spec = a_spec(
        tmp_path, "w0", script=f"import os, sys\nif os.path.exists({str(flag)!r}): sys.exit(3)\n" + ANSWERS_PING
    )
    async with supervised(tmp_path, spec) as (it, screen):
        await it.start()
        watching = asyncio.create_task(it.watch())
        flag.touch()
        os.kill(it.pids["w0"], signal.SIGKILL)
        with pytest.raises(GaveUp):
            await watching
        assert [f["how"] for kind, f in screen.events if kind == "died"] == ["killed by SIGKILL", *["exit code 3"] * 5]


async def test_a_child_that_overstays_its_drain_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, a_spec(tmp_path, "w0", Tier.STORE, "stubborn")) as (it, screen):
        await it.start()
        pid = it.pids["w0"]
        await it.drain(patience_s=0.1)
        assert "killed" in [kind for kind, _ in screen.events]
        assert not exists(pid)


async def test_logs_of_the_run_before_are_kept_once(tmp_path: Path) -> None:
    for _ in range(2):
        async with supervised(tmp_path, a_spec(tmp_path, "w0")) as (it, _screen):
            await it.start()
    assert (tmp_path / "logs" / "w0.log").read_text() == "listening\n"
    assert (tmp_path / "logs" / "w0.old.log").read_text() == "listening\n"


async def _gone(pid: int) -> None:
    """Until init has reaped it, in moments; the test's timeout bounds it."""
    while exists(pid) and "Z" not in _state(pid):
        await asyncio.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"
