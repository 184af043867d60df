"""The heal controller where it only advises: it says what it would do for as long as there is a reason, and believes nothing was done."""

from __future__ import annotations

from controlplane.controllers.decision import Restart
from tests.controlplane.controllers.builders import policy_of
from tests.controlplane.controllers.run import Run, restarted, say
from tests.controlplane.controllers.test_heal import a_run, hung, leaking
from trimtab.messages import Load, NodeState

ADVISE = {"loops.heal": "advise"}


def told(run: Run) -> list[tuple[str, str]]:
    """(node, process) of all restarts that were commanded or advised."""
    return [(c.node_id, c.incarnation) for c in run.commands if isinstance(c, Restart)]


def test_advice_is_given_again_every_ten_minutes_while_its_reason_lasts_and_nobody_is_expected_back() -> None:
    run = a_run(leaking(idle_since=0.0), policy=policy_of(ADVISE))
    alerts = 0
    for _ in range(2401):
        alerts += len(run.tick().alerts)
    assert told(run) == [("w0", "i0")] * 5, "at the first look, and after 10, 20, 30 and 40 minutes"
    assert alerts == 0
    say(run.of("w0"), Load(0, 0, 0, 9_999, 10_000))
    run.tick(1200)
    assert len(run.commands) == 5


def test_advice_that_people_took_is_over_and_another_process_is_another_matter() -> None:
    run = a_run(hung(), policy=policy_of(ADVISE))
    for _ in range(5):
        run.tick(20)
        restarted(run.of("w0"), run.now)
        run.of("w0").state = NodeState.HUNG
    processes = ["i0", "i0'", "i0''", "i0'''", "i0''''"]
    assert told(run) == [("w0", each) for each in processes], "none of these restarts was its own"
    assert run.decision.alerts == ()


def test_who_only_advises_names_all_that_leak_and_acts_at_once_when_it_may() -> None:
    run = a_run(leaking("w0", idle_since=0.0), leaking("w1", idle_since=0.0), policy=policy_of(ADVISE))
    run.tick(3)
    assert told(run) == [("w0", "i0"), ("w1", "i0")]
    run.policy = policy_of()
    run.tick()
    assert told(run) == [("w0", "i0"), ("w1", "i0"), ("w0", "i0")]
    run.tick(5)
    assert len(run.commands) == 3, "one at a time"


def test_a_worker_that_was_told_before_people_let_it_only_advise_is_still_expected_back() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    run.policy = policy_of(ADVISE)
    run.of("w0").connected = False
    run.tick(650)
    assert [a.text for a in run.decision.alerts] == ["w0 was told to restart and is not back"]
