"""`trimtab scale`: what it shows and what it sets; and the gauges that say the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import structlog
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.cli_scale import scale
from controlplane.controllers.decision import Want
from controlplane.metrics import MAX_POOLS, ControlMetrics
from controlplane.pools import AS_IT_IS, NOT_YET, Pool, pools_of
from controlplane.seen import Seen
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from tests.controlplane.scales import a_control
from tests.controlplane.test_loop import Told, until
from tests.controlplane.test_loop import scale as get_scale
from trimtab.kit.process import free_port
from trimtab.policy import Policy, with_fields
from trimtab.snapshot import Node


async def verb(address: str, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, scale, [*words, "--control", address])


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    async with a_mesh() as it:
        await it.start_node(FakeNode(it.address)).holds(1, 1)
        yield it
    structlog.reset_defaults()


async def test_it_shows_what_pools_want_and_why() -> None:
    async with a_control() as (control, _):
        control.wanted, control.most, control.workers = 3, 4, {"w0": "default"}
        shown = await verb(control.address)
        assert (shown.exit_code, shown.stdout.splitlines()) == (
            0,
            [
                "POOL     WANTED  RUNNING  MIN  MAX  WHY",
                "other         9        1    0    9  -",
                "default       3        1    1    4  the queue is long",
            ],
        )
        control.surplus = ("w9",)
        said = json.loads((await verb(control.address, "--json")).stdout)
        assert said["leader_id"] == "control"
        assert said["pools"][1] == {
            "pool": "default",
            "wanted": 3,
            "running": 1,
            "min_workers": 1,
            "max_workers": 4,
            "reason": "the queue is long",
            "surplus": ["w9"],
        }


async def test_it_says_when_nobody_leads() -> None:
    async with a_control() as (control, _):
        control.leader = ""
        assert "nobody leads the control plane now" in (await verb(control.address)).stdout


async def test_a_control_plane_that_is_away_is_exit_code_3() -> None:
    assert (await verb(f"127.0.0.1:{free_port()}")).exit_code == 3


async def test_set_is_a_change_of_the_pools_policy_and_auto_takes_it_back(mesh: Mesh) -> None:
    assert (await verb(mesh.address, "set", "blue", "7")).exit_code == 0
    assert (await mesh.admin.get_policy("w0")).effective.scale.max_workers == 0, "of another pool"
    done = await verb(mesh.address, "set", "default", "3", "--reason", "a launch")
    assert done.exit_code == 0, done.output
    effective = (await mesh.admin.get_policy("w0")).effective.scale
    assert (effective.min_workers, effective.max_workers) == (3, 3)
    (newest,) = (await mesh.admin.history(1)).entries
    assert newest.reason == "a launch"
    done = await verb(mesh.address, "set", "default", "auto", "--json")
    assert (done.exit_code, json.loads(done.stdout)["written"]) == (0, True)
    effective = (await mesh.admin.get_policy("w0")).effective.scale
    assert (effective.min_workers, effective.max_workers) == (1, 0)


@pytest.mark.parametrize("workers", ["0", "-1", "many", "1.5", "10001", "²"])
async def test_a_number_that_is_none_is_usage(mesh: Mesh, workers: str) -> None:
    done = await verb(mesh.address, "set", "--dry-run", "--", "default", workers)
    assert done.exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--stop", "x"),
        ("--start", "x"),
        ("--start", "", "--stop", "x"),
        ("--start", "it's", "--stop", "x"),
        ("--start", "x", "--stop", "y", "--node-id", "w"),
        ("--start", "x", "--stop", "y", "--min-interval", "soon"),
        ("--start", "x", "--stop", "y", "--most", "0"),
    ],
)
def test_commands_that_can_not_be_run_are_usage(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(scale, ["follow", *words]).exit_code == 2


def test_gauges_are_of_the_pools_that_there_are() -> None:
    registry = CollectorRegistry()
    metrics = ControlMetrics(registry)
    metrics.scaled([Pool("a", 3, 2, 0, 4, "load"), Pool("b", 1, 0, 0, 4, "load")])
    text = generate_latest(registry).decode()
    assert 'trimtab_control_desired_workers{pool="a"} 3.0' in text
    assert 'trimtab_control_running_workers{pool="a"} 2.0' in text
    assert 'trimtab_control_running_workers{pool="b"} 0.0' in text
    metrics.scaled([Pool("b", 2, 1, 0, 4, "load")])
    text = generate_latest(registry).decode()
    assert 'pool="a"' not in text
    assert 'trimtab_control_desired_workers{pool="b"} 2.0' in text
    metrics.scaled([])
    assert "pool=" not in generate_latest(registry).decode()


@pytest.mark.parametrize("reason", [AS_IT_IS, NOT_YET])
def test_a_pool_for_which_nobody_has_decided_wants_no_number(reason: str) -> None:
    registry = CollectorRegistry()
    metrics = ControlMetrics(registry)
    metrics.scaled([Pool("a", 3, 2, 0, 4, "load")])
    metrics.scaled([Pool("a", 2, 2, 0, 4, reason)])
    text = generate_latest(registry).decode()
    assert "trimtab_control_desired_workers{" not in text
    assert 'trimtab_control_running_workers{pool="a"} 2.0' in text


def test_a_pool_without_a_worker_has_its_own_bounds() -> None:
    def policy(node: Node | None) -> Policy:
        most = 5 if node is not None and node.pool == "a" else 0
        return with_fields(Policy(), {"scale.max_workers": most})

    (found,) = pools_of(Seen(0.0, 0.0, {}), {"a": Want("a", 3, "set", "")}, policy)
    assert (found.wanted, found.running, found.max_workers) == (3, 0, 5)


def test_gauges_are_bounded() -> None:
    registry = CollectorRegistry()
    ControlMetrics(registry).scaled(Pool(f"p{i}", 1, 1, 0, 4, "load") for i in range(MAX_POOLS + 50))
    lines = generate_latest(registry).decode().splitlines()
    assert sum(line.startswith("trimtab_control_desired_workers{") for line in lines) == MAX_POOLS


@pytest.mark.slow
async def test_a_replica_that_led_before_does_not_speak_for_a_leader_that_gives_no_answer() -> None:
    """Its old want would be taken for the new leader's word, and workers in use be ended."""
    store = MemoryStore()
    first, second = Told(wants=(Want("default", 9, "once"),)), Told(wants=(Want("default", 2, "now"),))
    async with a_mesh(store, (first,), "a") as one:
        await one.admin.set_policy({"scale.max_workers": "10"}, author="t", reason="r")
        await until(lambda: one.plane.loop.wants.get("default"))
        async with a_mesh(store, (second,), "b") as two:

            async def never() -> None: ...

            one.plane.leader.stand = never  # type: ignore[method-assign]
            await one.plane.leader.resign()
            await until(lambda: two.plane.loop.leads and (w := two.plane.loop.wants.get("default")) and w.workers == 2)
            await until(lambda: one.plane.peers.leader() == "b" and not one.plane.loop.leads)
            said = await get_scale(one.address)
            assert (said.leader_id, [p.wanted for p in said.pools]) == ("b", [2])
            await two.plane._server.stop(0)  # it leads on, and answers nobody
            said = await get_scale(one.address)
            assert said.leader_id == "" and not said.pools
