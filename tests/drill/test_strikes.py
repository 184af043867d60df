"""Which faults strike, and whom."""

from __future__ import annotations

from services.drill.cases import cases
from services.drill.strikes import ANY, PAUSE_S, Kind, Strike, plan, victim
from trimtab.messages import Workload


def test_every_round_has_every_kind_once() -> None:
    strikes = plan(7, 3)
    rounds = [{s.kind for s in strikes[i : i + len(ANY)]} for i in range(0, len(strikes), len(ANY))]
    assert rounds == [set(ANY)] * 3
    assert all(PAUSE_S[0] <= s.pause_s <= PAUSE_S[1] and 0.0 <= s.draw < 1.0 for s in strikes)


def test_a_seed_tells_what_strikes() -> None:
    assert plan(7, 3) == plan(7, 3)
    assert plan(7, 3) != plan(8, 3)


def test_the_last_well_worker_is_never_struck() -> None:
    strike = Strike(Kind.KILL, 0.0, 0.99)
    assert victim(strike, []) is None
    assert victim(strike, ["w1"]) is None
    assert victim(strike, ["w1", "w0"]) == "w1"
    assert {victim(Strike(Kind.CUT, 0.0, d / 10), ["w0", "w1", "w2"]) for d in range(10)} == {"w0", "w1", "w2"}


def test_cases_differ_in_what_can_go_wrong() -> None:
    made = cases(3, 100)
    assert made == cases(3, 100)
    assert len({c.prompt for c in made}) == 100
    assert {c.workload for c in made} == set(Workload)
    assert any(c.sampling.stop for c in made) and not all(c.sampling.stop for c in made)
    sizes = [len(c.prompt) for c in made]
    assert max(sizes) > 5 * min(sizes)
