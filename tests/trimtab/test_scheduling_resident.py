"""What requests waste in their last blocks, as the scheduler tells it."""

from trimtab.blocks import LADDER, waste
from trimtab.engine import Costs, EngineValue
from trimtab.messages import Workload
from trimtab.policy import Policy
from trimtab.scheduling import STATS, Rules
from trimtab.scheduling.resident import LOOK_EVERY_MS, NOBODY, VISITS, Wastes
from trimtab.snapshot import Limits


def an_engine(lengths):
    """With requests of so many prompt tokens each, and outputs that don't end soon."""
    rules = Rules.of(Policy(), Limits(64, 8192, 100_000))
    engine = EngineValue(Costs(LOOK_EVERY_MS), 16, 10_000, rules)
    for i, tokens in enumerate(lengths):
        engine.add(f"r{i}", tokens, 1000, Workload.REALTIME, float(i))
    return engine


def told(engine):
    stats = dict(zip(STATS, engine.planner.stats(), strict=True))
    return {size: stats[f"waste_{size}"] for size in LADDER}


def test_the_waste_of_every_size_is_that_of_the_tokens_that_are_there():
    engine = an_engine((5, 100, 700))
    for step in range(6):
        engine.step(step * LOOK_EVERY_MS)
        held = [s.computed for s in engine.running]
        assert told(engine) == {size: waste(held, size) for size in LADDER}
    assert len(held) == 3


def test_without_a_request_there_is_no_waste_and_not_none_of_it():
    engine = an_engine((5,))
    assert set(told(engine).values()) == {NOBODY}
    engine.step(0.0)
    assert told(engine)[8] == 3 / 8
    engine.remove("r0")
    assert set(told(engine).values()) == {NOBODY}


def test_requests_are_visited_now_and_then_alone():
    wastes, visits = Wastes(), []

    def lengths():
        visits.append(1)
        return [8]

    for busy_ms in (0.0, 1.0, LOOK_EVERY_MS - 1.0, LOOK_EVERY_MS, LOOK_EVERY_MS + 1.0):
        assert wastes.of(lengths, 1, busy_ms)[0] == 0.0
    assert len(visits) == 2


def test_one_that_has_computed_nothing_yet_wastes_nothing():
    assert set(Wastes().of(lambda: [0], 1, 0.0)) == {NOBODY}


def test_of_many_requests_a_few_sizes_are_looked_at_each_time_until_all_are():
    lengths = [1 + 37 * i % 5000 for i in range(VISITS // 4)]
    wastes = Wastes()
    for look in range(1, 5):
        shares = wastes.of(lambda: lengths, len(lengths), look * LOOK_EVERY_MS)
        assert sum(share != NOBODY for share in shares) == min(4 * look, len(LADDER))
    assert list(shares) == [waste(lengths, size) for size in LADDER]
    for _ in range(3):
        lengths.extend(lengths)
    before = list(shares)
    after = wastes.of(lambda: lengths[1:], len(lengths), 5 * LOOK_EVERY_MS)
    assert sum(x != y for x, y in zip(before, after, strict=True)) == 1, "always one at least"
