"""A rolling restart, step by step, without a clock and without workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane.restarts import steps
from controlplane.restarts.state import Order, Restart, Stage, Step, Turn, decode, encode
from controlplane.restarts.steps import Answer, Ask, Sight, alone, answered
from trimtab.messages import NodeState

SETTINGS = {"worker.max_num_seqs": "32"}


class World:
    """Workers that do as they are told, and a restart that looks at them each second."""

    def __init__(self, count: int = 3, *, pool: str = "p", **order: Any) -> None:
        names = [f"w{i}" for i in range(count)]
        self.sights = {n: Sight(n, pool, "tiny", f"{n}.1", told={}) for n in names}
        self.now = 1_000_000
        said = {"settings": SETTINGS, "bake_ms": 5000, "ready_ms": 60_000, **order}
        self.r = Restart("rs-1", Order("ada", **said), tuple(Turn(n, pool) for n in names), self.now)
        self.asks: list[Ask] = []

    def step(self, seconds: float = 1.0) -> tuple[Ask, ...]:
        self.now += int(1000 * seconds)
        self.r, asks = steps.step(self.r, self.sights, self.now)
        self.asks += asks
        # Whatever it is, the next leader understands it.
        assert decode(encode(self.r)) == self.r
        return asks

    def see(self, name: str, **changes: Any) -> None:
        self.sights[name] = replace(self.sights[name], **changes)

    def leaves(self, name: str) -> None:
        self.see(name, state=NodeState.DRAINING, connected=False)

    def returns(self, name: str, **changes: Any) -> None:
        old = self.sights[name]
        life = int(old.incarnation.rpartition(".")[2]) + 1
        said = {"told": SETTINGS, "state": NodeState.SERVING, "connected": True, **changes}
        self.see(name, incarnation=f"{name}.{life}", **said)

    def turn(self, name: str) -> Turn:
        return next(t for t in self.r.turns if t.node_id == name)

    def around(self, name: str, **changes: Any) -> None:
        """From being told to being watched."""
        assert [a.node_id for a in self.step()] == [name]
        self.leaves(name)
        self.step()
        self.returns(name, **changes)
        self.step()


def test_workers_go_one_after_another_and_each_is_watched_first() -> None:
    world = World()
    for name in ("w0", "w1", "w2"):
        world.around(name)
        assert world.turn(name).step is Step.BAKING
        assert world.step(4.0) == (), "nobody goes while one is watched"
    world.step(1.0)
    assert (world.r.stage, world.r.verdict) == (Stage.DONE, "3 of 3 workers were started anew")
    assert [(a.node_id, a.settings, a.deadline_ms) for a in world.asks] == [
        (n, SETTINGS, 30_000) for n in ("w0", "w1", "w2")
    ]


def test_no_more_of_a_pool_are_away_than_may_be_whoever_sent_them_away() -> None:
    world = World(4, max_unavailable=2)
    assert [a.node_id for a in world.step()] == ["w0", "w1"]
    world = World(4, max_unavailable=2)
    world.see("w3", state=NodeState.STARTING)
    assert [a.node_id for a in world.step()] == ["w0"]
    world = World(4)
    world.see("w3", connected=False, lost_ms=1000)
    assert world.step() == ()
    assert world.r.lines[-1].text == "waits: w3 of pool p are away or watched"
    world.see("w3", lost_ms=steps.LOST_MS)
    assert [a.node_id for a in world.step()] == ["w0"], "that one is gone for good"


def test_a_drain_of_no_time_is_said_as_at_once() -> None:
    w = World(2, drain_ms=1)
    w.step()
    assert w.r.lines[-1].text == "w0 is told to drain, at once"


def test_pools_do_not_wait_for_each_other() -> None:
    world = World(2)
    world.sights |= {n: Sight(n, "q", "tiny", f"{n}.1") for n in ("x0", "x1")}
    world.r = replace(world.r, turns=(*world.r.turns, Turn("x0", "q"), Turn("x1", "q")))
    assert [a.node_id for a in world.step()] == ["w0", "x0"]


def test_the_only_worker_of_a_model_goes_by_force_alone() -> None:
    world = World(2)
    world.see("w1", model="other")
    assert alone("w0", world.sights)
    assert world.step() == ()
    assert "the only worker that serves tiny" in world.r.lines[-1].text
    world.step(61.0)
    assert world.r.stage is Stage.STOPPED
    forced = World(2, force=True)
    forced.see("w1", model="other")
    assert [a.node_id for a in forced.step()] == ["w0"]


def test_one_that_gets_no_requests_serves_nobody() -> None:
    w = World(2)
    w.see("w0", shut="its breaker is forced open for 2 min yet")
    assert (alone("w1", w.sights), alone("w0", w.sights)) == (True, False)
    w.around("w0")
    assert w.step(10) == (), "w0 is back, and still gets nothing"
    assert w.step(1) == ()
    assert w.r.lines[-1].text == (
        "waits: w0 of pool p are away or watched; w0 gets no requests: its breaker is forced open for 2 min yet"
    )
    w.see("w0", shut="")
    assert [a.node_id for a in w.step()] == ["w1"]


def test_with_more_away_than_one_somebody_still_serves() -> None:
    world = World(2, max_unavailable=2)
    assert [a.node_id for a in world.step()] == ["w0"], "w1 is the last"


def test_settings_that_the_first_worker_refuses_stop_it_before_anything_happened() -> None:
    world = World()
    (ask,) = world.step()
    world.r = answered(world.r, ask.node_id, Answer(False, "BAD_SETTING", "unknown key worker.max_num_seq"), world.now)
    assert world.r.stage is Stage.STOPPED
    assert world.r.verdict == "w0: BAD_SETTING: unknown key worker.max_num_seq (nothing has happened)"
    assert world.step() == ()


def test_one_that_leaves_for_good_is_left_out() -> None:
    world = World(2)
    (ask,) = world.step()
    world.r = answered(world.r, ask.node_id, Answer(False, "LEAVING", ""), world.now)
    world.see("w0", connected=False, lost_ms=steps.LOST_MS)
    world.sights["w2"] = Sight("w2", "p", "tiny", "w2.1")
    world.around("w1")
    world.step(6.0)
    assert world.r.verdict == "1 of 2 workers were started anew; left out: w0"


def test_one_that_was_not_reached_is_told_later() -> None:
    world = World(2)
    (ask,) = world.step()
    world.r = answered(world.r, ask.node_id, Answer(False, "NOT_SENT", ""), world.now)
    assert world.turn("w0").step is Step.PENDING
    assert [a.node_id for a in world.step()] == ["w1"]


def test_one_of_which_nobody_knows_whether_it_was_told_is_told_again() -> None:
    world = World(2)
    (ask,) = world.step()
    world.r = answered(world.r, ask.node_id, Answer(False, "NO_ANSWER", ""), world.now)
    assert world.step() == ()
    assert [a.node_id for a in world.step(steps.AGAIN_MS / 1000)] == ["w0"]
    world.see("w0", state=NodeState.DRAINING)
    assert world.step(steps.AGAIN_MS / 1000) == (), "it drains"


def test_a_control_stream_that_is_away_for_a_moment_is_no_end() -> None:
    world = World(2)
    world.step()
    world.see("w0", connected=False)
    world.step()
    assert world.turn("w0").step is Step.STARTING
    world.see("w0", connected=True, state=NodeState.DRAINING)
    world.step()
    assert world.turn("w0").step is Step.LEAVING
    world.leaves("w0")
    world.step()
    world.returns("w0")
    world.step()
    world.see("w0", connected=False, lost_ms=steps.BLINK_MS - 1)
    world.step()
    assert world.turn("w0").step is Step.BAKING


def test_one_that_does_not_come_back_stops_it_with_words_what_to_do() -> None:
    world = World(2)
    world.step()
    world.leaves("w0")
    world.step()
    world.step(61.0)
    assert world.r.stage is Stage.STOPPED
    assert world.r.verdict.startswith("w0 does not serve again after 1m 1s: see its log")
    assert world.turn("w1").step is Step.PENDING


def test_one_that_stays_stops_it() -> None:
    world = World(2)
    world.step()
    world.see("w0", state=NodeState.DRAINING)
    world.step((world.r.order.drain_ms + steps.ENDS_MS) / 1000 + 1)
    assert "is there still" in world.r.verdict


def test_one_that_comes_back_by_other_settings_than_it_was_told_stops_it() -> None:
    world = World(2)
    world.around("w0", told={})
    assert world.r.stage is Stage.STOPPED
    assert "not by the settings that it was told" in world.r.verdict
    assert world.r.verdict.endswith("(worker.max_num_seqs=32)")


def test_it_waits_until_the_newest_policy_is_taken() -> None:
    world = World(2)
    world.around("w0", took=False)
    assert world.turn("w0").step is Step.STARTING
    world.see("w0", took=True)
    world.step()
    assert world.turn("w0").step is Step.BAKING


BAKED = pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"incarnation": "w0.3"}, "ended while it was watched"),
        ({"connected": False, "lost_ms": steps.BLINK_MS}, "ended while it was watched"),
        ({"state": NodeState.HUNG}, "does not serve while it is watched"),
        ({"refused": "ABOVE_ENGINE_LIMIT: no"}, "refuses the policy"),
        ({"requests": 20, "errors": 3}, "requests fail at w0"),
    ],
)


@BAKED
def test_one_that_does_worse_while_it_is_watched_stops_it_at_once(changes: dict[str, Any], words: str) -> None:
    world = World(2)
    world.around("w0")
    world.see("w0", **changes)
    world.step()
    assert world.r.stage is Stage.STOPPED
    assert words in world.r.verdict


def test_few_failures_or_few_requests_do_not_stop_it() -> None:
    for requests, errors in ((20, 2), (9, 9)):
        world = World(2)
        world.around("w0")
        world.see("w0", requests=requests, errors=errors)
        world.step(5.0)
        assert world.turn("w0").step is Step.DONE


@pytest.mark.parametrize(
    ("before", "after", "stops"),
    [(100.0, 600.0, True), (600.0, 700.0, False), (100.0, 400.0, False), (None, 600.0, False), (100.0, None, False)],
)
def test_a_p99_counts_only_where_it_was_within_the_objective_before(
    before: float | None, after: float | None, stops: bool
) -> None:
    world = World(2)
    world.see("w0", p99_ms=before, objective_ms=500.0)
    world.around("w0", p99_ms=None)
    world.see("w0", p99_ms=after)
    world.step(5.0)
    assert (world.r.stage is Stage.STOPPED) is stops


def test_a_worker_that_does_worse_gets_its_settings_of_before_where_that_is_asked_for() -> None:
    world = World(3, revert=True)
    world.see("w0", told={"worker.max_num_seqs": "8"})
    world.around("w0")
    world.see("w0", requests=20, errors=20)
    (ask,) = world.step()
    assert (world.r.stage, ask.node_id, ask.settings) == (Stage.REVERTING, "w0", {"worker.max_num_seqs": "8"})
    world.leaves("w0")
    world.step()
    world.returns("w0", told={"worker.max_num_seqs": "8"}, requests=0, errors=0)
    world.step()
    assert world.step(5.0) == (), "nobody else goes"
    assert world.r.stage is Stage.STOPPED
    assert world.r.verdict == "requests fail at w0; w0 runs by its settings of before"


def two_away(**order: Any) -> World:
    """w0 is on its way back to its settings of before, and w1 was told to go as it was."""
    world = World(3, revert=True, max_unavailable=2, **order)
    assert [a.node_id for a in world.step()] == ["w0", "w1"]
    for name in ("w0", "w1"):
        world.leaves(name)
    world.step()
    world.returns("w0")
    world.step()
    world.see("w0", requests=20, errors=20)
    assert [(a.node_id, a.settings) for a in world.step()] == [("w0", {"worker.max_num_seqs": ""})]
    assert (world.r.stage, world.turn("w1").step) == (Stage.REVERTING, Step.STARTING)
    return world


def test_another_one_that_fails_does_not_end_the_way_back_of_the_first() -> None:
    world = two_away(ready_ms=10_000)
    world.leaves("w0")
    world.step()
    assert world.step(9.0) == ()
    assert world.turn("w1").step is Step.FAILED
    assert world.r.lines[-1].text.startswith("w1 does not serve again after")
    assert (world.r.stage, sorted(world.r.under_way)) == (Stage.REVERTING, ["w0"])
    world.returns("w0", told={}, requests=0, errors=0)
    world.step()
    world.step(5.0)
    assert world.r.stage is Stage.STOPPED
    assert world.r.verdict == "requests fail at w0; w0 runs by its settings of before"


def test_two_that_do_worse_both_get_their_settings_of_before_and_the_first_reason_stands() -> None:
    world = two_away()
    world.returns("w1", refused="BAD: no")
    world.leaves("w0")
    assert [(a.node_id, a.settings) for a in world.step()] == [("w1", {"worker.max_num_seqs": ""})]
    for name in ("w0", "w1"):
        world.leaves(name)
    world.step()
    world.returns("w1", told={}, refused="")
    world.step()
    world.see("w1", state=NodeState.HUNG)
    world.step()
    assert (world.r.stage, world.turn("w1").step) == (Stage.REVERTING, Step.FAILED), "w0 is on its way"
    world.returns("w0", told={}, requests=0, errors=0)
    world.step()
    world.step(5.0)
    assert world.r.verdict == (
        "requests fail at w0; then w1 does not serve while it is watched: it is hung; w0 runs by its settings of before"
    )


def test_one_that_refuses_what_it_is_told_does_not_end_the_way_back_of_another() -> None:
    world = World(3, revert=True, max_unavailable=2)
    world.step()
    world.leaves("w0")
    world.step()
    world.returns("w0")
    world.step()
    world.see("w0", state=NodeState.HUNG)
    world.step()
    world.r = answered(world.r, "w1", Answer(False, "BAD_SETTING", "no"), world.now)
    assert (world.r.stage, world.turn("w1").step) == (Stage.REVERTING, Step.FAILED)
    world.leaves("w0")
    world.step()
    world.returns("w0", told={})
    world.step()
    world.step(5.0)
    assert world.r.stage is Stage.STOPPED
    assert world.r.verdict.startswith("w0 does not serve while it is watched")


def test_settings_that_were_not_there_before_are_taken_back() -> None:
    world = World(2, revert=True)
    world.around("w0")
    world.see("w0", state=NodeState.HUNG)
    (ask,) = world.step()
    assert ask.settings == {"worker.max_num_seqs": ""}
    world.leaves("w0")
    world.step()
    world.returns("w0", told={})
    world.step()
    assert world.turn("w0").step is Step.BAKING
    world.see("w0", state=NodeState.HUNG)
    world.step()
    assert world.r.stage is Stage.STOPPED, "not again and again"
    assert "; then w0 does not serve" in world.r.verdict


def test_what_is_over_stays_as_it_is() -> None:
    world = World(2)
    world.step()
    over = world.r.ended(Stage.ABORTED, "aborted by ada", world.now)
    assert steps.step(over, world.sights, world.now + 1000) == (over, ())
    assert answered(over, "w0", Answer(False, "LEAVING"), world.now) == over
    assert over.under_way == frozenset()


def test_what_is_no_restart_is_none() -> None:
    assert decode(b"{}") is None
    assert decode(b"[1]") is None
    assert decode(b"\xff") is None
    assert decode(encode(World().r).replace(b'"rolling"', b'"sideways"')) is None
