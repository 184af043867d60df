"""What a step will take: learned from steps, never negative, not spoilt by a bad one; and how much fits into a given time."""

import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scheduling import Shape, StepTimeModel, steptime
from trimtab.scheduling.steptime import ENOUGH, FIRST_TOKENS, GROWTH, KNEES, OUTLIER, UNKNOWN_MS, N

# one, prefill token, thousand tokens of context, decode, thousand tokens of KV, knees
WORLDS = {
    "a GPU": (8.0, 0.05, 0.02, 0.1, 0.03, 0.02, 0.03),
    "a GPU without knees": (8.0, 0.05, 0.0, 0.1, 0.0, 0.0, 0.0),
    "a CPU, where long prompts take hundreds of times what a decode does": (5.0, 0.5, 0.1, 2.0, 0.5, 0.0, 0.0),
    "steps that wait for memory until the last knee": (20.0, 0.0, 0.05, 0.0, 0.02, 0.0, 0.1),
}


def a_shape(prefill=0, context=0, decodes=0, kv=0):
    shape = Shape(decodes=decodes, kv_tokens=kv)
    if prefill:
        shape.add_prefill(prefill, context)
    return shape


def true_ms(world, shape):
    return sum(w * x for w, x in zip(world, shape.features(), strict=True))


def some_shapes(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        decodes = rng.randrange(1, 33)
        prefill = rng.randrange(1, 1500) if rng.random() < 0.6 else 0
        yield a_shape(prefill, rng.choice([0, 500, 4000, 20_000]), decodes, decodes * rng.randrange(100, 4000))


def a_model(world, *, seed=1, steps=600, noise=0.03):
    model, rng = StepTimeModel(), random.Random(seed)
    for shape in some_shapes(seed, steps):
        model.observe(shape, true_ms(world, shape) * rng.gauss(1.0, noise))
    return model


def off_by(model, world, shapes):
    """The worst share of the true time by which a prediction is off."""
    return max(abs(model.predict(s) / true_ms(world, s) - 1.0) for s in shapes)


def test_features_are_those_that_the_weights_are_named_for():
    assert a_shape(300, 1000, 20, 5000).features() == [1.0, 300.0, 345.0, 20.0, 5.0, 304.0, 64.0]
    assert len(Shape().features()) == N
    assert a_shape(KNEES[0]).features()[5] == 0.0


def test_the_context_of_a_chunk_counts_its_own_tokens_by_half():
    whole, halves = a_shape(100), a_shape(50)
    halves.add_prefill(50, 50)
    assert whole.prefill_context == halves.prefill_context == 5000.0


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_recovers_what_steps_take_from_noisy_ones(world, seed):
    model = a_model(world, seed=seed)
    assert off_by(model, world, some_shapes(99, 200)) < 0.07
    assert off_by(model, world, [a_shape(decodes=n, kv=n * 500) for n in (1, 4, 16, 32)]) < 0.07


def test_it_recovers_the_weights_themselves():
    world = WORLDS["a GPU"]
    constant, _, context, decode, kv, *_ = a_model(world, steps=3000).weights
    assert constant == pytest.approx(8.0, rel=0.05)
    assert context == pytest.approx(0.02, rel=0.05)
    assert decode == pytest.approx(0.1, rel=0.15)
    assert kv == pytest.approx(0.03, rel=0.15)


def test_nothing_is_predicted_before_enough_was_seen():
    model = StepTimeModel()
    for n in range(ENOUGH):
        assert not model.known
        assert model.predict(a_shape(10 * n)) == UNKNOWN_MS
        model.observe(a_shape(100 + n), 50.0)
    assert model.known
    assert model.predict(a_shape(102)) == pytest.approx(50.0, rel=0.05)


def test_an_empty_step_teaches_nothing():
    model = StepTimeModel()
    model.observe(Shape(), 50.0)
    assert model.seen == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 9000), st.integers(0, 40), st.integers(0, 50_000), st.floats(0.0, 1e5)),
        max_size=40,
    )
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whatever_it_sees_more_work_never_looks_cheaper_nor_negative(steps):
    model = StepTimeModel()
    for prefill, context, decodes, kv, ms in steps:
        model.observe(a_shape(prefill, context, decodes, kv), ms)
    assert min(model.weights) >= 0.0
    small, large = a_shape(10, 10, 1, 100), a_shape(400, 100, 30, 9000)
    assert 0.0 <= model.predict(small) <= model.predict(large)


