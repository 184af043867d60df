"""The blocks controller: which KV block size each pool is to have, by the guide and by what is measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from controlplane.controllers import blocks
from tests.controlplane.controllers.block_pools import (
    OLD,
    STARVED,
    WASTEFUL,
    a_run,
    a_worker,
    limits,
    policy,
)
from tests.controlplane.controllers.builders import NOW, some_lengths
from tests.controlplane.controllers.run import Hour, say
from trimtab.blocks import speed
from trimtab.measures import (
    ALLOCATION_FAILURES,
    CACHED_TOKENS,
    COMPUTED_TOKENS,
    DECODE_DEVIATION,
    KV_USED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SESSION_TURNS,
    STORED_TOKENS,
    block_waste,
    prefix_kept,
)
from trimtab.messages import Load

# ---- when nothing is wrong


@pytest.mark.parametrize("idle", [True, False])
def test_an_hour_without_trouble_commands_nothing_and_tells_nobody(idle: bool) -> None:
    hour = Hour(blocks, policy(), idle=idle)
    for n in hour.run.nodes:
        if n.role.value == "worker":
            n.node = replace(n.node, limits=limits())
            say(n, **WASTEFUL, **{SESSION_TURNS: 3.0, DECODE_DEVIATION: 0.1})
    hour.pass_by()
    assert (hour.run.commands, hour.alerts, hour.moves, hour.wants) == ([], [], [], set())
    (plan,) = hour.run.decision.plans
    assert (plan.planned, plan.reason) == (128, "left at 128: nothing says that the KV cache is badly used")


def test_a_pool_in_which_waste_is_small_is_left_as_it_is_whatever_presses() -> None:
    """As public traces have it: 0.5 % at 16 tokens, 2.3 % at 64."""
    small = {block_waste(16): 0.005, block_waste(64): 0.023}
    run = a_run(a_worker(size=64, sizes=(16, 64), gauges=small), **STARVED)
    assert run.run(200) == []
    plan = run.plan()
    assert (plan.planned, plan.changed_at) == (64, None)
    assert plan.reason.startswith("left at 64: ") and plan.reason.endswith("no other size would pay")
    assert "16 tokens would save 1.8% of the work (limit 5%), waste 2.30% at 64, 0.50% at 16" in plan.evidence
    assert plan.gain == {16: 0.0181, 64: 0.0}


# ---- measured


def test_a_starved_pool_gets_the_size_that_wastes_least_one_worker_after_another() -> None:
    nodes = [a_worker(f"w{i}", gauges=WASTEFUL | {STORED_TOKENS: float(100 * i)}) for i in (2, 1, 0)]
    run = a_run(*nodes, **STARVED)
    told = run.run(60)
    assert [(c.node_id, c.block_size, c.incarnation, c.now) for c in told] == [
        ("w0", 32, "i0", False),
        ("w1", 32, "i0", False),
        ("w2", 32, "i0", False),
    ]
    assert "blocks of 32 pay" in told[0].reason
    assert "waste 12.80% at 128, 3.20% at 32" in told[0].evidence
    assert (run.plan().planned, run.plan().present) == (32, 32)
    assert run.run(1000) == [], "no better one is left"


def test_a_size_has_to_be_the_best_for_three_looks_and_a_moment_calls_for_nothing() -> None:
    run = a_run(a_worker(gauges=WASTEFUL), policy=policy(failures_per_h=10_000))
    run.counters, run.peaks = {ALLOCATION_FAILURES: 1}, STARVED["peaks"]
    run.run(24)
    assert run.commands == [] and "for now" in run.plan().reason
    run.counters, run.peaks = {}, {KV_USED: 0.7}
    run.run(130)
    assert run.commands == []
    run.counters, run.peaks = {ALLOCATION_FAILURES: 1}, STARVED["peaks"]
    run.run(40)
    assert len(run.commands) == 1


def test_of_sizes_that_pay_nearly_alike_the_nearest_is_taken() -> None:
    flat = {block_waste(128): 0.3, block_waste(96): 0.2, block_waste(64): 0.03, block_waste(32): 0.01}
    run = a_run(a_worker(sizes=(32, 64, 96, 128), gauges=flat), **STARVED)
    assert [c.block_size for c in run.run(60)] == [64], "from there to 32 would save two hundredths"
    assert run.run(1000) == []


@pytest.mark.parametrize(
    ("peaks", "counters", "acts"),
    [
        ({KV_USED: 0.79, "waiting": 1.0}, {ALLOCATION_FAILURES: 1}, True),
        ({KV_USED: 0.8, "waiting": 1.0}, {ALLOCATION_FAILURES: 1}, True),  # 720 an hour, once a minute is seen
        ({KV_USED: 0.79, "waiting": 0.0}, {ALLOCATION_FAILURES: 0}, False),
        ({KV_USED: 0.79, "waiting": 9.0}, {ALLOCATION_FAILURES: 0}, False),
    ],
)
def test_what_calls_for_a_look(peaks: dict[str, float], counters: dict[str, int], acts: bool) -> None:
    run = a_run(a_worker(gauges=WASTEFUL), peaks=peaks, counters=counters)
    assert bool(run.run(150)) is acts


def test_failures_are_not_scaled_up_from_less_than_a_minute() -> None:
    run = a_run(a_worker(gauges=WASTEFUL), peaks={KV_USED: 0.99}, counters={ALLOCATION_FAILURES: 5})
    run.run(55)
    assert run.plan().reason.startswith("left at 128: nothing says")
    run.run(10)
    assert "allocations fail for running requests" in run.plan().reason


def test_steps_that_vary_and_long_sessions_are_looked_at_and_waste_is_no_reason_where_memory_is_free() -> None:
    varied = a_worker(gauges=WASTEFUL | {DECODE_DEVIATION: 0.31}, load=Load(5, 0, 0, 900, 1000))
    run = a_run(varied)
    assert run.run(60) == []
    assert run.plan().reason == "left at 128: the time of decode steps varies, and no other size would pay"
    assert "31% of the mean (limit 30%)" in run.plan().evidence
    say(varied, **{DECODE_DEVIATION: 0.3, SESSION_TURNS: 21.0})
    assert run.run(10) == []
    assert run.plan().reason == "left at 128: sessions are long, and no other size would pay"
    assert run.plan().phase == "long-session"


def test_a_figure_of_an_idle_worker_says_nothing_of_now() -> None:
    run = a_run(a_worker(gauges={DECODE_DEVIATION: 2.0}))
    run.run(20)
    assert "nothing says" in run.plan().reason


def test_prefix_hits_that_would_be_lost_weigh_against_the_waste_that_would_be_saved() -> None:
    small = {block_waste(16): 0.2, block_waste(256): 0.12, prefix_kept(16): 1.0, prefix_kept(256): 0.6}
    worker = a_worker(size=16, sizes=(16, 256), gauges=small)
    counters = {
        ALLOCATION_FAILURES: 3, PROMPT_TOKENS: 1000, CACHED_TOKENS: 500, COMPUTED_TOKENS: 700, OUTPUT_TOKENS: 200,
    }  # fmt: skip
    run = a_run(worker, counters=counters, peaks=STARVED["peaks"])
    assert run.run(100) == []
    # 1 − 0.8 ÷ 0.88 of memory against two fifths of the half that is hit, beside the half that is computed.
    faster = (2 / 7) * (1 - 1 / speed(16, 256, 0))
    assert run.plan().gain[256] == pytest.approx(faster + 1 - 0.8 / 0.88 - (5 / 7) * 0.4, abs=1e-4)
    say(worker, **{prefix_kept(256): 1.0})
    assert [c.block_size for c in run.run(60)] == [256]


def test_what_nobody_measures_holds_and_says_so() -> None:
    run = a_run(**STARVED)
    assert run.run(60) == []
    (hold,) = run.decision.holds
    assert hold.startswith("pool default: ") and hold.endswith("nobody says what block sizes waste or keep")
    assert run.plan().planned == 128


def test_a_worker_that_does_not_say_how_full_it_is_holds_its_pool() -> None:
    run = a_run(a_worker(gauges=WASTEFUL), counters={ALLOCATION_FAILURES: 1}, peaks={"waiting": 4.0})
    run.run(30)
    assert "w0 does not say how much of its KV cache is used" in run.decision.holds
    assert run.commands == []


def test_a_change_that_was_begun_is_gone_through_with_when_the_load_has_gone() -> None:
    """Waste counts while requests press, and workers are idle when they do not."""
    busy = a_worker(gauges=WASTEFUL | {STORED_TOKENS: 50_000.0})
    run = a_run(busy, **STARVED)
    assert run.run(60) == []
    assert (run.plan().planned, run.plan().present) == (32, 128)
    run.counters, run.peaks = {}, {}
    assert run.run(300) == []
    say(busy, **{STORED_TOKENS: 1999.0})
    assert [c.block_size for c in run.run(10)] == [32]


def test_a_worker_that_was_asked_and_did_not_change_lets_the_others_go_first() -> None:
    idle = [a_worker(f"w{i}", gauges=WASTEFUL | {STORED_TOKENS: 100.0 * i}) for i in range(3)]
    run = a_run(*idle, obeys=False, **STARVED)
    assert [c.node_id for c in run.run(200)][:4] == ["w0", "w1", "w2", "w0"]


def test_a_worker_that_carries_its_kv_over_need_not_be_idle() -> None:
    busy = [a_worker(f"w{i}", carries=i == 1, gauges=WASTEFUL | {STORED_TOKENS: 50_000.0}) for i in range(3)]
    run = a_run(*busy, **STARVED)
    assert [(c.node_id, c.block_size) for c in run.run(60)] == []
    for n in run.nodes:
        say(n, **{STORED_TOKENS: 30_000.0})
    assert [(c.node_id, c.block_size) for c in run.run(60)] == [("w1", 32)]
    run = a_run(a_worker(carries=True, gauges=WASTEFUL | {STORED_TOKENS: None}), **STARVED)
    assert run.run(60) == [], "one that says nothing of itself is left alone"


# ---- by the guide


@pytest.mark.parametrize(
    ("joined_at", "prompts", "turns", "phase", "named", "planned"),
    [
        (NOW - 10, [100.0], 1.0, "warm-up", 1024, 1024),
        (OLD, [100.0], 1.0, "steady", 512, 512),
        (OLD, [20_000.0], 1.0, "mixed", 24, 32),
        (OLD, [20_000.0], 50.0, "mixed", 24, 32),
        (OLD, [100.0], 20.5, "long-session", 768, 1024),
        (OLD, [100.0], 20.0, "steady", 512, 512),
    ],
)
def test_the_guide_names_a_size_for_each_phase_and_the_nearest_that_engines_take_is_planned(
    joined_at: float, prompts: list[float], turns: float, phase: str, named: int, planned: int
) -> None:
    worker = a_worker(joined_at=joined_at, gauges={SESSION_TURNS: turns})
    run = a_run(worker, policy=policy("guide"), lengths={"m": some_lengths(prompts=prompts * 100)})
    assert [c.block_size for c in run.run(1)] == [planned]
    assert (run.plan().phase, run.plan().named, run.plan().planned) == (phase, named, planned)


def test_the_reason_says_what_engines_take_where_that_is_not_what_the_guide_names() -> None:
    run = a_run(policy=policy("guide"), lengths={"m": some_lengths(prompts=[20_000.0] * 100)})
    (told,) = run.run(1)
    assert told.reason == "mixed: the guide names 24; its engines take 32, 64, 96, 128, 192, 256, …: 32"
    assert told.evidence == "median prompt 20,000 tokens (limit 16,384)"


def test_only_what_all_engines_of_a_pool_take_is_planned() -> None:
    run = a_run(a_worker("w0", sizes=(64, 128, 256)), a_worker("w1", sizes=(128, 256, 512)), policy=policy("guide"))
    assert {c.block_size for c in run.run(20)} == {256}
    run = a_run(a_worker("w0", sizes=(64,)), a_worker("w1", sizes=(128,)), policy=policy("guide"))
    assert run.run(20) == []
    assert run.decision.holds == ("pool default: there is no KV block size that all of its engines take",)


def test_an_engine_that_does_not_say_what_it_takes_holds_its_pool_and_no_other() -> None:
    run = a_run(a_worker("w0", sizes=()), a_worker("w1", pool="other"), policy=policy("guide"))
    assert [c.node_id for c in run.run(20)] == ["w1"]
    assert run.decision.holds == ("pool default: w0 does not say which KV block sizes it takes",)


def test_a_pool_that_has_warmed_up_goes_on_to_the_steady_size_after_the_dwell() -> None:
    run = a_run(a_worker(joined_at=NOW), policy=policy("guide"))
    assert [c.block_size for c in run.run(590)] == [1024]
    assert run.run(8) == [], "both are ten minutes"
    assert [c.block_size for c in run.run(20)] == [512]
    assert run.run(1200) == []


def test_who_lacks_kv_is_through_with_warming_up() -> None:
    run = a_run(a_worker(joined_at=NOW), policy=policy("guide", dwell_s=20), **STARVED)
    assert [c.block_size for c in run.run(60)] == [1024, 512]
    assert run.plan().phase == "steady"


def test_no_size_is_changed_twice_within_the_dwell_however_the_phase_flaps() -> None:
    worker = a_worker()
    run = a_run(worker, policy=policy("guide"))
    changes = []
    for n in range(240):
        say(worker, **{SESSION_TURNS: 100.0 if n % 2 else 1.0})
        changes += [(run.now, c.block_size) for c in run.run(10)]
    assert 2 <= len(changes) <= 5
    assert all(b - a >= 600 for (a, _), (b, _) in pairwise(changes))


def test_a_plan_that_waits_for_the_dwell_says_so() -> None:
    worker = a_worker()
    run = a_run(worker, policy=policy("guide"))
    run.run(10)
    say(worker, **{SESSION_TURNS: 100.0})
    assert run.run(60) == []
    assert run.plan().reason.endswith("; 512 stays for 600 s after the last change")
