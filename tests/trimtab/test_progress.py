"""Health by progress, and the step-time prediction behind it."""

import pytest

from trimtab.progress import Progress, Pulse, StepTime, judge


def verdict(now, *, pulse=None, work=True, since=0.0):
    return judge(pulse or Pulse(), work_waiting=work, idle_since=since, now=now)


def test_an_idle_engine_is_well_however_long_it_idles():
    assert verdict(1e6, work=False) is Progress.IDLE


def test_an_engine_that_never_begins_a_step_for_its_work_is_hung_after_two_seconds():
    assert verdict(101.9, since=100.0) is Progress.MOVING
    assert verdict(102.1, since=100.0) is Progress.HUNG


def test_a_long_step_gets_four_times_its_predicted_time():
    pulse = Pulse(7, begun=100.0, predicted_ms=3000.0, ended=False)
    assert verdict(111.9, pulse=pulse) is Progress.MOVING
    assert verdict(112.1, pulse=pulse) is Progress.HUNG


def test_the_prediction_of_a_step_that_ended_buys_no_patience():
    pulse = Pulse(7, begun=100.0, predicted_ms=30_000.0, ended=True)
    assert verdict(102.1, pulse=pulse) is Progress.HUNG


def test_step_time_is_unknown_at_first_and_then_follows_what_was_seen():
    model = StepTime()
    assert model.predict(100) == model.unknown_ms
    for tokens in (10, 100, 200, 50, 150):
        model.observe(tokens, 20 + 2 * tokens)
    assert model.predict(120) == pytest.approx(260, rel=0.01)
    assert model.predict(0) >= 0


def test_steps_of_one_size_predict_larger_ones_in_proportion():
    model = StepTime()
    for _ in range(5):
        model.observe(8, 40.0)
    assert model.predict(8) == pytest.approx(40)
    assert model.predict(80) == pytest.approx(400)
    assert model.predict(4) == pytest.approx(40)
