"""`trimtab up` as it follows what its pool wants: real worker processes (simulated engine), and a control plane that says what it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_supervisor import Recorder, exists
from tests.controlplane.scales import FakeControl, a_control
from trimtab.errors import PermissionDenied, StoreUnavailable
from trimtab.kit.process import free_port
from trimtab_cli import following, mesh
from trimtab_cli.following import Following
from trimtab_cli.plan import Plan, Sections, Tier, make
from trimtab_cli.supervisor import Supervisor

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _quick_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    for name in ("LISTEN", "METRICS"):
        monkeypatch.setenv(f"TRIMTAB_WORKER_{name}", f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(following, "LOOK_S", 0.05)
    monkeypatch.setattr(following, "AGAIN_S", (0.1, 1.0))


class Control(FakeControl):
    """Knows the workers that the supervisor runs, once they are healthy, as if they had joined; a drain ends one as the worker itself would."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.strangers: dict[str, str] = {}
        self.running: Callable[[], dict[str, int]] = dict
        self.on_drain = self._end

    def _end(self, name: str) -> bool:
        os.kill(self.running()[name], signal.SIGTERM)
        return True

    async def GetScale(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.workers = {**dict.fromkeys(self.running(), "default"), **self.strangers}
        return await super().GetScale(request, context)


@dataclasses.dataclass
class Up:
    """What `up` has at work: its workers alone, and whoever follows."""

    control: Control
    supervisor: Supervisor
    screen: Recorder
    run: Path

    def pids(self) -> set[str]:
        """Of run.json."""
        return set(json.loads(self.run.read_text())["pids"]) - {"up"}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.02)

    async def looks(self, times: int = 3) -> None:
        """The follower has asked so often since."""
        begun = self.control.asked
        await self.until(lambda: self.control.asked >= begun + times)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [facts for seen, facts in self.screen.events if seen == kind]


@asynccontextmanager
async def an_up(control: Control, tmp_path: Path, *extra: str, **flags: Any) -> AsyncIterator[Up]:
    sections: Sections = mesh.load_sections(None, {"engine": "simulated", "redis": "memory://", **flags}, extra)
    plan: Plan = dataclasses.replace(make(sections, tmp_path), control=control.address)
    screen = Recorder()
    record = mesh.Record(sections.up.mesh, plan)

    def changed() -> None:
        record.write(supervisor.pids)
        screen.event("changed", "")

    workers = [spec for spec in plan.specs if spec.tier is Tier.WORKER]
    supervisor = Supervisor(workers, tmp_path / "logs", screen, ready_s=PATIENCE_S, on_change=changed)
    await supervisor.start()
    record.write(supervisor.pids)
    control.running = lambda: {name: pid for name, pid in supervisor.pids.items() if served(screen, name)}
    watching = asyncio.create_task(supervisor.watch())
    follows = asyncio.create_task(Following(screen, sections, plan, supervisor).run())
    try:
        yield Up(control, supervisor, screen, tmp_path / "default" / "run.json")
    finally:
        assert not watching.done() and not follows.done()
        for task in (follows, watching):
            task.cancel()
        await asyncio.gather(follows, watching, return_exceptions=True)
        await supervisor.drain(patience_s=20.0)


def served(screen: Recorder, name: str) -> bool:
    return f"{name} ready" in [kind for kind, _ in screen.events]


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    async with a_control(Control()) as (fake, _):
        assert isinstance(fake, Control)
        yield fake


