"""What of a tick is new: moves put, renewed and taken back, pins respected, and a controller that fails holding what it held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from controlplane.controllers.decision import Decision, Move, PolicyOf, Restart
from controlplane.seen import Seen
from controlplane.tick import Controllers, changes, live_of
from tests.controlplane.controllers.builders import a_seen, policy_of
from trimtab.policy import Loop
from trimtab.snapshot import Adjustment, Scope, ScopeKind

NOW = 1_000_000
W0 = Scope(ScopeKind.NODE, ("w0",))
HALF = Move("batch.active", W0, "too slow", "P99 900 ms", factor=0.5, ttl_s=60.0)


@dataclass
class Told:
    """A controller that does what it is told. Its name is that of one that there is, for the sake of its mode."""

    name: str = "batch"
    decisions: list[Decision | Exception] = field(default_factory=list)
    started: list[list[Adjustment]] = field(default_factory=list)

    def start(self, live: Iterable[Adjustment]) -> Any:
        self.started.append(list(live))
        return "new"

    def step(self, state: Any, seen: Seen, policy: PolicyOf, now: float) -> Decision:
        said = self.decisions.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


def written(found: Any) -> dict[Any, Adjustment]:
    return live_of(found.put, 0)


def test_a_new_move_is_put_with_its_expiry() -> None:
    found = changes("batch", [HALF], {}, set(), NOW)
    (a,) = found.put
    assert (a.controller, a.field, a.scope, a.factor, a.expires_unix_ms) == (
        "batch",
        "batch.active",
        W0,
        0.5,
        NOW + 60_000,
    )
    assert (found.reason, found.evidence) == ("too slow", "P99 900 ms")
    assert found.texts == ("batch.active at node/w0 ×0.5",)


def test_a_move_that_lives_is_not_written_again() -> None:
    live = written(changes("batch", [HALF], {}, set(), NOW))
    assert changes("batch", [HALF], live, set(), NOW + 29_000).empty


def test_it_is_renewed_once_half_its_time_is_over_and_that_is_no_news() -> None:
    live = written(changes("batch", [HALF], {}, set(), NOW))
    found = changes("batch", [HALF], live, set(), NOW + 31_000)
    assert [a.expires_unix_ms for a in found.put] == [NOW + 91_000]
    assert (found.texts, found.reason) == ((), "still: too slow")


def test_all_are_renewed_in_the_write_that_one_needs() -> None:
    other = Move("batch.hard_cap", W0, "memory", factor=0.5)
    live = written(changes("batch", [HALF], {}, set(), NOW))
    found = changes("batch", [HALF, other], live, set(), NOW + 1000)
    assert len(found.put) == 2
    assert found.texts == ("batch.hard_cap at node/w0 ×0.5",)


def test_what_is_no_longer_wanted_is_taken_back_and_others_moves_stay() -> None:
    live = written(changes("batch", [HALF], {}, set(), NOW)) | written(changes("oom", [HALF], {}, set(), NOW))
    found = changes("batch", [], live, set(), NOW + 1000)
    assert found.drop == (("batch", "batch.active", W0),)
    assert found.texts == ("batch.active at node/w0 as people set it",)
    assert found.put == ()


def test_a_pinned_field_is_left_alone() -> None:
    assert changes("batch", [HALF], {}, {"batch.active"}, NOW).empty


def test_a_factor_stays_within_its_bounds() -> None:
    found = changes("batch", [Move("batch.active", W0, "r", factor=0.01)], {}, set(), NOW)
    assert found.put[0].factor == 0.1


def test_a_controller_that_is_off_is_not_asked_and_holds_nothing() -> None:
    told = Told()
    controllers = Controllers([told])
    controllers.start(())
    (step,) = controllers.step(a_seen(), policy_of({"loops.batch": "off"}))
    assert (step.mode, step.decision.moves) == (Loop.OFF, ())


def test_a_controller_that_fails_holds_what_it_held_and_says_so() -> None:
    told = Told(
        decisions=[Decision("s", (HALF,), commands=(Restart("w0", "i0", 0.0, "r"),)), RuntimeError("no"), Decision("t")]
    )
    other = Told("priority", decisions=[Decision("p")] * 3)
    controllers = Controllers([told, other])
    controllers.start(())
    policy = policy_of()
    controllers.step(a_seen(), policy)
    broken, fine = controllers.step(a_seen(), policy)
    assert (broken.decision.moves, broken.decision.commands, broken.failed) == ((HALF,), (), "RuntimeError: no")
    assert [a.key for a in broken.decision.alerts] == ["controller/batch"]
    assert broken.decision.holds == ("it failed: no",)
    assert (fine.failed, controllers.states["batch"]) == ("", "s")
    assert controllers.step(a_seen(), policy)[0].failed == ""


def test_a_new_leader_starts_each_controller_from_its_own_live_adjustments() -> None:
    told, other = Told(), Told("priority")
    live = written(changes("batch", [HALF], {}, set(), NOW))
    Controllers([told, other]).start(live.values())
    assert [a.field for a in told.started[0]] == ["batch.active"]
    assert other.started == [[]]
