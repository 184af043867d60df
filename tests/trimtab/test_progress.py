"""Health by progress: an engine is judged by steps that end."""

from trimtab.progress import Progress, Pulse, judge


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
