"""The isolation controller: giants in the mix, while REALTIME objectives are missed."""

from __future__ import annotations

import random

import pytest

from controlplane.controllers import isolation
from controlplane.controllers.decision import PolicyOf
from controlplane.seen import Window
from controlplane.spec import adjust
from controlplane.tick import changes
from tests.controlplane.controllers.builders import (
    a_node,
    a_window,
    an_adjustment,
    on_pool,
    policy_of,
    sketch_of,
    some_lengths,
)
from tests.controlplane.controllers.run import Hour, Run
from trimtab.measures import PROMPT, over, requests_of
from trimtab.messages import Workload
from trimtab.snapshot import Document, Node, resolve

GIANT = 20_000.0
MIXED = [500.0] * 950 + [GIANT] * 50
"""A median of 500, and giants with 68 % of the tokens."""


def windows(missed: int, prompts: list[float], first: int = 2) -> list[Window]:
    counters = {over(Workload.REALTIME): missed, requests_of(Workload.REALTIME): 100}
    return [
        a_window(first + i, ended=1000.0 + 5 * (first + i - 3), sketches={PROMPT: prompts}, counters=counters)
        for i in (0, 1)
    ]


def a_run(prompts: list[float] = MIXED, missed: int = 5, policy: PolicyOf | None = None) -> Run:
    run = Run(isolation, [a_node("w0", windows=windows(missed, prompts))], policy or policy_of())
    run.lengths = {"m": some_lengths(prompts=prompts)}
    return run


def goes_on(run: Run, prompts: list[float], missed: int = 0) -> None:
    """One window more, five seconds later."""
    number = run.of("w0").windows[-1].number + 1
    counters = {over(Workload.REALTIME): missed, requests_of(Workload.REALTIME): 100}
    run.tick(4)
    run.of("w0").windows.append(a_window(number, ended=run.now, sketches={PROMPT: prompts}, counters=counters))
    run.tick()


def test_giants_that_hurt_realtime_are_isolated_from_eight_times_the_median_or_hot_on() -> None:
    run = a_run()
    run.tick()
    assert run.move is not None
    assert (run.move.field, run.move.scope, run.move.delta) == ("isolate.from_tokens", on_pool(), 4097 - 65536)
    assert "68%" in run.move.evidence and "10 of 200" in run.move.evidence
    long = [2000.0] * 950 + [30_000.0] * 50
    run = a_run(long)
    run.tick()
    assert run.move is not None and run.move.delta == 16_001 - 65_536


def test_where_long_prompts_are_what_the_mix_is_made_of_nothing_is_isolated() -> None:
    run = a_run([500.0] * 900 + [GIANT] * 100)
    assert run.tick().moves == ()


def test_the_worker_then_isolates_exactly_those() -> None:
    run = a_run()
    found = changes("isolation", run.tick().moves, {}, set(), 0)
    document = adjust(found.put)(Document(), [], 0).document
    assert resolve(document, Node("w0"), now_unix_ms=1).policy.isolate.from_tokens == 4097


@pytest.mark.parametrize(
    ("prompts", "missed"),
    [
        (MIXED, 0),
        (MIXED, 1),
        ([500.0] * 1000, 50),
        ([500.0] * 999 + [GIANT], 50),
        ([50.0] * 950 + [3000.0] * 50, 50),
    ],
    ids=["objectives kept", "a P99 allows one in a hundred", "no giants", "too few", "hot ones are no giants"],
)
def test_neither_giants_nor_missed_objectives_alone_isolate(prompts: list[float], missed: int) -> None:
    d = a_run(prompts, missed).tick()
    assert (d.moves, d.alerts, d.holds) == ((), (), ())


def test_objectives_that_were_missed_in_one_window_only_isolate_nobody() -> None:
    run = a_run()
    run.of("w0").windows[0].counters.clear()
    assert run.tick().moves == ()


def test_objectives_that_were_missed_long_ago_isolate_nobody() -> None:
    run = a_run()
    run.now += 20
    assert run.tick().moves == ()


