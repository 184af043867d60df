"""What block sizes waste and keep, which accepted one is nearest, and what another one would save."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.blocks import LADDER, SPEED, Figures, context_of, gain, kept, nearest, recompute_s, speed, waste
from trimtab.policy import Policy
from trimtab.scheduling import Shape, StepTimeModel
from trimtab.workload import CHAT, CODE, DOCUMENTS, SUMMARIES

ALIKE: dict[int, dict[int, float]] = {}
"""No size is faster than another."""
MIN_GAIN = Policy().block_plan.min_gain
lengths = st.lists(st.integers(1, 200_000), max_size=50)
sizes = st.sampled_from(LADDER)


def test_waste_is_the_empty_share_of_the_slots_in_last_blocks() -> None:
    assert waste([10, 16, 17], 16) == (6 + 0 + 15) / (16 + 16 + 32)
    assert waste([64, 128], 64) == 0.0
    assert waste([], 64) == 0.0


@pytest.mark.parametrize("requests", [1, 4])
def test_computing_anew_takes_what_the_step_model_says_of_its_chunks(requests: int) -> None:
    model = StepTimeModel([0.0, 0.5, 0.02, 0.0, 0.0, 0.0, 0.0], seen=100)
    ms, chunk, each = 0.0, 500, 20_000
    for _ in range(requests):
        for context in range(0, each, chunk):
            shape = Shape()
            shape.add_prefill(chunk, context)
            ms += model.predict(shape)
    context = requests * context_of(each)
    assert recompute_s(requests * each, context, 2000.0, 0.02) == pytest.approx(ms / 1000.0)
    assert recompute_s(requests * each, context, 2000.0) == pytest.approx(requests * 10.0)
    assert recompute_s(0, 0, 2000.0, 0.02) == 0.0


def test_what_is_known_already_is_context_and_nothing_to_compute() -> None:
    assert context_of(100) == context_of(40) + context_of(100, 40)
    assert context_of(100, 100) == 0
    # A long one beside short ones costs more than as many tokens in equal parts.
    assert context_of(91) + 9 * context_of(1) > 10 * context_of(10)


@given(lengths, sizes)
def test_waste_is_a_share_and_less_than_a_block_of_each_request(tokens: list[int], size: int) -> None:
    found = waste(tokens, size)
    assert 0.0 <= found < 1.0
    slots = sum(-(-n // size) * size for n in tokens)
    assert found * slots == pytest.approx(slots - sum(tokens))
    assert round(found * slots, 6) <= (size - 1) * len(tokens)


@given(lengths, sizes)
def test_blocks_of_half_the_size_never_waste_more(tokens: list[int], size: int) -> None:
    assert waste(tokens, size // 2) <= waste(tokens, size)


def test_kept_counts_whole_blocks_of_what_was_hit() -> None:
    assert kept([64, 100, 128], 64) == (64 + 64 + 128) / 292
    assert kept([63], 64) == 0.0
    assert kept([], 64) == 1.0
    assert kept([0, 0], 64) == 1.0


@given(lengths, sizes)
def test_blocks_that_divide_a_size_keep_all_that_it_kept(hits: list[int], size: int) -> None:
    whole = [n // size * size for n in hits]
    assert kept(whole, size // 2) == 1.0
    assert kept(hits, size) <= kept(hits, size // 2)


@pytest.mark.parametrize(
    ("named", "accepted", "found"),
    [
        (24, (32, 64, 96), 32),
        (24, (16, 32, 64), 32),
        (24, (12, 48), 12),
        (1024, (256,), 256),
        (768, (512, 1024), 1024),
        (512, (32, 512, 1024), 512),
        (24, (), None),
    ],
)
def test_the_nearest_is_so_by_ratio_and_the_smaller_of_two(
    named: int, accepted: tuple[int, ...], found: int | None
) -> None:
    assert nearest(named, accepted) == found
    assert nearest(named, frozenset(accepted)) == found


def test_speed_is_relative_and_read_off_between_the_sizes_that_were_measured() -> None:
    speeds = {256: {32: 0.8, 128: 1.0}, 8192: {32: 0.5, 128: 1.0, 512: 1.2}}
    assert speed(128, 32, 300, speeds) == pytest.approx(0.8)
    assert speed(32, 128, 300, speeds) == pytest.approx(1.25)
    assert speed(128, 64, 300, speeds) == pytest.approx(0.9), "half way by ratio"
    assert speed(128, 2048, 9000, speeds) == pytest.approx(1.2), "beyond the last as the last"
    assert speed(64, 64, 9000, speeds) == 1.0


def test_where_no_speed_was_measured_sizes_do_not_differ() -> None:
    assert speed(16, 2048, 8192, {}) == 1.0
    assert speed(16, 2048, 8192, {8192: {}}) == 1.0


def test_waste_is_work_only_where_memory_binds() -> None:
    free = Figures(waste={16: 0.01, 256: 0.25})
    assert gain(256, 16, free, ALIKE) == 0.0
    bound = Figures(waste={16: 0.01, 256: 0.25}, binds=True)
    assert gain(256, 16, bound, ALIKE) == pytest.approx(1.0 - 0.75 / 0.99)
    assert gain(16, 256, bound, ALIKE) == pytest.approx(1.0 - 0.99 / 0.75)


def test_prefix_hits_that_are_lost_are_prompts_computed_anew() -> None:
    half = Figures(kept={16: 1.0, 256: 0.5}, hits=0.5, prefill=0.6)
    # Half of the prompts is computed now; with half of the hits gone it is three quarters.
    assert gain(16, 256, half, ALIKE) == pytest.approx(-0.6 * 0.5)
    assert gain(256, 16, half, ALIKE) == 0.0, "how much more smaller blocks would hit nobody has seen"
    assert gain(16, 256, Figures(hits=0.0, prefill=0.6), ALIKE) == 0.0


def test_speed_counts_for_the_part_of_the_work_that_decodes_are() -> None:
    speeds = {1000: {16: 1.0, 64: 1.25}}
    assert gain(16, 64, Figures(prefill=0.5, context=1000), speeds) == pytest.approx(0.5 * 0.2)


def test_what_nobody_measured_gives_no_gain_and_no_loss() -> None:
    assert gain(16, 64, Figures(waste={16: 0.1}, binds=True)) is None
    assert gain(16, 64, Figures(kept={64: 1.0}, hits=0.2, prefill=0.5)) is None
    assert gain(16, 16, Figures(binds=True)) == 0.0


def test_no_size_is_so_much_faster_that_it_is_chosen_for_that() -> None:
    for context, by_size in SPEED.items():
        f = Figures(context=context)
        assert all(
            (gain(before, after, f) or 0.0) < MIN_GAIN or before >= 1024 for before in by_size for after in by_size
        )


@pytest.mark.parametrize("context", [0, *SPEED])
@pytest.mark.parametrize("kind", [CHAT, CODE, DOCUMENTS, SUMMARIES])
def test_on_lengths_as_public_traces_have_them_no_other_size_than_a_small_one_pays(kind: object, context: int) -> None:
    """The figures of DESIGN §12: with blocks up to 64 tokens waste is too small to be worth a change, whatever the pressure."""
    rng = random.Random(7)
    tokens = [kind.prompt.draw(rng) + kind.output.draw(rng) for _ in range(2000)]  # type: ignore[attr-defined]
    f = Figures(waste={size: waste(tokens, size) for size in LADDER}, binds=True, context=context)
    for present in (8, 16, 32, 64):
        assert max(g for size in LADDER if (g := gain(present, size, f)) is not None) < 0.05
    best = max(LADDER, key=lambda size: gain(2048, size, f) or 0.0)
    assert (gain(2048, best, f) or 0.0) > 0.05, "and large ones do waste"
