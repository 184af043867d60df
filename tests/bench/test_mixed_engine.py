"""The way to the engine, over real processes with a simulated engine: policy by the command line, requests by gRPC."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.bench.arms import MODEL
from services.bench.mixed import engine as engines
from services.bench.mixed import workload
from services.bench.mixed.arms import FCFS, fields, ours
from services.bench.mixed.block import COUNTERS, Timing, measure
from services.bench.mixed.engine import RealEngine, board_of, start
from services.bench.mixed.sources import grpc_send
from services.bench.mixed.workload import Arrival, Lengths
from services.bench.processes import BenchError, Processes
from services.worker.engines import board as boards
from services.worker.engines.board import Board, Row
from trimtab.client import Client
from trimtab.kit.cli import ExitCode


class Counted:
    """An engine that counts what its client has sent: the simulated one has no board."""

    def __init__(self, processes: Processes, client: Client) -> None:
        self.cpu_s, self.check = processes.cpu_s, processes.check
        self._send, self._counts = (
            grpc_send(client, MODEL),
            dict.fromkeys([*COUNTERS, "computed_tokens", "max_overtake_ms"], 0.0),
        )
        self._counts |= {"running": 0.0, "waiting": 0.0}

    async def send(self, workload, prompt, output_tokens):
        async for event in self._send(workload, prompt, output_tokens):
            self._counts["computed_tokens"] += 1
            yield event

    def counts(self):
        return self._counts


@pytest.mark.slow
async def test_policies_are_switched_live_and_blocks_run_between_them(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        flags = ["--engine", "simulated", "--step-ms", "2", "--token-us", "1"]
        address, steering, child = await start(processes, flags, {})
        assert child.alive
        async with Client(address) as client:
            engine = Counted(processes, client)
            found = []
            for arm in (FCFS, ours(100)):
                await steering.steer(fields(arm))
                arrivals = [Arrival(0.1 * i, Lengths(20, 4)) for i in range(1, 5)]
                prompt_of = lambda name, tokens: workload.prompt(name, tokens, 200)  # noqa: E731
                found.append(
                    await measure(engine, arm, 0, Timing(0.05, 1.5, 20.0), arrivals, workload.backlog("1"), prompt_of)
                )
            assert [[len(r.itl_ms) for r in b.realtime] for b in found] == [[3] * 4] * 2
            assert all(b.batch_ended for b in found)
        with pytest.raises(BenchError, match=r"(?s)trimtab policy set ended with code 4.*max_num_seqs") as caught:
            await steering.steer({"batch.active": "4000"})
        assert caught.value.code == ExitCode.REFUSED


async def test_a_policy_that_is_in_force_is_not_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def ask(argv, limit_s, *, stdin=b""):
        asked.append(argv)
        return 0, '{"changes": [1], "nodes": [1]}', ""

    async with Processes(tmp_path) as processes:
        monkeypatch.setattr(processes, "ask", ask)
        steering = engines.Steering(processes, "127.0.0.1:1")
        for arm in (FCFS, FCFS, ours(50)):
            await steering.steer(fields(arm))
        assert len(asked) == 2
        assert {"scheduler.mode=fcfs", "prefill.itl_budget_ms=default", "paths.hot_below=1024"} < set(asked[0])


async def test_nobody_left_to_take_a_policy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(argv, limit_s, *, stdin=b""):
        return 0, '{"changes": [1], "nodes": []}', ""

    async with Processes(tmp_path) as processes:
        monkeypatch.setattr(processes, "ask", ask)
        with pytest.raises(BenchError, match="no node is connected"):
            await engines.Steering(processes, "127.0.0.1:1").steer(fields(FCFS))


def test_counts_are_those_of_the_workers_own_board() -> None:
    path = boards.create()
    try:
        assert board_of(os.getpid()) == path
        board = Board(path)
        board.write(Row(step_no=7, computed_tokens=900, running=3, waiting=2))
        processes = SimpleNamespace(check=None, cpu_s=None)
        counts = RealEngine(processes, SimpleNamespace(steer=None), None, board).counts()  # type: ignore[arg-type]
        assert {k: counts[k] for k in ("steps", "computed_tokens", "running", "waiting")} == {
            "steps": 7, "computed_tokens": 900, "running": 3, "waiting": 2,
        }  # fmt: skip
        assert counts.keys() >= {*COUNTERS, "max_overtake_ms"}
        board.close()
    finally:
        path.unlink()
    with pytest.raises(BenchError, match="has no board"):
        board_of(os.getpid())


async def test_one_that_is_asked_and_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        assert await processes.ask(["-c", "import sys; print(sys.stdin.read()); sys.exit(3)"], 20, stdin=b"hi") == (
            3,
            "hi\n",
            "",
        )
        with pytest.raises(BenchError, match=r"took longer than 0\.3 s"):
            await processes.ask(["-c", "import time; time.sleep(60)"], 0.3)


@pytest.mark.slow
async def test_what_controllers_wrote_and_moved_is_told_by_the_control_plane_itself(tmp_path: Path) -> None:
    """What `bench loops` asks between its turns, of a real control plane by the verbs that people type."""
    async with Processes(tmp_path) as processes:
        _, steering, _ = await start(processes, ["--engine", "simulated", "--step-ms", "2"], {})
        await steering.steer({"batch.active": "8"})
        newest = (await steering.history(10))[0]
        assert (newest["kind"], [c["field"] for c in newest["changes"]]) == ("person", ["batch.active"])
        assert await steering.adjusted() == []