def test_a_step_that_something_else_delayed_spoils_nothing():
    world = WORLDS["a GPU"]
    model = a_model(world, noise=0.0)
    for _ in range(3):
        model.observe(a_shape(300, 0, 10, 5000), 30_000.0)
    assert off_by(model, world, some_shapes(7, 100)) < 0.1


@pytest.mark.parametrize("first_ms", [2000.0, 60_000.0])
def test_a_slow_first_step_is_forgotten(first_ms):
    """Kernels are compiled in it."""
    model, rng = StepTimeModel(), random.Random(3)
    for n in range(12):
        shape = a_shape(rng.randrange(1, 200), 0, rng.randrange(1, 8))
        model.observe(shape, first_ms if n == 0 else 5.0 + 0.1 * shape.tokens)
        if n + 1 == 2 * ENOUGH:
            assert model.predict(a_shape(100)) == pytest.approx(15.0, rel=0.35)
    assert model.predict(a_shape(100)) == pytest.approx(15.0, rel=0.15)


@pytest.mark.parametrize("times", [2.0, 6.0, 0.3])
def test_a_machine_of_another_speed_is_learned_anew(times):
    world = WORLDS["a GPU"]
    model = a_model(world, noise=0.0)
    for shape in some_shapes(11, 800):
        model.observe(shape, times * true_ms(world, shape))
    assert off_by(model, tuple(times * w for w in world), some_shapes(12, 50)) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("forget", [steptime.FORGET, 0.9], ids=["20,000 steps", "as good as 400,000 steps"])
def test_what_was_learned_outlasts_a_long_time_without_prompts(monkeypatch, forget):
    world = WORLDS["a GPU"]
    model = a_model(world, noise=0.0)
    before = model.predict(a_shape(500, 1000))
    monkeypatch.setattr(steptime, "FORGET", forget)
    for n in range(20_000):
        model.observe(a_shape(decodes=8, kv=8 * (100 + n)), true_ms(world, a_shape(decodes=8, kv=8 * (100 + n))))
    assert model.predict(a_shape(500, 1000)) == pytest.approx(before, rel=0.3)


def test_a_weight_of_which_all_evidence_has_faded_stays_as_it_is():
    world = WORLDS["a GPU"]
    learned = a_model(world, noise=0.0)
    before = learned.predict(a_shape(500, 1000))
    for exponent in range(60, 309):
        model = deepcopy(learned)
        model._target = [value / 10.0**exponent for value in learned._target]
        model._gram = [[value / 10.0**exponent for value in row] for row in learned._gram]
        model._newest = steptime.GROWN**3
        for n in range(2 * steptime.SOLVE_EVERY):
            shape = a_shape(decodes=8 + n, kv=1000 * n)
            model.observe(shape, true_ms(world, shape))
        assert model.predict(a_shape(500, 1000)) == pytest.approx(before, rel=0.3)


def test_only_what_a_step_holds_is_touched_and_all_else_is_forgotten_as_if_it_were():
    """A plain fit that fades every sum at every step."""
    model, rng = StepTimeModel(), random.Random(2)
    gram, target = [[0.0] * N for _ in range(N)], [0.0] * N
    for n, shape in enumerate(some_shapes(5, 12_000)):
        ms = true_ms(WORLDS["a GPU"], shape) * rng.gauss(1.0, 0.03)
        predicted = model.predict(shape) if model.known else 0.0
        model.observe(shape, ms)
        ms = min(ms, OUTLIER * max(predicted, 1.0)) if n >= ENOUGH else ms
        forget = min(steptime.FORGET, 1.0 - 2.0 / (n + 3.0))
        weight, x = 1.0 / max(ms, predicted / OUTLIER, 1.0), shape.features()
        for i in range(N):
            target[i] = target[i] * forget + weight * x[i] * ms
            for j in range(i, N):
                gram[i][j] = gram[i][j] * forget + weight * x[i] * x[j]
    assert [value / model._newest for value in model._target] == pytest.approx(target)
    for row, expected in zip(model._gram, gram, strict=True):
        assert [value / model._newest for value in row] == pytest.approx(expected)


