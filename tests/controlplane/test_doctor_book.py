"""The doctor's book of engines: each symptom shown, not shown, and not to be told; its causes, and what is offered."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.doctor import Verdict
from tests.controlplane.cases import (
    GIANT,
    NOW,
    SLOW,
    a_case,
    an_outlier,
    found,
    leaking,
    recent,
    sets,
)
from tests.controlplane.folded import (
    BLOCKS,
    COLD,
    HOT,
    ITL,
    a_gateway,
    a_window,
    a_worker,
    an_idle_worker,
    q,
    some_lengths,
    windows,
)
from trimtab import measures
from trimtab.v1 import admin_pb2, policy_pb2

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND


# ---- P99 jumped


def test_p99_over_the_objective_is_found_with_its_figures_and_what_it_was() -> None:
    finding = found(a_case(a_worker(windows=recent(SLOW))), "p99")
    assert finding.verdict is FOUND
    assert "w0: P99 TTFT 1912 ms over 500 (n=300, " in finding.said and "before)" in finding.said
    assert "none of the causes looked at shows" in finding.said


def test_p99_of_gaps_between_tokens_counts_too_and_cold_requests_do() -> None:
    finding = found(a_case(a_worker(windows=recent({"itl_ms": 410.0}))), "p99")
    assert finding.verdict is FOUND and "P99 ITL 410 ms over 200" in finding.said
    cold = recent({"quantiles": {HOT: q(100.0, count=50), COLD: q(4000.0, count=50), ITL: q(40.0)}})
    assert found(a_case(a_worker(windows=cold)), "p99").verdict is FOUND


def test_p99_of_a_few_requests_is_only_suspect() -> None:
    finding = found(a_case(a_worker(windows=recent({"ttft_ms": 1912.0, "count": 2}))), "p99")
    assert finding.verdict is SUSPECT and "too few to be sure" in finding.said


def test_p99_is_not_to_be_told_where_nothing_is_measured_or_nobody_says_anything() -> None:
    finding = found(a_case(a_worker(windows=recent({"quantiles": {}}))), "p99")
    assert finding.verdict is UNKNOWN and "says nothing of their TTFT" in finding.said
    assert found(a_case(a_worker(stale=True)), "p99").verdict is UNKNOWN


def test_a_length_mix_that_changed_is_a_cause_and_offers_clustering_and_a_limit() -> None:
    longer = some_lengths(recent_prompts=q(6000.0, count=1000, p50=900.0, p95=5000.0))
    case = a_case(
        a_worker(windows=recent(SLOW)),
        lengths=[longer],
        policy={"loops.clusters": "advise", "clusters.spread_limit": 1.0},
    )
    finding = found(case, "p99")
    assert "the median of tiny's prompts went from 410 to 900 tokens" in finding.said
    assert sets(finding) == {"loops.clusters": "on", "clusters.spread_limit": "0.3", "admission.shed": "cold"}


def test_without_the_symptom_another_mix_is_told_and_is_no_fault() -> None:
    longer = some_lengths(recent_prompts=q(6000.0, count=1000, p50=900.0, p95=5000.0))
    finding = found(a_case(lengths=[longer]), "p99")
    assert (finding.verdict, finding.fixes) == (OK, ())
    assert any("went from 410 to 900" in c.said for c in finding.checks)


def test_giants_in_the_mix_are_a_cause_and_offer_isolation() -> None:
    mix = some_lengths(recent_prompts=admin_pb2.Quantiles(count=1000, p50=400, p95=1800, p99=GIANT, max=2 * GIANT))
    finding = found(a_case(a_worker(windows=recent(SLOW)), lengths=[mix], policy={"loops.isolation": "off"}), "p99")
    assert "prompts above 4096 tokens are " in finding.said and "(longest 120000)" in finding.said
    assert sets(finding)["isolate.from_tokens"] == "4096" and sets(finding)["loops.isolation"] == "on"


def test_giants_beside_slow_requests_are_a_cause_even_where_they_are_few() -> None:
    beside = [an_outlier(longest_neighbour_tokens=GIANT, neighbours=3) for _ in range(2)]
    finding = found(a_case(a_worker(windows=recent({**SLOW, "outliers": beside}))), "p99")
    assert "12 of 12 slow requests ran beside a prompt of 60000 tokens" in finding.said
    assert sets(finding)["isolate.from_tokens"] == str(GIANT)


def test_giants_that_are_isolated_already_offer_nothing() -> None:
    beside = [an_outlier(longest_neighbour_tokens=GIANT) for _ in range(2)]
    case = a_case(a_worker(windows=recent({**SLOW, "outliers": beside})), policy={"isolate.from_tokens": 8192})
    finding = found(case, "p99")
    assert "isolate.from_tokens" not in sets(finding)
    assert any("they are isolated already, from 8192 tokens" in c.said for c in finding.checks)


def test_slow_requests_that_waited_and_a_full_running_set_are_causes() -> None:
    waited = [an_outlier(queued_ms=800.0)]
    full = a_worker(windows=recent({**SLOW, "outliers": waited}), load={"running": 48, "waiting": 40})
    finding = found(a_case(full), "p99")
    assert "they waited 800 of 900 ms to their first token (medians of 6)" in finding.said
    assert "w0 runs 48 of 48, and 40 wait" in finding.said
    assert sets(finding)["priority.realtime_delta"] == "1"


def test_a_change_just_before_is_a_suspect_cause_with_the_way_back() -> None:
    entry = admin_pb2.PolicyHistoryEntry(
        identity=policy_pb2.SnapshotIdentity(epoch=1, revision=7),
        author="ada",
        written_unix_ms=NOW - 300_000,
        changes=[admin_pb2.FieldChange(field="batch.active", before="48", after="256")],
    )
    finding = found(a_case(a_worker(windows=recent(SLOW)), history=[entry]), "p99")
    assert "ada changed batch.active 5m ago (1.7)" in finding.said
    assert "trimtab policy rollback 1.6" in [fix.command for fix in finding.fixes]
    entry.written_unix_ms = NOW - 3_600_000
    assert "ada" not in found(a_case(a_worker(windows=recent(SLOW)), history=[entry]), "p99").said
    assert found(a_case(a_worker(windows=recent(SLOW)), history=None), "p99").verdict is FOUND


# ---- throughput


FEWER = {"output_tokens": 2000}


def test_throughput_that_fell_while_requests_wait_is_found() -> None:
    finding = found(a_case(a_worker(windows=recent(FEWER))), "throughput")
    assert finding.verdict is FOUND
    assert "400 tokens/s in the newest 30 s, 1000 in the two minutes before, and 3 requests wait" in finding.said


def test_throughput_of_busy_engines_counts_also_where_nobody_waits_and_less_demand_is_no_fault() -> None:
    def calm(**gauges: float | None) -> Any:
        return a_worker(windows=recent(FEWER), load={"waiting": 0}, gauges=gauges)

    assert found(a_case(calm(busy=0.9)), "throughput").verdict is FOUND
    finding = found(a_case(calm(busy=0.2)), "throughput")
    assert finding.verdict is OK and "less was asked for" in finding.said
    assert found(a_case(calm(busy=None)), "throughput").verdict is UNKNOWN


def test_requests_that_wait_while_nothing_comes_out_are_found_also_where_nothing_came_before() -> None:
    waits, none = a_gateway(gauges={measures.REALTIME_WAITING: 0.0, measures.BATCH_WAITING: 62.0}), an_idle_worker()
    finding = found(a_case(waits, none), "throughput")
    assert finding.verdict is FOUND
    assert "62 requests wait, 0 run, and hardly a token has come in 30 s" in finding.said
    reads = an_idle_worker(load={"running": 1, "waiting": 0})
    assert found(a_case(waits, reads), "throughput").verdict is SUSPECT, "a long prompt may be read"
    nobody = found(a_case(waits, members=[]), "throughput")
    assert nobody.verdict is FOUND and "62 requests wait, and no worker is connected" in nobody.said
    begins = a_worker(windows=windows(count=2))
    assert found(a_case(waits, begins), "throughput").verdict is OK, "it has just begun"


def test_a_fall_of_less_than_a_third_is_none() -> None:
    assert found(a_case(a_worker(windows=recent({"output_tokens": 3600}))), "throughput").verdict is OK


def test_a_worker_that_was_lost_took_its_part_of_the_throughput_with_it() -> None:
    gone = a_worker("w1", connected=False, age_s=35.0, windows=[w for w in windows() if w.ended_ago_s > 35])
    finding = found(a_case(a_worker(), gone), "throughput")
    assert finding.verdict is FOUND and "w1, of 2 workers" in finding.said


@pytest.mark.parametrize(
    ("node", "more", "says"),
    [
        (
            {"gauges": {measures.FRAGMENTATION: 0.5}},
            {},
            "w0: 50% of the slots in held blocks are empty (block size 16)",
        ),
        (
            {"limits": {"block_size": 256, "block_sizes": [32, 128, 256]}},
            {},
            "half a block of 256 is 21% of the median request of 600 tokens",
        ),
        ({"batch_active": 24}, {}, "controllers hold w0 at 24 of 48"),
        ({}, {"policy": {"admission.shed": "batch"}}, "gateways refuse all BATCH requests"),
        ({}, {"policy": {"degraded.state": "degraded"}}, "the mesh is degraded"),
    ],
)
def test_each_cause_of_a_fall_is_told_with_its_figures(node: Any, more: Any, says: str) -> None:
    finding = found(a_case(a_worker(windows=recent(FEWER), **node), **more), "throughput")
    assert finding.verdict is FOUND and says in finding.said


@pytest.mark.parametrize(
    ("limits", "command"),
    [
        ({"block_sizes": [32, 64, 96, 128, 256], "live_blocks": True}, "trimtab reblock w0 96"),
        ({"block_sizes": [128, 256], "live_blocks": True}, "trimtab reblock w0 128"),
        ({"block_sizes": [64, 256]}, "trimtab rollout restart --node w0 --set worker.block_size=64"),
    ],
)
def test_blocks_that_are_large_beside_the_requests_offer_the_largest_accepted_that_is_not(
    limits: Any, command: str
) -> None:
    node = a_worker(windows=recent(FEWER), limits={"block_size": 256, **limits})
    finding = found(a_case(node), "throughput")
    assert [fix.command for fix in finding.fixes if "256" in fix.does or "KV blocks" in fix.does] == [command]


def test_an_engine_that_takes_no_smaller_blocks_has_none_too_large() -> None:
    node = a_worker(windows=recent(FEWER), limits={"block_size": 256, "block_sizes": [256]})
    assert "half a block" not in found(a_case(node), "throughput").said


def test_work_done_twice_is_a_cause_and_offers_fewer_at_once() -> None:
    again = {"output_tokens": 2000, "counters": {measures.RECOMPUTED_TOKENS: 5000}}
    finding = found(a_case(a_worker(windows=recent(again))), "throughput")
    assert "25% again after preemptions" in finding.said and sets(finding)["batch.hard_cap"] == "12"


# ---- memory


def test_blocks_that_an_idle_worker_holds_are_a_leak_once_it_has_been_idle_long_enough() -> None:
    finding = found(a_case(leaking(20), a_worker("w1")), "memory")
    assert finding.verdict is FOUND
    assert "w0: 39 of 1000 blocks are held, and nothing has run there for 101 s" in finding.said
    assert [fix.command for fix in finding.fixes] == ["trimtab drain w0 --deadline 30s --restart"]
    assert found(a_case(leaking(3), a_worker("w1")), "memory").verdict is OK


def test_the_one_block_that_vllm_keeps_is_no_leak() -> None:
    assert (
        found(a_case(an_idle_worker(load={"free_blocks": BLOCKS - 1, "running": 0, "waiting": 0})), "memory").verdict
        is OK
    )


def test_the_last_worker_of_a_model_is_not_drained_by_itself_and_a_sleeping_healer_is_woken() -> None:
    finding = found(a_case(leaking(20), policy={"loops.heal": "off"}), "memory")
    assert [fix.action is None for fix in finding.fixes] == [False, True]
    assert sets(finding) == {"loops.heal": "on"} and "start another worker of tiny first" in finding.fixes[1].does


def growing(mb_per_min: float, running: float = 12.0) -> Any:
    def make(ago: int) -> Any:
        peaks = {"running": running * (24 - ago), measures.RSS_BYTES: 4e9 - ago * 5 / 60 * mb_per_min * 1e6}
        return a_window(100 - ago, 5.0 * ago + 1, peaks=peaks if running > 12 else {**peaks, "running": 12.0})

    return a_worker(windows=windows(make))


def test_a_process_that_grows_beside_no_more_work_is_suspect() -> None:
    finding = found(a_case(growing(80)), "memory")
    assert (
        finding.verdict is SUSPECT and "w0: it grows by 80 MB a minute, to 4000 MB, beside no more work" in finding.said
    )
    assert found(a_case(growing(30)), "memory").verdict is OK
    assert found(a_case(growing(80, running=13.0)), "memory").verdict is OK


def test_one_that_grew_once_and_stands_is_well() -> None:
    def make(ago: int) -> Any:
        return a_window(100 - ago, 5.0 * ago + 1, peaks={"running": 12.0, measures.RSS_BYTES: 4e9 if ago < 16 else 1e9})

    assert found(a_case(a_worker(windows=windows(make))), "memory").verdict is OK


def test_memory_that_nobody_tells_of_is_unknown() -> None:
    finding = found(a_case(a_worker(windows=windows(lambda ago: a_window(1, 5.0 * ago, peaks={})))), "memory")
    assert finding.verdict is UNKNOWN and "w0 says nothing of its memory" in finding.said


# ---- delay


def waits(realtime_ms: int, batch_ms: int, count: int = 10) -> list[Any]:
    counters = {
        measures.REALTIME_WAITS: count,
        measures.REALTIME_WAIT_MS: count * realtime_ms,
        measures.BATCH_WAITS: count,
        measures.BATCH_WAIT_MS: count * batch_ms,
    }
    return recent({"counters": counters})


def test_realtime_that_waits_longer_than_batch_is_an_inversion_with_what_puts_it_first() -> None:
    policy = {"scheduler.mode": "fcfs", "loops.priority": "off", "paths.realtime_reserve": 0, "preemption.mode": "none"}
    finding = found(a_case(a_worker(windows=waits(200, 150)), policy=policy), "delay")
    assert finding.verdict is FOUND and "w0: REALTIME waits 200 ms, longer than BATCH (150 ms)" in finding.said
    assert "trimtab reload w0" in [fix.command for fix in finding.fixes]
    assert sets(finding) == {
        "scheduler.mode": "trimtab",
        "loops.priority": "on",
        "paths.realtime_reserve": "1",
        "preemption.mode": "conservative",
        "priority.realtime_delta": "1",
    }


def test_waits_that_take_half_the_objective_are_found_and_short_or_few_ones_are_not() -> None:
    finding = found(a_case(a_worker(windows=waits(300, 900))), "delay")
    assert finding.verdict is FOUND and "REALTIME waits 300 ms on average, of an objective of 500 ms" in finding.said
    assert found(a_case(a_worker(windows=waits(90, 10))), "delay").verdict is OK
    few = windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, counters={measures.REALTIME_WAITS: 0}))
    assert found(a_case(a_worker(windows=few)), "delay").verdict is OK


def test_batch_that_waits_beyond_its_objective_is_found() -> None:
    finding = found(a_case(a_worker(windows=waits(5, 700_000))), "delay")
    assert finding.verdict is FOUND and "BATCH waits 700 s on average" in finding.said


def test_waits_that_nobody_counts_are_unknown() -> None:
    none = dict.fromkeys((measures.REALTIME_WAITS, measures.BATCH_WAITS), 0)
    finding = found(a_case(a_worker(windows=recent({"counters": none}))), "delay")
    assert finding.verdict is UNKNOWN


# ---- out of memory


def test_an_engine_that_ran_out_is_found_and_offers_to_release_and_halve() -> None:
    hit = a_worker(windows=recent({"counters": {measures.OUT_OF_MEMORY: 2}}))
    finding = found(a_case(hit, policy={"loops.oom": "advise"}), "oom")
    assert finding.verdict is FOUND and "w0: 12 requests ended for want of memory" in finding.said
    assert [fix.command for fix in finding.fixes] == [
        "trimtab requests release --workload batch --older-than 60s",
        "trimtab policy set batch.active=24 --for node/w0",
        "trimtab policy set loops.oom=on",
    ]


def test_an_engine_that_died_for_want_of_memory_is_found_for_ten_minutes() -> None:
    finding = found(a_case(a_worker(out_of_memory_ago_s=90.0)), "oom")
    assert finding.verdict is FOUND and "w0: its engine ran out of memory 1m 30s ago" in finding.said
    assert found(a_case(a_worker(out_of_memory_ago_s=700.0)), "oom").verdict is OK


def test_one_that_ran_out_long_ago_is_told_and_no_fault() -> None:
    finding = found(a_case(a_worker(totals={measures.OUT_OF_MEMORY: 3})), "oom")
    assert finding.verdict is OK and "3 requests since" in finding.checks[0].said


def test_more_batch_than_the_memory_holds_is_suspect_and_offers_the_safe_batch() -> None:
    peaks = {"running": 20.0, measures.BATCH_RUNNING: 18.0, measures.RSS_BYTES: 4e9}
    case = a_case(a_worker(windows=recent({"peaks": peaks})), lengths=[some_lengths(safe_batch=9)])
    finding = found(case, "oom")
    assert finding.verdict is SUSPECT and "18 BATCH requests ran at once, the safe batch is 9" in finding.said
    assert sets(finding) == {"batch.hard_cap": "9"}


def test_failed_allocations_are_suspect_from_a_hundred_an_hour_on() -> None:
    failing = a_worker(windows=recent({"counters": {measures.ALLOCATION_FAILURES: 2}}))
    assert found(a_case(failing), "oom").verdict is SUSPECT
    once = a_worker(
        windows=windows(lambda ago: a_window(1, 5.0 * ago, counters={measures.ALLOCATION_FAILURES: int(ago == 3)}))
    )
    assert found(a_case(once), "oom").verdict is OK


def test_prompts_that_are_not_chunked_are_suspect_where_they_can_be_long() -> None:
    case = a_case(a_worker(limits={"max_model_len": 32_768}), policy={"prefill.step_tokens": 65_536})
    finding = found(case, "oom")
    assert finding.verdict is SUSPECT and sets(finding) == {"prefill.step_tokens": "default"}
    assert found(a_case(a_worker(limits={"max_model_len": 2048})), "oom").verdict is OK


def test_a_kv_cache_that_nobody_tells_of_is_unknown() -> None:
    bare = a_worker(gauges={measures.KV_USED: None})
    assert found(a_case(bare), "oom").verdict is UNKNOWN
