"""The heal controller where REALTIME waits longer than BATCH: an engine that missed a policy is told it again."""

from __future__ import annotations

import pytest

from controlplane.controllers.decision import Reload
from tests.controlplane.controllers.builders import NOW, a_node, a_window, policy_of
from tests.controlplane.controllers.run import Run
from tests.controlplane.controllers.test_heal import a_run
from trimtab.measures import BATCH_WAIT_MS, BATCH_WAITS, REALTIME_WAIT_MS, REALTIME_WAITS


def waited(
    run: Run, *, realtime: tuple[int, float], batch: tuple[int, float], windows: int = 3, node_id: str = "w0"
) -> None:
    """So many windows more of (requests, mean wait in ms)."""
    for _ in range(windows):
        run.tick(4)
        n = run.of(node_id)
        counters = {
            REALTIME_WAITS: realtime[0], REALTIME_WAIT_MS: int(realtime[0] * realtime[1]),
            BATCH_WAITS: batch[0], BATCH_WAIT_MS: int(batch[0] * batch[1]),
        }  # fmt: skip
        number = n.windows[-1].number + 1 if n.windows else 2
        n.windows.append(a_window(number, ended=run.now, counters=counters))
        run.tick()


def test_realtime_that_waits_longer_than_batch_has_the_policy_told_again_once() -> None:
    run = a_run(a_node("w0"), a_node("w1"))
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=2)
    assert run.commands == []
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=1)
    (reload,) = run.commands
    assert isinstance(reload, Reload) and reload.node_id == "w0"
    assert "900 ms of 12 REALTIME requests, 200 ms of 12 BATCH ones, within 3 windows" in reload.evidence
    assert [a.key for a in run.decision.alerts] == ["inversion/w0"]
    waited(run, realtime=(4, 900.0), batch=(4, 200.0), windows=20)
    assert len(run.commands) == 1
    assert [a.key for a in run.decision.alerts] == ["inversion/w0"]


def test_an_inversion_that_is_over_and_comes_again_is_another() -> None:
    run = a_run(a_node())
    for _ in range(2):
        waited(run, realtime=(5, 900.0), batch=(5, 200.0))
        waited(run, realtime=(5, 10.0), batch=(5, 200.0), windows=6)
        assert run.decision.alerts == ()
    assert len(run.commands) == 2


@pytest.mark.parametrize(
    ("realtime", "batch"),
    [
        ((5, 200.0), (5, 200.0)),
        ((5, 100.0), (5, 10.0)),
        ((1, 900.0), (5, 10.0)),
        ((5, 900.0), (1, 10.0)),
        ((5, 900.0), (5, 700.0)),
    ],
    ids=["as long", "short waits", "few realtime", "few batch", "hardly longer"],
)
def test_what_is_no_inversion(realtime: tuple[int, float], batch: tuple[int, float]) -> None:
    run = a_run(a_node())
    waited(run, realtime=realtime, batch=batch)
    assert (run.commands, run.decision.alerts) == ([], ())


def test_who_wants_order_of_arrival_has_no_inversion() -> None:
    run = a_run(a_node(), policy=policy_of({"scheduler.mode": "fcfs"}))
    waited(run, realtime=(5, 900.0), batch=(5, 200.0))
    assert run.commands == []


def test_a_node_without_wait_counters_has_none() -> None:
    run = a_run(a_node(windows=[a_window(i, ended=NOW + i) for i in range(2, 9)]))
    run.tick(10)
    assert run.commands == []
