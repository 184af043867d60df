"""`trimtab top`: what it shows, as text and JSON, in 80 columns, and in a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane import render_top, top
from controlplane.cli_top import top as verb
from tests.controlplane import folded
from tests.controlplane.folded import Tells, a_gateway, a_telemetry, a_window, a_worker, windows
from tests.controlplane.mesh import PATIENCE_S, Mesh, a_mesh
from trimtab import measures
from trimtab.kit.process import free_port
from trimtab.v1 import admin_pb2, control_pb2, policy_pb2

NOW = 1_800_000_000_000


def a_policy(revision: int = 1, **store: Any) -> admin_pb2.GetPolicyResponse:
    state = admin_pb2.StoreState(**{"connected": True, "writable": True, "description": "memory", **store})
    found = admin_pb2.GetPolicyResponse(spec_version=1, store=state)
    found.snapshot.identity.CopyFrom(policy_pb2.SnapshotIdentity(epoch=1, revision=revision))
    return found


def shown(*nodes: Any, policy: Any = None, height: int | None = None, width: int = 80, **given: Any) -> str:
    view = top.view(a_telemetry(*nodes, **given), policy or a_policy(), "prod")
    return render_top.plain(render_top.frame(view, NOW, height=height, width=width))


def row_of(text: str, node_id: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(node_id)]
    return line.split()


def slow(ttft_ms: float) -> list[Any]:
    return windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, ttft_ms=ttft_ms))


def a_decision(i: int = 0, **given: Any) -> admin_pb2.ControllerDecision:
    whole = {
        "controller": "batch",
        "at_unix_ms": NOW - 12_000 - i,
        "text": "batch.active ×0.8 for node/w0",
        "reason": "P99 TTFT 812 ms over 500 in 3 windows of 5 s",
        **given,
    }
    return admin_pb2.ControllerDecision(**whole)


def test_a_healthy_worker_has_one_line_with_all_of_it() -> None:
    text = shown(a_gateway(), a_worker())
    assert row_of(text, "w0") == ["w0", "serving", "25", "100", "10", "40", "1", "2", "50", "12/48"]
    assert "trimtab top prod" in text and "policy 1.1 (version 1)" in text and "c0 leads" in text
    assert "1 worker, 1 gateway" in text and "pool default: 1 of 1 wanted" in text
    assert "1 gateway: 0 REALTIME and 12 BATCH wait" in text and "P99 130 ms" in text
    assert "no decision yet" in text
    assert "!" not in text


def test_what_nobody_said_is_a_dash_and_never_a_zero() -> None:
    bare = a_worker(gauges=dict.fromkeys(measures.GAUGES), windows=[], batch_active=None, batch_active_spec=None)
    assert row_of(shown(bare), "w0") == ["w0", "serving", "–", "–", "–", "–", "–", "–", "–", "12"]
    fresh = a_worker(age_s=None, windows=[], state=control_pb2.NODE_STATE_STARTING)
    text = shown(fresh)
    assert row_of(text, "w0") == ["w0", "starting", "–", "–", "–", "–", "–", "–", "–", "–/48"]
    assert "it has reported nothing yet" in text


def test_a_silent_worker_shows_nothing_of_now_and_for_how_long_it_has_been_silent() -> None:
    old = windows(lambda ago: a_window(100 - ago, 60 + 5.0 * ago))
    text = shown(a_worker(stale=True, age_s=70.0, windows=old))
    assert row_of(text, "w0")[2:] == ["–", "–", "–", "–", "–", "–", "–", "–/48"]
    assert "last heard of 1m 10s ago" in text and "1 silent" in text


def test_over_the_objective_is_marked_and_says_by_how_much() -> None:
    text = shown(a_worker(windows=slow(1200.0)))
    assert row_of(text, "w0")[3] == "1200!"
    assert "over: TTFT P99 1200 ms of 500, n=150" in text and "1 over the objective" in text
    itl = windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, itl_ms=300.0))
    assert row_of(shown(a_worker(windows=itl)), "w0")[5] == "300!"


def test_the_running_set_shows_what_people_set_and_what_loops_made_of_it() -> None:
    assert row_of(shown(a_worker(batch_active=38)), "w0")[-1] == "12/48→38"


def test_breaker_policy_and_refusal_stand_below_the_worker() -> None:
    two = policy_pb2.SnapshotIdentity(epoch=1, revision=2)
    refuses = a_worker("w1", refused=two, refused_because="ABOVE_ENGINE_LIMIT: batch.active = 64 is above 48")
    text = shown(a_worker("w0", breaker="open (g0: errors)"), refuses, policy=a_policy(2))
    assert "  breaker: open (g0: errors)" in text
    assert "  policy 1.1, the newest is 1.2" in text
    assert "  refused the policy, has 1.1: ABOVE_ENGINE_LIMIT: batch.active = 64 is above 48" in text
    assert "1 refused the policy" in text and "1 behind the policy" in text


def test_the_worst_stand_first() -> None:
    nodes = [
        a_worker("fine"),
        a_worker("busy", gauges={measures.KV_USED: 0.8}),
        a_worker("over", windows=slow(600.0)),
        a_worker("far-over", windows=slow(2000.0)),
        a_worker("tripped", breaker="open"),
        a_worker("silent", stale=True, age_s=9.0),
        a_worker("lost", connected=False, age_s=9.0),
        a_worker("hung", state=control_pb2.NODE_STATE_HUNG),
    ]
    order = [row.node_id for row in top.view(a_telemetry(*nodes), a_policy()).workers]
    assert order == ["hung", "lost", "silent", "tripped", "far-over", "over", "busy", "fine"]


def test_more_workers_than_rows_are_the_worst_and_how_many_more() -> None:
    nodes = [a_worker(f"w{i:02}", windows=slow(100.0 + 60 * i)) for i in range(40)]
    text = shown(*nodes, height=24)
    lines = text.splitlines()
    first = [line.split()[:2] for line in lines].index(["WORKER", "STATE"]) + 1
    assert lines[first].startswith("w39") and len(lines) < 24
    [more] = [line for line in lines if line.startswith("and ")]
    names = [line.split()[0] for line in lines if re.match(r"w\d\d ", line)]
    assert more == f"and {40 - len(names)} more, no worse; all of them: trimtab top --once"
    assert names == [f"w{39 - i}" for i in range(len(names))] and len(names) >= 3
    assert "and" not in shown(*nodes).split()


def test_loops_show_modes_moves_and_why_they_hold() -> None:
    loops = [
        admin_pb2.ControllerTelemetry(name="batch", mode="on", moves=2),
        admin_pb2.ControllerTelemetry(name="heal", mode="advise"),
        admin_pb2.ControllerTelemetry(name="scale", mode="off"),
        admin_pb2.ControllerTelemetry(name="memory", mode="on", holds=["w0 says nothing of kv_used"]),
    ]
    text = shown(controllers=loops)
    assert "loops on: batch (2), memory; advise: heal; off: scale" in text
    assert "  memory holds: w0 says nothing of kv_used" in text


def test_the_last_five_decisions_have_age_and_reason() -> None:
    many = [a_decision(i) for i in range(9)]
    text = shown(decisions=many)
    assert text.count("12s ago  batch: batch.active ×0.8 for node/w0") == 5
    assert "P99 TTFT 812 ms" in text
    text = shown(decisions=[a_decision(advised=True), a_decision(failed="pinned by ada")])
    assert "batch (advice)" in text and "FAILED: pinned by ada" in text


def test_nobody_leads_and_a_store_away_are_said_in_the_head() -> None:
    text = shown(leader_id="", policy=a_policy(connected=False, description="redis at h:1: refused"))
    assert "NOBODY LEADS: no loop runs" in text and "store AWAY: redis at h:1: refused" in text


LONG = "llm-worker-7.inference.production.svc.cluster.local"


def everything() -> list[Any]:
    bad = a_worker(
        LONG,
        windows=slow(1_234_567.0),
        state=control_pb2.NODE_STATE_DRAINING,
        gauges={measures.REALTIME_WAITING: 123_456.0, measures.BATCH_WAITING: 9_999_999.0, measures.KV_USED: 1.0},
        load={"running": 999},
        batch_active=512,
        batch_active_spec=999,
        breaker="open for 8m yet, on errors: 10 of 20 outcomes were engine faults within 10 s, said gateway g0",
        refused=policy_pb2.SnapshotIdentity(epoch=1, revision=2),
        refused_because="ABOVE_ENGINE_LIMIT: batch.active = 4096 is above what the engine of this worker can do (max_num_seqs = 64)",
    )
    return [bad, a_worker(), *(a_gateway(f"gateway-{i}.edge.svc", stale=True, age_s=9.0) for i in range(3))]


@pytest.mark.parametrize("height", [None, 24, 50])
def test_no_line_is_longer_than_80_and_nothing_that_matters_is_cut(height: int | None) -> None:
    loops = [
        admin_pb2.ControllerTelemetry(name=name, mode=mode, moves=3, holds=[f"{LONG} says nothing of kv_used"])
        for name, mode in zip(folded.LOOPS, ("on", "advise", "off") * 9, strict=False)
    ]
    pools = [admin_pb2.PoolScale(pool=f"pool-{LONG}-{i}", wanted=3 + i, running=3) for i in range(9)]
    decisions = [a_decision(i, text=f"batch.active ×0.8 for node/{LONG}", reason="why " * 60) for i in range(9)]
    policy = a_policy(2, connected=False, description="no answer from " + "h" * 100)
    text = shown(*everything(), controllers=loops, pools=pools, decisions=decisions, policy=policy, height=height)
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert "NOBODY" not in text and "6 more pools" in joined and f"and {len(loops) - 3} more holds" in joined
    if height != 24:
        assert (
            LONG in text
            and "999/999→512" in joined
            and "123k" in joined
            and "10M" in joined
            and "max_num_seqs = 64" in joined
            and "said gateway g0" in joined
        )
    if height is not None:
        assert len(text.splitlines()) <= max(height, 30)


# ---- the verb


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> Tells:
    return Tells(a_telemetry()).instead(monkeypatch)


@pytest.fixture
async def mesh(quiet: None, tells: Tells) -> AsyncIterator[Mesh]:
    async with a_mesh() as found:
        yield found


async def typed(mesh: Mesh, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, verb, [*words, "--control", mesh.address])


async def test_without_a_terminal_it_is_shown_once(mesh: Mesh, tells: Tells) -> None:
    result = await typed(mesh)
    assert (result.exit_code, result.stderr) == (0, "")
    assert row_of(result.stdout, "w0")[1] == "serving" and "\x1b" not in result.stdout
    assert [(r.windows, r.decisions) for r in tells.asked] == [(top.WINDOWS, top.DECISIONS)]


async def test_json_once_is_one_object_with_null_for_what_is_missing(mesh: Mesh, tells: Tells) -> None:
    tells.answer = a_telemetry(a_worker(gauges={measures.KV_USED: None}, windows=[]))
    found = json.loads((await typed(mesh, "--once", "--json")).stdout)
    [worker] = found["workers"]
    assert (worker["kv_used"], worker["ttft_ms"], worker["realtime_waiting"]) == (None, None, 1.0)
    assert (found["leader_id"], found["gateways"], found["tick_ms"]) == ("c0", [], 2.0)


def test_an_unreachable_control_plane_exits_3() -> None:
    result = CliRunner().invoke(verb, ["--once", "--control", f"127.0.0.1:{free_port()}"])
    assert result.exit_code == 3


async def test_json_without_once_is_a_line_for_each_look_until_it_is_ended(mesh: Mesh, tells: Tells) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trimtab_cli", "top", "--json", "--interval", "0.2", "--control", mesh.address,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            first, second = [json.loads(await process.stdout.readline()) for _ in range(2)]
            assert first["workers"] == second["workers"] and second["at_unix_ms"] > first["at_unix_ms"]
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Terminal:
    """A real terminal of 24 lines and 80 columns with `trimtab top` in it."""

    def __init__(self, address: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        words = [sys.executable, "-m", "trimtab_cli", "top", "--interval", "0.2", "--control", address]
        env = {**os.environ, "TERM": "xterm-256color"}
        env.pop("COLUMNS", None)
        env.pop("LINES", None)
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        self.seen = ""
        os.set_blocking(self.ours, False)

    async def until(self, text: str) -> None:
        """Once it was shown, after what was asked for before."""
        async with asyncio.timeout(3 * PATIENCE_S):
            while text not in self.seen:
                try:
                    self.seen += os.read(self.ours, 65536).decode(errors="replace")
                except BlockingIOError:
                    assert self.process.poll() is None, self.seen
                    await asyncio.sleep(0.02)
        self.seen = self.seen.partition(text)[2]

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    async def ended(self) -> int:
        async with asyncio.timeout(3 * PATIENCE_S):
            while self.process.poll() is None:
                drain(self.ours)
                await asyncio.sleep(0.02)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def drain(fd: int) -> None:
    """So that a full pipe never holds up who writes into it."""
    try:
        os.read(fd, 65536)
    except BlockingIOError:
        return


@pytest.mark.slow
async def test_in_a_terminal_it_goes_on_until_q_and_leaves_the_terminal_as_it_was(mesh: Mesh, tells: Tells) -> None:
    terminal = Terminal(mesh.address)
    try:
        await terminal.until("w0 ")
        tells.answer = a_telemetry(a_worker(windows=slow(1200.0)))
        await terminal.until("1200!")
        await mesh.plane.stop()
        await terminal.until("this is how it was; now: can't reach the control plane")
        await terminal.until("w0 ")
        terminal.type(b"q")
        assert await terminal.ended() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


async def test_ctrl_c_ends_it_as_q_does(mesh: Mesh, tells: Tells) -> None:
    terminal = Terminal(mesh.address)
    try:
        await terminal.until("w0 ")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ended() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


def test_a_worker_that_has_drained_is_none_of_those_that_there_are() -> None:
    gone = a_worker("w1", connected=False, state=control_pb2.NODE_STATE_DRAINING, age_s=30.0)
    text = shown(a_worker(), gone)
    assert "1 worker, 0 gateways · 1 drained" in text