async def test_the_pool_grows_and_shrinks_as_it_is_wanted(control: Control, tmp_path: Path) -> None:
    async with an_up(control, tmp_path) as up:
        await up.looks()
        assert up.supervisor.workers == ["w0"], "nothing is said of the pool"
        control.wanted = 3
        await up.until(lambda: set(up.supervisor.pids) == {"w0", "w1", "w2"} and served(up.screen, "w2"))
        await up.until(lambda: up.pids() == {"w0", "w1", "w2"})
        assert [(f["name"], f["to"], f["start"]) for f in up.told("scaling")] == [("w1", 3, True), ("w2", 3, True)]
        pids = up.supervisor.pids
        await up.looks()
        control.surplus, control.wanted = ("w2", "w1"), 1
        await up.until(lambda: up.pids() == {"w0"})
        assert {r.node_id for r in control.drained} == {"w1", "w2"}
        assert len(control.drained) == 2, "each is told once"
        drain = control.drained[0]
        assert (drain.deadline_ms, drain.author) == (30_000, "trimtab up")
        assert drain.reason == "pool default wants 1 workers (the queue is long)"
        assert not exists(pids["w1"]) and not exists(pids["w2"])
        assert sorted(f["name"] for f in up.told("left")) == ["w1", "w2"]
        control.surplus, control.wanted = (), 2
        await up.until(lambda: up.pids() == {"w0", "w1"})
        assert not up.told("died") and not up.told("restarting")


@pytest.mark.parametrize("case", ["no leader", "nobody wanted", "left as it is", "no answer", "no store"])
async def test_without_an_answer_nothing_changes(control: Control, tmp_path: Path, case: str) -> None:
    async with an_up(control, tmp_path) as up:
        control.wanted, control.surplus = 3, ("w0",)
        match case:
            case "no leader":
                control.leader = ""
            case "nobody wanted":
                control.wanted = 0
            case "left as it is":
                control.most = 0
            case "no answer":
                control.error = PermissionDenied("GetScale needs the role viewer")
            case "no store":
                control.error = StoreUnavailable("it is away")
        # A look that was under way may still have had the old answer, which said nothing either.
        await up.looks(4)
        assert up.supervisor.workers == ["w0"]
        assert not control.drained and not up.told("scaling")
        assert len(up.told("scale_denied")) == (case == "no answer"), "told once"


async def test_others_workers_count_and_are_left_alone(control: Control, tmp_path: Path) -> None:
    control.strangers = {"x": "default", "w1": "default", "y": "elsewhere"}
    async with an_up(control, tmp_path) as up:
        control.wanted = 4
        await up.until(lambda: up.pids() == {"w0", "w2"})
        await up.looks()
        control.wanted, control.surplus = 2, ("x", "w1")
        await up.looks()
        assert set(up.supervisor.pids) == {"w0", "w2"}
        assert not control.drained


async def test_no_more_are_started_than_the_settings_allow(control: Control, tmp_path: Path) -> None:
    async with an_up(control, tmp_path, workers_limit="2") as up:
        control.wanted = 5
        await up.until(lambda: up.pids() == {"w0", "w1"})
        await up.looks()
        assert up.supervisor.workers == ["w0", "w1"]
        assert len(up.told("scale_limited")) == 1, "told once"


async def test_a_worker_that_can_not_start_is_told_and_tried_again_and_the_mesh_serves_on(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with an_up(control, tmp_path) as up:
        real = following.another_worker

        def broken(*given: Any) -> Any:
            spec, notes = real(*given)
            return dataclasses.replace(spec, argv=(*spec.argv, "--max-num-seqs", "0")), notes

        monkeypatch.setattr(following, "another_worker", broken)
        control.wanted = 2
        first = await up.screen.until("scale_failed")
        assert first["name"] == "w1"
        assert "max_num_seqs must be at least 1" in first["why"]
        assert first["again_in_s"] == 0.1
        await up.screen.until("scale_failed", 2)
        monkeypatch.setattr(following, "another_worker", real)
        await up.until(lambda: up.pids() == {"w0", "w1"})


async def test_a_drain_that_is_not_obeyed_is_asked_again(control: Control, tmp_path: Path) -> None:
    async with an_up(control, tmp_path, workers="2") as up:
        control.on_drain = lambda name: len(control.drained) > 1 and control._end(name)
        control.surplus, control.wanted = ("w1",), 1
        failed = await up.screen.until("scale_failed")
        assert failed["why"] == "it is not drained: NO_ANSWER: silence"
        await up.until(lambda: up.pids() == {"w0"})
        assert [r.node_id for r in control.drained] == ["w1", "w1"]