def test_its_own_error_is_measured_before_it_learns_from_a_step():
    model = a_model(WORLDS["a GPU"], noise=0.0)
    quiet = model.error_ms
    for n in range(200):
        shape = a_shape(decodes=10)
        model.observe(shape, true_ms(WORLDS["a GPU"], shape) * (1.5 if n % 2 else 0.5))
    assert quiet < 1.0 < model.error_ms


# How much fits.

bases = st.builds(
    a_shape, st.integers(0, 400), st.integers(0, 5000), st.integers(0, 48), st.integers(0, 60_000)
)  # fmt: skip
limits = st.floats(0.0, 400.0)


def a_knowing(world, largest=1 << 14):
    return StepTimeModel(weights=list(world), seen=1000, largest_tokens=largest)


def with_prefill(shape, tokens, context):
    joined = Shape(shape.prefill_tokens, shape.prefill_context, shape.decodes, shape.kv_tokens)
    joined.add_prefill(tokens, context)
    return joined


def with_decodes(shape, decodes, context):
    return Shape(
        shape.prefill_tokens, shape.prefill_context, shape.decodes + decodes, shape.kv_tokens + decodes * context
    )


@given(st.sampled_from(list(WORLDS.values())), bases, limits, st.integers(0, 30_000))
@settings(max_examples=200, deadline=None)
def test_a_prompt_fills_the_time_and_one_token_more_would_not_fit(world, shape, limit, context):
    model = a_knowing(world)
    room = model.prefill_room(shape, limit, context)
    assert room >= 0
    if room:
        assert model.predict(with_prefill(shape, room, context)) <= limit + 1e-6
    if shape.tokens + room < GROWTH * model.largest_tokens:
        assert model.predict(with_prefill(shape, room + 1, context)) > limit - 1e-6


@given(st.sampled_from(list(WORLDS.values())), bases, limits, st.integers(1, 4000))
@settings(max_examples=200, deadline=None)
def test_decodes_fill_the_time_and_one_more_would_not_fit(world, shape, limit, context):
    model = a_knowing(world)
    room = model.decode_room(shape, limit, context)
    assert room >= 0
    if room:
        assert model.predict(with_decodes(shape, room, context)) <= limit + 1e-6
    if shape.tokens + room < GROWTH * model.largest_tokens:
        assert model.predict(with_decodes(shape, room + 1, context)) > limit - 1e-6


def test_a_step_never_grows_past_twice_the_largest_seen():
    model = a_knowing(WORLDS["a GPU"], largest=100)
    assert model.prefill_room(a_shape(decodes=50), 1e6, 0) == 150
    assert model.decode_room(a_shape(decodes=50), 1e6, 10) == 150
    assert model.prefill_room(a_shape(decodes=250), 1e6, 0) == 0


def test_an_unknown_machine_gets_small_steps_first_whatever_the_limit():
    model = StepTimeModel()
    assert model.prefill_room(Shape(), 1.0, 0) == FIRST_TOKENS
    assert model.prefill_room(a_shape(decodes=60), 1.0, 0) == FIRST_TOKENS - 60
    assert model.prefill_room(a_shape(decodes=70), 1.0, 0) == 0
    model.observe(a_shape(FIRST_TOKENS), 20.0)
    assert model.prefill_room(Shape(), 1.0, 0) == GROWTH * FIRST_TOKENS


def test_without_a_limit_everything_fits():
    assert StepTimeModel().prefill_room(Shape(), float("inf"), 0) >= 1 << 20
    assert a_knowing(WORLDS["a GPU"]).decode_room(Shape(), float("inf"), 100) >= 1 << 20


def test_one_slow_step_costs_at_most_its_bound():
    model = a_model(WORLDS["a GPU"], noise=0.0)
    shape = a_shape(300, 0, 10, 5000)
    before = model.error_ms
    model.observe(shape, 1e9)
    assert model.error_ms - before <= 0.02 * OUTLIER * true_ms(WORLDS["a GPU"], shape)