def test_too_few_prompts_hold_and_that_is_said() -> None:
    d = a_run(MIXED[-99:]).tick()
    assert d.moves == ()
    assert d.holds == ("model m: objectives are missed, and 99 prompts are too few to tell whether by giants",)


def test_it_expires_ten_minutes_after_the_last_giant() -> None:
    run = a_run()
    run.tick()
    for _ in range(20):
        goes_on(run, MIXED)
    last = run.now
    while run.move is not None:
        goes_on(run, [500.0] * 20)
    assert 595 <= run.now - last <= 615


def test_it_lasts_while_giants_come_though_isolation_has_mended_the_objectives() -> None:
    run = a_run()
    run.tick()
    held = set()
    for _ in range(300):
        goes_on(run, MIXED)
        held.add(run.move)
    assert len(held) == 1 and None not in held


def test_where_they_are_isolated_already_nothing_is_moved() -> None:
    assert a_run(policy=policy_of({"isolate.from_tokens": 4097})).tick().moves == ()


def test_a_pool_for_isolated_requests_gets_them_and_stays_what_it_is() -> None:
    run = a_run()
    run.nodes.append(a_node("w1", pool="isolation"))
    d = run.tick()
    assert [(m.field, m.scope, m.state) for m in d.moves] == [
        ("isolate.from_tokens", on_pool(), None),
        ("isolate.action", on_pool(), "pool"),
    ]
    run.of("w1").connected = False
    assert [m.field for m in run.tick().moves] == ["isolate.from_tokens"]


def test_a_label_makes_such_a_pool_too() -> None:
    run = a_run()
    run.nodes.append(a_node("w1", pool="big", labels={"isolation": "true"}))
    assert [m.state for m in run.tick().moves] == [None, "pool"]


@pytest.mark.parametrize("action", ["refuse", "pool"])
def test_where_isolated_requests_would_be_lost_people_are_told_and_nothing_moves(action: str) -> None:
    d = a_run(policy=policy_of({"isolate.action": action})).tick()
    assert d.moves == ()
    assert [a.key for a in d.alerts] == ["giants/default"]


def test_only_pools_that_serve_the_model_are_concerned() -> None:
    run = a_run()
    run.nodes.append(a_node("w1", pool="other", model="n"))
    assert [m.scope for m in run.tick().moves] == [on_pool()]


def test_a_new_leader_goes_on_where_the_old_one_was() -> None:
    live = [an_adjustment("isolation", "isolate.from_tokens", on_pool(), delta=4097 - 65536, reason="long prompts")]
    run = Run(isolation, [], live=live, started_at=1000.0)
    assert [(m.scope, m.delta) for m in run.tick(5).moves] == [(on_pool(), 4097 - 65536)]
    run.nodes.append(a_node())
    assert [(m.scope, m.delta) for m in run.tick(500).moves] == [(on_pool(), 4097 - 65536)]
    assert run.tick(110).moves == ()


def test_what_was_held_for_a_pool_that_never_comes_back_is_given_up() -> None:
    live = [an_adjustment("isolation", "isolate.from_tokens", on_pool("gone"), delta=-1000)]
    run = Run(isolation, [a_node()], live=live, started_at=1000.0)
    assert run.tick(10).moves
    assert run.tick(30).moves == ()


def test_the_share_of_tokens_above_a_length_is_that_of_the_prompts_themselves() -> None:
    rng = random.Random(3)
    prompts = [float(round(rng.lognormvariate(6, 1.5))) for _ in range(2000)]
    exact = sum(x for x in prompts if x > 4096) / sum(prompts)
    assert isolation.tokens_above(sketch_of(prompts), 4096) == pytest.approx(exact, rel=0.05)
    assert isolation.tokens_above(sketch_of([]), 1) == isolation.tokens_above(sketch_of([5.0] * 9), 9) == 0.0


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(isolation, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands) == ([], [], [])
