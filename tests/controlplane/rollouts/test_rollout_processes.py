"""A rollout on real processes under load: workers with simulated engines, a gateway, a control plane, and nobody who watches it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane import render
from controlplane.admin.client import AdminClient
from services.bench.arms import MODEL
from services.drill.endpoint import Door
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.witness import Seen
from trimtab.messages import Request, Sampling, Workload
from trimtab.v1 import admin_pb2

FLAGS = ("--engine", "simulated", "--step-ms", "20", "--token-us", "20")
RATE = 15.0
"""Requests a second: a third of what three workers do."""
POLICY = {"rollout.bake_s": "15", "loops.batch": "off"}
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@contextlib.asynccontextmanager
async def under_load(running: Mesh) -> AsyncIterator[list[tuple[float, Seen]]]:
    """REALTIME comes as it comes; the list has (when it was asked, what came of it) of those that have ended."""
    door, rng, seen = Door(running.gateways[0]), random.Random(1), list[tuple[float, Seen]]()
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        sampling = Sampling(max_tokens=rng.randint(8, 24), temperature=0.0, ignore_eos=True)
        text = f"{number} " + " ".join(["word"] * rng.randint(8, 24))
        at = asyncio.get_running_loop().time()
        seen.append((at, await door.ask(Request("", MODEL, text, sampling, Workload.REALTIME), 60.0)))

    async def come() -> None:
        for number in range(100_000):
            task = asyncio.create_task(one(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(rng.expovariate(RATE))

    coming = asyncio.create_task(come())
    try:
        yield seen
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        await door.close()


async def ended(admin: AdminClient, rollout_id: str) -> admin_pb2.Rollout:
    while True:
        (found,) = (await admin.rollouts(rollout_id=rollout_id)).rollouts
        if not found.live:
            return found
        await asyncio.sleep(0.3)


async def test_a_bad_policy_is_rolled_back_by_itself_and_a_good_one_is_promoted(tmp_path: Path) -> None:
    async with mesh(tmp_path, Shape(3, 1, FLAGS, policy=POLICY)) as running, AdminClient(running.control) as admin:
        async with under_load(running) as seen:
            while len(seen) < 40:
                await asyncio.sleep(0.2)
            bad = {"batch.active": "1", "prefill.step_tokens": "4"}
            begun = (await admin.start_rollout(bad, author="ada", reason="faster, they say")).rollout
            assert begun.live and len(begun.node_ids) == 1 and len(begun.pending_node_ids) == 2
            values = {name: await active(admin, name) for name in running.workers}
            assert values == {name: 1 if name in begun.node_ids else values["w2"] for name in running.workers}
            over = await ended(admin, begun.rollout_id)
            assert over.stage == "rolled back", over.verdict
            assert over.ended_unix_ms - over.started_unix_ms <= 1000 * 15 * 4
            assert {await active(admin, name) for name in running.workers} == {values["w2"]}
            worse = {m.name for m in over.measures if m.verdict == "worse"}
            assert worse and over.lines[-1].evidence

            good = {"batch.active": "32"}
            begun = (await admin.start_rollout(good, author="ada", weight=1.0, bake_s=8)).rollout
            over = await ended(admin, begun.rollout_id)
            assert over.stage == "promoted", (
                over.verdict,
                [(m.name, m.canary, m.rest, m.verdict) for m in over.measures],
            )
            assert {await active(admin, name) for name in running.workers} == {32}
            newest = (await admin.history(1)).entries[0]
            assert newest.author == "ada" and newest.kind == admin_pb2.HISTORY_KIND_PERSON
            assert " ada (by the leader, term " in render.history_text([newest])
            peoples = {e.identity.revision for e in (await admin.history(50)).entries}
            written = (await admin.history(50, controllers=True)).entries
            controllers = {e.identity.revision for e in written if render.by_controller(e)}
            assert newest.identity.revision in peoples and controllers and not peoples & controllers
            lost = [s.lost for _, s in seen if s.lost]
            assert lost == []
        running.check()


async def active(admin: AdminClient, node_id: str) -> int:
    return int((await admin.get_policy(node_id)).effective.batch.active)
