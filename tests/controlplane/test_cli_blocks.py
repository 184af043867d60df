"""`trimtab blocks` and `trimtab reblock` as a user types them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane.cli_blocks import blocks, reblock
from controlplane.render_blocks import blocks_json, blocks_text, share
from controlplane.store import Mark
from tests.controlplane.mesh import Mesh
from tests.controlplane.sized import PLAN, Worker, a_pool, a_report, sizes, until
from trimtab.kit.cli import WIDTH
from trimtab.kit.process import free_port
from trimtab.v1 import admin_pb2, control_pb2
from trimtab_cli.__main__ import cli
from trimtab_cli.why import why


class Shell:
    """Types verbs at a mesh of three workers in pool a, and one in pool b."""

    def __init__(self, mesh: Mesh, workers: list[Worker]) -> None:
        self.mesh, self.workers = mesh, workers

    async def __call__(self, verb: Any, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, verb, [*words, "--control", self.mesh.address])

    async def json(self, verb: Any, *words: str) -> Any:
        return json.loads((await self(verb, *words, "--json")).stdout)


def words(result: Result) -> str:
    """What was told, however its lines are broken."""
    return " ".join(result.stdout.split())


@pytest.fixture
async def shell(quiet: None) -> AsyncIterator[Shell]:
    async with a_pool() as (mesh, workers):
        yield Shell(mesh, workers)


async def test_a_worker_is_changed_and_told_with_what_it_costs(shell: Shell) -> None:
    result = await shell(reblock, "w1", "64", "--when", "now", "--author", "ada", "--reason", "long prompts")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "WORKER  SIZE     BLOCKS       CAPACITY, TOKENS   TO COMPUTE ANEW\n"
        "w1      16 → 64  1,000 → 250  16,000, as before  1,800 tokens of 3 requests; 640\n"
        "                                                 tokens of the prefix cache are\n"
        "                                                 lost\n"
    )
    [command] = shell.workers[1].commands.value
    assert (command.reblock.when, command.reblock.max_recompute_tokens, command.reblock.recompute) == (2, 0, False)
    assert sizes(shell.mesh) == {"w0": 16, "w1": 64, "w2": 16, "x0": 16}
    told = (await shell(why, "w1")).stdout
    assert "KV block size 16 → 64, 1800 tokens computed anew, by ada" in told


async def test_what_is_carried_over_is_told_and_may_be_computed_anew_instead(shell: Shell) -> None:
    shell.workers[1].carries = 1800
    result = await shell(reblock, "w1", "64")
    assert "nothing of 3 requests; 1,800 tokens are carried over; 640 tokens" in words(result)
    assert "KV block size 16 → 64, 1800 tokens carried over, by" in (await shell(why, "w1")).stdout
    [node] = (await shell.json(reblock, "w1", "16"))["nodes"]
    result = node["result"]
    assert (result["carried"], result["carried_tokens"], result["recompute_tokens"]) == (True, 1800, 0)
    shell.workers[1].carries = 1700
    assert "100 tokens of 3 requests; 1,700 tokens are carried over" in words(await shell(reblock, "w1", "64"))
    assert "1700 tokens carried over, 100 tokens computed anew" in (await shell(why, "w1")).stdout
    [node] = (await shell.json(reblock, "w1", "16", "--recompute"))["nodes"]
    result = node["result"]
    assert (result["carried"], result["carried_tokens"], result["recompute_tokens"]) == (False, 0, 1800)


async def test_a_pool_is_named_as_a_worker_is(shell: Shell) -> None:
    result = await shell(reblock, "a", "32")
    assert (result.exit_code, result.stdout.count("16 → 32")) == (0, 3)
    assert sizes(shell.mesh) == {"w0": 32, "w1": 32, "w2": 32, "x0": 16}
    assert {c.reblock.when for worker in shell.workers for c in worker.commands.value} == {1}, (
        "idle unless told otherwise"
    )


async def test_a_dry_run_tells_the_time_that_it_would_cost_and_changes_nothing(shell: Shell) -> None:
    shell.workers[0].says = a_report(prefill_tokens_per_s=450.0)
    async with asyncio.timeout(20):
        while "about 4s of work" not in (result := await shell(reblock, "w0", "64", "--dry-run")).stdout:
            assert result.exit_code == 0
            await asyncio.sleep(0.02)
    assert result.stdout.startswith("nothing is changed; it would be:\nWORKER")
    assert all(len(line) <= WIDTH for line in result.stdout.splitlines())
    found = await shell.json(reblock, "w0", "64", "--dry-run")
    assert found == {
        "block_size": 64,
        "dry_run": True,
        "nodes": [
            {
                "node_id": "w0",
                "done": True,
                "result": {
                    "before": {"block_size": 16, "total_blocks": 1000, "capacity_tokens": 16000},
                    "after": {"block_size": 64, "total_blocks": 250, "capacity_tokens": 16000},
                    "recompute_tokens": 1800,
                    "requests": 3,
                    "cached_tokens": 640,
                    "change_ms": 0.0,
                    "carried": False,
                    "carried_tokens": 0,
                },
                "recompute_s": 4.0,
                "reason": None,
                "message": None,
                "accepted_block_sizes": [],
            }
        ],
        "left": [],
    }
    assert set(sizes(shell.mesh).values()) == {16}


async def test_what_a_dry_run_would_cost_counts_attention_to_what_was_before(shell: Shell) -> None:
    shell.workers[0].says = a_report(prefill_tokens_per_s=450.0, prefill_ms_per_1000_context=4.0)
    async with asyncio.timeout(20):
        found = None
        while not found:
            [node] = (await shell.json(reblock, "w0", "64", "--dry-run"))["nodes"]
            found = node["recompute_s"]
            await asyncio.sleep(0.02)
    # 1,800 tokens at 450 a second, and three times 600²/2 tokens that tokens look back at.
    assert found == pytest.approx(4.0 + 540_000 / 1000 * 0.004)


async def test_a_refusal_names_the_sizes_that_would_do(shell: Shell) -> None:
    for worker in shell.workers:
        worker.refusal = "SIZE"
    result = await shell(reblock, "w0", "48")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == ("error: w0 keeps its blocks: SIZE: 3000 tokens are resident\n  it would accept 8, 16\n")
    found = await shell.json(reblock, "w0", "48")
    assert (found["nodes"][0]["reason"], found["nodes"][0]["accepted_block_sizes"]) == ("SIZE", [8, 16])
    result = await shell(reblock, "a", "48", "--dry-run")
    assert (result.exit_code, result.stderr.count("would not change to 48: SIZE")) == (4, 3)


async def test_what_is_half_done_says_who_was_left(shell: Shell) -> None:
    shell.workers[1].refusal = "NOT_IDLE"
    result = await shell(reblock, "a", "64")
    assert (result.exit_code, "w0" in result.stdout) == (5, True)
    assert result.stderr.splitlines()[0] == "error: w1 keeps its blocks: NOT_IDLE: 3000 tokens are resident"
    assert result.stderr.splitlines()[-1] == "left as they are: w2"
    assert (await shell.json(reblock, "a", "64"))["left"] == ["w2"]


async def test_usage_unknown_names_and_no_control_plane_have_codes_of_their_own(shell: Shell) -> None:
    assert (await shell(reblock, "w0", "0")).exit_code == 2
    assert (await shell(reblock, "w0", "64", "--when", "soon")).exit_code == 2
    unknown = await shell(reblock, "w7", "64")
    assert (unknown.exit_code, "did you mean w" in unknown.stderr) == (2, True)
    nobody = ["w0", "64", "--control", f"127.0.0.1:{free_port()}"]
    assert (await asyncio.to_thread(CliRunner().invoke, reblock, nobody)).exit_code == 3


async def test_the_tables_of_blocks_fit_a_terminal(shell: Shell) -> None:
    waste = {f"block_waste_{size}": size / 10_000 for size in (8, 16, 64)}
    shell.workers[0].says = a_report(stored_tokens=4000.0, prefix_kept_16=1.0, prefix_kept_64=0.75, **waste)
    await shell.mesh.store.mark(Mark("plan/a", 7, json.dumps(PLAN).encode()))
    async with asyncio.timeout(20):
        while "0.16%" not in (result := await shell(blocks)).stdout:
            await asyncio.sleep(0.02)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[:3] == [
        "WORKER  SIZE  BLOCKS  CAPACITY  IN USE  WASTE  PREFIX KEPT",
        "w0        16   1,000    16,000     25%  0.16%  100%",
        "w1        16   1,000    16,000       -      -  -",
    ]
    assert "w0      8: 0.08%, 16: 0.16%, 64: 0.64%" in lines
    assert "w0      16: 100%, 64: 75%" in lines
    assert lines[-1] == "a     mixed     24    32  the guide names 24 (multiples of 32)"
    found = await shell.json(blocks)
    node = found["nodes"][0]
    assert (node["waste"], node["accepted_block_sizes"], node["live"], node["carries"]) == (
        {"8": 0.0008, "16": 0.0016, "64": 0.0064},
        [8, 16, 64],
        True,
        False,
    )
    assert (found["pools"][0]["planned_block_size"], found["pools"][0]["gain"]) == (32, {"32": 0.01, "64": -0.02})


async def test_without_a_plan_it_is_said_why(shell: Shell) -> None:
    await until(lambda: shell.mesh.plane.leader.leads)
    assert (await shell(blocks)).stdout.endswith("no plan yet: the leader has made none\n")


def test_an_engine_that_can_not_change_while_it_runs_is_shown_as_fixed() -> None:
    limits = control_pb2.EngineLimits(block_size=256, total_blocks=10)
    answer = admin_pb2.GetBlocksResponse(nodes=[admin_pb2.NodeBlocks(node_id="w0", pool="a", limits=limits)])
    row = blocks_text(answer).splitlines()[1]
    assert row.split("  ")[0] == "w0" and "256 (fixed)" in row and "2,560" in row
    assert blocks_text(admin_pb2.GetBlocksResponse()) == "no worker is connected"


def test_small_shares_keep_their_digits() -> None:
    assert [share(x) for x in (0.0, 0.0006, 0.0499, 0.1, 0.256, 1.0)] == ["0%", "0.06%", "4.99%", "10%", "26%", "100%"]


def test_both_are_verbs_of_the_command() -> None:
    for verb in ("blocks", "reblock"):
        assert CliRunner().invoke(cli, [verb, "--help"]).exit_code == 0


def test_the_capacity_of_layers_that_forget_is_the_longest_request_that_fits() -> None:
    """As of DeepSeek-V4: windows and states take their blocks first, and then 256 tokens take one."""
    groups = [
        control_pb2.KvGroup(block_size=256, count=1),
        control_pb2.KvGroup(block_size=64, window=128, cap=19, count=2),
        control_pb2.KvGroup(block_size=4, window=8, cap=259, count=1),
    ]
    limits = control_pb2.EngineLimits(block_size=256, total_blocks=1000, kv_groups=groups)
    shown = blocks_json(admin_pb2.GetBlocksResponse(nodes=[admin_pb2.NodeBlocks(node_id="w0", limits=limits)]))
    assert shown["nodes"][0]["capacity_tokens"] == 256 * (1000 - 2 * 19 - 259)
