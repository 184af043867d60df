"""The blocks controller round its loop, in virtual time: a mesh whose KV cache is cut badly is cut anew by itself, and a good one is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.loops.builders import HOUR_S, Run, a_fleet, people, rehearse
from trimtab.policy import Value
from trimtab.simulation import Die, Fate, Fault, Fleet, GpuCosts
from trimtab.workload import Kind, Lengths, mixed

pytestmark = pytest.mark.slow

KV_TOKENS = 24_576
TALK = Kind(Lengths(490, 505, 511), Lengths(200, 260, 300))
"""Requests that grow a little into their second block of 512 tokens, and leave the most of it empty."""
RUSH, QUIET, AGAIN, END = 0.0, 95.0, 280.0, 340.0


def a_coarse_fleet(workers: int = 1, *, block_size: int = 512, live: bool = True, kv_tokens: int = KV_TOKENS) -> Fleet:
    fleet = a_fleet(workers)
    limits = replace(
        fleet.limits,
        max_model_len=4096,
        block_size=block_size,
        total_blocks=kv_tokens // block_size,
        live_blocks=live,
    )
    return replace(fleet, limits=limits)


def a_rush(
    fleet: Fleet, *, until_s: float = END, policy: Mapping[str, Value] | None = None, faults: tuple[Fault, ...] = ()
) -> Run:
    """More at once than the blocks are enough for, then nobody, then the same again."""
    rate = 5.0 * sum(fleet.pools.values())
    sources = [people((RUSH, rate), (QUIET, 0.0), (AGAIN, rate), kind=TALK)]
    return rehearse(["blocks"], sources, until_s, fleet=fleet, policy=policy, faults=faults)


def preempted(run: Run, from_s: float, to_s: float) -> int:
    """Of the requests that came then, how often they lost their KV."""
    came = [r for r in run.outcome.requests if 1000.0 * from_s <= r.arrival_ms < 1000.0 * to_s]
    assert len(came) > 100
    return sum(r.preemptions for r in came)


def sizes(run: Run) -> list[int]:
    return [w.node.limits.block_size for w in run.mesh.workers]


def test_a_pool_that_wastes_its_memory_in_large_blocks_is_cut_anew_once_it_is_quiet_and_stays_so() -> None:
    run = a_rush(a_coarse_fleet(2))
    (plan,) = run.notes("plan")
    assert QUIET > plan.at_s > 60, "a minute of failures, seen three times"
    assert "allocations fail for running requests" in plan.reason and "waste" in plan.evidence
    told = run.notes("command")
    size = sizes(run)[0]
    assert sizes(run) == [size, size] and size <= 128
    assert {n.what for n in told} == {f"reblock default-{i} to {size} tokens" for i in (1, 2)}
    assert all(QUIET < n.at_s < AGAIN for n in told), "not while it costs much to compute anew"
    assert preempted(run, RUSH, QUIET) > 100
    assert preempted(run, AGAIN, END) == 0
    assert {r.fate for r in run.outcome.requests} <= {Fate.SERVED, Fate.REFUSED, Fate.OPEN}
    assert run.alerts == []


def test_a_pool_that_is_short_of_memory_and_wastes_little_is_left_as_it_is() -> None:
    run = a_rush(a_coarse_fleet(block_size=16, kv_tokens=16_384), until_s=AGAIN)
    assert preempted(run, RUSH, QUIET) > 50
    assert run.notes() == []
    assert sizes(run) == [16]
    assert all(gain < 0.05 for gain in run.rehearsal.plans["default"].gain.values())


def test_a_controller_that_only_advises_plans_and_changes_nothing() -> None:
    run = a_rush(a_coarse_fleet(), until_s=AGAIN, policy={"loops.blocks": "advise"})
    assert sizes(run) == [512]
    assert run.notes() == []


def test_engines_that_can_not_change_while_they_run_are_told_of_and_left() -> None:
    run = a_rush(a_coarse_fleet(live=False), until_s=AGAIN)
    assert sizes(run) == [512]
    assert run.notes("command") == []
    (alert,) = run.alerts
    assert alert.startswith("info: pool default needs a rolling change")


def test_by_the_guide_a_pool_warms_up_and_goes_on_and_a_worker_that_starts_anew_follows() -> None:
    policy: dict[str, Value] = {
        "block_plan.choose_by": "guide", "block_plan.warm_up_s": 60, "block_plan.dwell_s": 30, "block_plan.warm_up": 64,
        "block_plan.steady": 256,
    }  # fmt: skip
    run = rehearse(["blocks"], [people((0, 1))], 240, fleet=a_fleet(2), policy=policy, faults=[Die(150, "default-1")])
    assert [n.what.split(" in ")[0] for n in run.notes("plan")] == ["KV blocks of 64 tokens", "KV blocks of 256 tokens"]
    told = [(n.what, n.at_s) for n in run.notes("command")]
    assert {what for what, _ in told} == {f"reblock default-{i} to {size} tokens" for i in (1, 2) for size in (64, 256)}
    assert sizes(run) == [256, 256]
    assert max(at for what, at in told if what == "reblock default-1 to 256 tokens") > 150
    assert all(r.fate in (Fate.SERVED, Fate.OPEN) for r in run.outcome.requests)


@pytest.mark.parametrize(("load", "until_s"), [(0.0, HOUR_S), (0.5, 900.0)])
def test_a_mesh_that_is_well_is_left_alone(load: float, until_s: float) -> None:
    """An hour of load is in `test_healthy`, with all the other controllers."""
    costs = GpuCosts(80.0, 5.0, 0.25, kv_us=6.0)
    run = rehearse(["blocks"], mixed(load), until_s, fleet=a_fleet(costs=costs))
    assert run.notes() == []
    assert run.alerts == []
    assert run.rehearsal.holds["blocks"] == set()
