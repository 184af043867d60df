"""The figures of `blocks`: speeds from tokens' times, ratios within rounds, what a size is worth, prefixes computed, and red goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.bench.blocks import figures, mixes, tables
from services.bench.blocks.figures import DECODE, PREFILL, Verdict, Visit, Work
from services.bench.blocks.plan import FULL, LONG, QUICK, SERVED, Cell, Plan
from services.bench.blocks.prefixes import Cached, Hits, Talk, computed, note
from services.bench.options import Options
from services.bench.stats import Estimate
from trimtab.blocks import speed as speed_of_blocks

DEFAULT = 128
DOUBLED = [8 << i for i in range(9)]
"""Of two sizes of which one is a multiple of the other, the larger never does better."""


def a_visit(round_: int, size: int, decode: float = 100.0, prefill: float = 400.0, context: int = 256) -> Visit:
    return Visit(round_, size, 1000, {context: {PREFILL: prefill, DECODE: decode}})


def rounds(by_size: dict[int, Sequence[float]]) -> list[Visit]:
    """Decode speeds of each size, one a round; prefill is as fast with all."""
    return [a_visit(r, size, s) for size, speeds in by_size.items() for r, s in enumerate(speeds)]


def a_work(wasted: dict[int, float] | None = None, **fields: Any) -> Work:
    return Work("chat", 400.0, 100.0, 256, wasted or {64: 0.01, DEFAULT: 0.02, 256: 0.04}, **fields)


# Speeds.


def test_decoding_is_timed_while_all_streams_decode_and_by_the_usual_gap() -> None:
    early = [1.0, 1.1, 2.0, 2.1, 2.2, 2.3]  # decodes beside the other one's prefill at first
    late = [2.0, 2.1, 3.1, 3.2, 3.3]  # one pause of a second that is not the size's
    found = figures.speeds([early, late], begun=0.0, context=500)
    assert found[PREFILL] == pytest.approx(500.0)
    assert found[DECODE] == pytest.approx(20.0)


def test_without_a_gap_that_counts_there_is_no_decode_speed() -> None:
    assert figures.speeds([[1.0], [2.0]], begun=0.0, context=10)[DECODE] is None


def test_a_block_table_has_an_entry_for_each_block_begun() -> None:
    assert [figures.table_bytes(n, 128) for n in (1, 128, 129, 131_072)] == [4, 4, 8, 4096]


def test_sizes_are_compared_within_rounds_only() -> None:
    visits = rounds({DEFAULT: [100.0, 50.0, 80.0], 256: [110.0, 55.0, 80.0]})
    visits.append(a_visit(3, 256, 1000.0))  # a round without the default
    assert figures.ratio(visits, 256, DECODE, 256, DEFAULT) == Estimate(
        pytest.approx(1.1), pytest.approx(1.0), pytest.approx(1.1), 3
    )
    assert figures.ratio(visits, 256, DECODE, 64, DEFAULT) is None
    assert figures.drift(visits, 256, DECODE, DEFAULT) == pytest.approx(50.0 / 80.0)


def test_the_calibration_is_what_the_planner_takes() -> None:
    visits = rounds({DEFAULT: [100.0] * 3, 256: [120.0] * 3})
    found = figures.calibration(visits, DEFAULT)
    assert found == {"decode": {"256": {"128": 1.0, "256": 1.2}}, "prefill": {"256": {"128": 1.0, "256": 1.0}}}
    text = dict(tables.sections([an_arm(256)], {"default": DEFAULT, "calibration": found}))["For trimtab.blocks.SPEED"]
    taken = eval(text.removeprefix("SPEED: Speeds = "))  # as it would stand in the source
    assert speed_of_blocks(128, 256, 256, taken) == pytest.approx(1.2)
    differ = rounds(
        {DEFAULT: [100.0] * 3, 32: [130.0, 110.0, 120.0], 64: [130.0, 99.0, 120.0], 256: [80.0, 95.0, 90.0]}
    )
    sure = figures.calibration(differ, DEFAULT)["decode"]["256"]
    assert sure == {"32": 1.1, "64": 1.0, "128": 1.0, "256": 0.95}, "what all rounds agree on"
    too_few = figures.calibration(visits[:-1], DEFAULT)["decode"]
    assert too_few == {"256": {"128": 1.0}}, "a size with too few rounds is left out"


# What a size is worth.


@pytest.mark.parametrize(
    ("decodes", "best", "worth"),
    [
        ([100.0, 100.0, 100.0], DEFAULT, False),
        ([102.0, 103.0, 102.0], 256, False),  # better, and not by enough
        ([160.0, 170.0, 165.0], 256, True),
        ([160.0, 90.0, 165.0], 256, None),  # rounds disagree
        ([160.0, 170.0], 256, None),  # too few of them
        ([60.0, 55.0, 50.0], DEFAULT, False),
    ],
)
def test_a_change_is_worth_it_only_where_every_round_saves_enough(
    decodes: list[float], best: int, worth: bool | None
) -> None:
    visits = rounds({DEFAULT: [100.0] * len(decodes), 256: decodes})
    found = figures.verdict(visits, a_work(), DEFAULT, binds=False)
    assert found is not None and (found.best, found.worth) == (best, worth)


def test_what_a_size_saves_is_the_time_of_prompt_and_output_together() -> None:
    visits = rounds({DEFAULT: [100.0], 256: [200.0]})
    # 400 tokens at 400/s and 100 at 100/s are 2 s; at 200/s the outputs take half a second.
    assert figures.gains(visits, a_work(), 256, DEFAULT) == [pytest.approx(0.25)]
    all_hit = a_work(hits={DEFAULT: 0.0, 256: 1.0})
    assert figures.gains(visits, all_hit, 256, DEFAULT) == [pytest.approx(0.75)]


def test_slots_that_are_not_wasted_count_only_where_memory_binds() -> None:
    visits = rounds({64: [100.0] * 3, DEFAULT: [100.0] * 3})
    work = a_work({64: 0.02, DEFAULT: 0.10})
    free, bound = (figures.verdict(visits, work, DEFAULT, binds=b) for b in (False, True))
    assert free is not None and bound is not None
    assert (free.best, free.worth) == (DEFAULT, False)
    assert (bound.best, bound.worth) == (64, True)
    assert bound.gain.value == pytest.approx(1.0 - 0.90 / 0.98)


def test_a_workload_goes_by_the_context_nearest_to_its_median_request() -> None:
    work = Work.of("w", [(100, 10), (6000, 100), (9000, 100)], [256, 7500, 32_000], [32, 128])
    assert work.context == 7500
    assert work.prompt == pytest.approx(15_100 / 3)
    # 109, 6099 and 9099 tokens of KV in blocks of 128.
    assert work.wasted[128] == pytest.approx(1 - (109 + 6099 + 9099) / (128 * (1 + 48 + 72)))


def test_without_the_default_size_there_is_no_verdict() -> None:
    for binds in (False, True):
        seen = a_work({256: 0.04})
        assert figures.verdict(rounds({256: [100.0] * 3}), seen, DEFAULT, binds=binds) is None


# Prefixes.


def test_only_whole_blocks_are_found_again_and_never_the_last_token() -> None:
    cache = Cached(4)
    cache.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.hit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8
    assert cache.hit([1, 2, 3, 4, 5, 6, 7, 8]) == 4, "the last token is computed, so its block is"
    assert cache.hit([1, 2, 3, 4, 5, 0, 7, 8, 9]) == 4
    assert cache.hit([0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0, "a block counts with all that is before it"


def test_the_last_token_of_an_answer_was_never_put_in() -> None:
    cache, hits = Cached(4), Hits()
    note(cache, hits, [1, 2, 3], [4])
    assert cache.hit([1, 2, 3, 4, 5]) == 0
    note(cache, hits, [1, 2, 3], [4, 5])
    assert cache.hit([1, 2, 3, 4, 5]) == 4


def test_larger_blocks_find_less_of_the_same_sessions() -> None:
    talk = Talk(sessions=4, turns=3, system=400, user=(60, 160), output=24)
    rates = [computed(talk, size, "seed").rate for size in DOUBLED]
    assert rates == sorted(rates, reverse=True)
    assert 0.6 < rates[0] < 0.9 and rates[-1] == 0.0
    # Blocks of one token find all there is: a shared prompt three times, and all before each later turn but its answer's last token.
    every = computed(Talk(2, 2, 10, (5, 5), 3), 1, "seed")
    assert (every.prompt, every.cached) == (2 * 15 + 2 * 23, 10 + 2 * 17)


# Mixes.


def test_waste_of_the_published_mixes_is_exact_and_grows_with_the_size() -> None:
    from trimtab.blocks import waste

    found = {m.name: m for m in mixes.drawn(1)}
    assert set(found) == {"chat", "code", "summaries", "documents"}
    shares = [waste(found["chat"].lengths, s) for s in DOUBLED]
    assert shares == sorted(shares)
    assert found["chat"].requests == next(m for m in mixes.drawn(1) if m.name == "chat").requests


def test_a_trace_that_is_absent_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "azure-llm-2023").mkdir()
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
    (tmp_path / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv").write_text(rows)
    found = {m.name: m for m in mixes.traced(tmp_path)}
    assert found["azure-conv"].requests == ((374, 44), (396, 1))
    assert found["azure-conv"].lengths == [417, 396]
    assert not found["mooncake"].requests and "mooncake is left out: FileNotFoundError" in found["mooncake"].absent


# Goals.


def met(visits: list[Visit], *, prefixes: Any = (), accepted: int = 2, verdicts: Any = (), quick: bool = False) -> Any:
    return {g.name: g.met for g in figures.goals(visits, prefixes, accepted, verdicts, quick=quick)}


def a_talk(cached: int = 500) -> dict[str, int]:
    return {"size": 128, "prompt_tokens": 1000, "cached_tokens": cached, "computed_cached_tokens": 500}


def a_verdict(worth: bool | None) -> Verdict:
    return Verdict("chat", False, DEFAULT, Estimate(0.0, 0.0, 0.0, 3), worth)


def test_a_good_run_meets_every_goal_and_an_empty_one_none() -> None:
    good = rounds({DEFAULT: [100.0] * 3, 256: [100.0] * 3})
    assert set(met(good, prefixes=[a_talk()], verdicts=[a_verdict(False)]).values()) == {True}
    assert set(met([]).values()) == {None}
    assert set(met(good, prefixes=[a_talk()], quick=True).values()) == {None}


def test_what_is_bad_misses_its_goal() -> None:
    good = rounds({DEFAULT: [100.0] * 3, 256: [100.0] * 3})
    assert met(good, accepted=3)["sizes_measured"] is False
    assert met(good[:-1])["rounds_of_each_size"] is False
    assert met(good, prefixes=[a_talk(), a_talk(511)])["prefix_hits_off_computed"] is False
    assert met(good, verdicts=[a_verdict(True), a_verdict(None)])["workloads_undecided"] is False
    warm = Visit.from_json(
        {
            "round": 0,
            "size": 256,
            "total_blocks": 9,
            "speeds": {"256": {PREFILL: 1.0, DECODE: 1.0, "cached_tokens": 32}},
        }
    )
    assert met([*good, warm])["prompt_tokens_found_in_cache"] is False


def test_a_size_without_one_of_the_contexts_is_not_measured() -> None:
    visits = [a_visit(0, DEFAULT), a_visit(0, DEFAULT, context=7500), a_visit(0, 256)]
    assert met(visits)["sizes_measured"] is False
    assert met([*visits, a_visit(0, 256, context=7500)])["sizes_measured"] is True


# The plan.


def test_every_round_visits_all_sizes_and_the_next_one_runs_backwards() -> None:
    sizes = FULL.chosen([32, 64, 96, 256], default=128)
    assert sizes == [32, 64, 96, 128, 256]
    first, second, third = (FULL.order(sizes, r, seed=1) for r in range(3))
    assert sorted(first) == sizes and second == first[::-1] and sorted(third) == sizes


def test_quick_takes_the_ends_and_the_default_and_fits_into_three_minutes() -> None:
    assert QUICK.chosen([32, 64, 128, 256, 2048], default=128) == [32, 128, 2048]
    assert QUICK.budget_s is not None and QUICK.budget_s < 180 and QUICK.expected_s() < 180
    assert QUICK.models() == (SERVED,) and FULL.models() == (SERVED, LONG)


def test_rounds_are_taken_from_the_options_and_cells_keep_within_the_window() -> None:
    assert Plan.of(Options(rounds=5)).rounds == 5
    assert Cell(7500, 2, 64, 1.0).within(4096).context == 4096 - 65
    assert FULL.rounds >= figures.ROUNDS


# What is shown.


def an_arm(size: int, **fields: Any) -> dict[str, Any]:
    ratio = {"value": 1.2, "low": 1.1, "high": 1.3, "n": 3}
    known = {
        "arm": f"block {size}", "size": size, "refused": "",
        "speeds": {"256": {DECODE: 120.0, PREFILL: None, "decode_ratio": ratio, "prefill_ratio": None}},
        "table_bytes": {str(n): figures.table_bytes(n, size) for n in tables.TABLE_AT}, "waste": {"chat": 0.0123},
        "prefixes": {"measured": 0.51, "computed": 0.52}, "hits_computed": 0.5,
    }  # fmt: skip
    return {**known, **fields}


def test_the_markdown_has_a_row_for_each_size_and_says_which_are_refused() -> None:
    lines = tables.markdown([an_arm(256), an_arm(16, speeds={}, prefixes=None, refused="SIZE: no")]).splitlines()
    assert lines[0].startswith("| block | decode at 256 |") and lines[1].startswith("| ---: |")
    assert lines[2] == "| 256 | 1.20 | - | 1.23% | 51.0% | 2,048 B |"
    assert lines[3] == "| 16 | refused | refused | 1.23% | 50.0% | 32,768 B |"
