"""What the soak makes of a process's memory."""

import random

from services.bench.push.soak import BATCHES, SAMPLE_S, Watched, _goals


def of(name: str, kb_per_minute: float, noise_kb: float, samples: int = 300) -> Watched:
    rng = random.Random(1)
    times = [i * SAMPLE_S for i in range(samples)]
    return Watched(name, [(t, 90_000.0 + t / 60.0 * kb_per_minute + rng.uniform(-noise_kb, noise_kb)) for t in times])


def test_what_grows_is_found_under_noise() -> None:
    slope = of("control0", 60.0, 200.0).slope()
    assert slope is not None and 40.0 < slope.value < 80.0


def test_noise_alone_is_no_growth() -> None:
    slope = of("control0", 0.0, 200.0).slope()
    assert slope is not None and abs(slope.value) < 20.0 and slope.low < 0.0 < slope.high


def test_one_jump_is_no_slope() -> None:
    """A median of slopes: an allocator that takes a page once does not count as growth for ever."""
    jumped = of("control0", 0.0, 0.0)
    jumped.samples = [(t, kb + (4000.0 if t > 550.0 else 0.0)) for t, kb in jumped.samples]
    slope = jumped.slope()
    assert slope is not None and slope.value == 0.0


def test_too_few_samples_have_no_slope_and_no_verdict() -> None:
    few = of("control0", 60.0, 0.0, samples=2 * BATCHES - 1)
    assert few.slope() is None
    assert [g.met for g in _goals({"control0": few}, True)] == [None]


def test_goals_are_of_processes_and_not_of_the_bench_itself() -> None:
    watched = {w.name: w for w in (of("control0", 60.0, 0.0), of("nodes", 5.0, 0.0), of("this client", 900.0, 0.0))}
    assert [(g.name.rpartition("_")[2], g.met) for g in _goals(watched, True)] == [("control0", False), ("nodes", True)]
    assert [g.met for g in _goals(watched, False)] == [None, None], "a quick run decides nothing"
