"""Commands of the heal controller that were lost on their way: they are given again, and not for ever."""

from __future__ import annotations

from controlplane.controllers.decision import Reload, Severity
from controlplane.controllers.heal import RELOAD_S
from tests.controlplane.controllers.builders import a_node, policy_of
from tests.controlplane.controllers.test_heal import a_run, hung, leaking
from tests.controlplane.controllers.test_heal_inversions import waited
from trimtab.messages import NodeState


def test_a_worker_that_serves_on_as_if_nobody_had_told_it_is_told_again_and_then_people_are() -> None:
    run = a_run(leaking(idle_since=0.0), a_node("w1"), policy=policy_of({"heal.grace_s": 20}))
    run.tick()
    run.tick(49)
    assert len(run.commands) == 1, "it may be on its way: 20 s to drain, and 30 more"
    run.tick()
    assert len(run.commands) == 2
    run.tick(100)
    assert [(c.node_id, c.incarnation) for c in run.commands] == [("w0", "i0")] * 3  # type: ignore[union-attr]
    (alert,) = run.decision.alerts
    assert (alert.key, alert.severity) == ("heal/w0", Severity.CRITICAL)
    assert "not restarted more than 3 times an hour" in alert.text


def test_a_worker_that_drains_for_long_or_says_nothing_has_been_told() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    run.of("w0").state = NodeState.DRAINING
    run.tick(300)
    run.silent = {"w0"}
    run.tick(5)
    run.of("w0").state = NodeState.SERVING
    run.tick(60)
    assert len(run.commands) == 1


def test_a_hung_worker_that_was_not_told_is_told_again() -> None:
    run = a_run(hung())
    run.tick(16)
    assert len(run.commands) == 1
    run.tick(30)
    assert len(run.commands) == 2


def test_an_inversion_that_goes_on_has_the_policy_told_again_now_and_then() -> None:
    run = a_run(a_node("w0"))
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=3)
    assert len(run.commands) == 1
    windows = int(RELOAD_S / 5.0)
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=windows - 1)
    assert len(run.commands) == 1
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=1)
    assert len(run.commands) == 2 and all(isinstance(c, Reload) for c in run.commands)
    assert [a.key for a in run.decision.alerts] == ["inversion/w0"]
