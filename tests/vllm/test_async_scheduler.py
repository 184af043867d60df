"""Our scheduler, the real classes over a model runner without a model, under everything that can happen to it, two batches in flight included.

Every stream must come out exact, in order and whole; what the planner believes must be what vLLM has, after each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from services.bench.bare_scheduler import internal
from tests.vllm.scheduler_run import Run, Setting, agree, finish, prompt, rounds
from trimtab.errors import PolicyRefused
from trimtab.messages import Workload

RECOMPUTES = ("memory_preemptions", "recomputed_tokens")
SETTINGS = {
    "no slice": Setting(shows=("preemptions",)),
    "slice": Setting({"preemption.guaranteed_time_slice_ms": 50}, shows=("preemptions", "slices_denied")),
    "aggressive": Setting(
        {"preemption.mode": "aggressive", "batch.active": 3, "paths.realtime_reserve": 0}, shows=("preemptions",)
    ),
    "few blocks": Setting(blocks=48, shows=RECOMPUTES),
    "few blocks, shared prefixes": Setting(blocks=60, shared=0.6, shows=RECOMPUTES),
    "few blocks, no prefix cache": Setting(blocks=48, prefix_caching=False, shows=RECOMPUTES),
    "aborts": Setting(aborts=0.05, shared=0.3, shows=("aborted_tokens",)),
    "governor": Setting(
        {"prefill.itl_budget_ms": 12, "prefill.max_suspend_ms": 100, "batch.active": 8, "batch.hard_cap": 8},
        shows=("held_decodes",),
    ),
    "vLLM's fcfs": Setting({"scheduler.mode": "fcfs"}, blocks=60, shows=("memory_preemptions",)),
    "vLLM's priority": Setting({"scheduler.mode": "priority"}, blocks=60, shows=("memory_preemptions",)),
    "everything": Setting(
        blocks=70, shared=0.4, aborts=0.02, switches=0.05, steers=0.1, requests=90, seeds=4,
        shows=("preemptions", "memory_preemptions", "held_decodes", "forced", "aborted_tokens"),
    ),
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    return lambda setting, seed=1: Run(setting, seed, tmp_path, monkeypatch)


Runs = Callable[..., Run]


@pytest.mark.parametrize(
    "way", [{"asynchronous": False}, {}, {"second": True}], ids=["sync", "async", "async, second runner"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_stream_is_exact_whatever_happens(run: Runs, name: str, way: dict[str, bool]) -> None:
    shown: Counter[str] = Counter()
    for seed in range(SETTINGS[name].seeds):
        r = run(replace(SETTINGS[name], **way), seed)
        r.storm()
        r.check()
        shown.update({stat: int(r.stats()[stat]) for stat in SETTINGS[name].shows})
    assert all(shown[stat] for stat in SETTINGS[name].shows), f"the runs were to show more than {shown}"


BOTH = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])


@BOTH
def test_everybody_can_be_aborted_at_once(run: Runs, asynchronous: bool) -> None:
    from vllm.v1.request import RequestStatus

    r = run(Setting(asynchronous=asynchronous))
    for i in range(12):
        r.add(f"r{i}", prompt(300, i), 20, Workload.BATCH)
    rounds(r, 6)
    r.aborted.update(r.wanted)
    assert len(r.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)) == 12
    agree(r.scheduler)
    row = r.board.read()
    assert (row.running, row.waiting, row.free_blocks) == (0, 0, r.setting.blocks - 1), (
        "the board says so before a step does"
    )
    finish(r)


def test_ids_may_come_as_any_iterable_and_may_be_unknown(run: Runs) -> None:
    from vllm.v1.request import RequestStatus

    r = run(Setting())
    for i in range(3):
        r.add(f"r{i}", prompt(50, i), 20, Workload.BATCH)
    rounds(r, 2)
    r.aborted.update(("r0", "r1"))
    ids = (internal(n) for n in ("r0", "nobody", "r1"))
    assert len(r.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)) == 2
    assert r.scheduler.finish_requests(internal("r0"), RequestStatus.FINISHED_ABORTED) == []
    finish(r)


@BOTH
def test_a_paused_scheduler_admits_nobody_and_goes_on_afterwards(run: Runs, asynchronous: bool) -> None:
    from vllm.v1.core.sched.interface import PauseState

    r = run(Setting(asynchronous=asynchronous))
    for i in range(4):
        r.add(f"r{i}", prompt(40, i), 30, Workload.BATCH)
    rounds(r, 4)
    running = {x.request_id for x in r.scheduler.running}
    r.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for i in range(4, 8):
        r.add(f"r{i}", prompt(40, i), 30, Workload.REALTIME)
    before = len(r.tokens("r0"))
    rounds(r, 5)
    assert {x.request_id for x in r.scheduler.running} == running
    assert len(r.tokens("r0")) > before
    r.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    rounds(r, 5)
    before = len(r.tokens("r0"))
    rounds(r, 5)
    assert len(r.tokens("r0")) == before
    r.scheduler.set_pause_state(PauseState.UNPAUSED)
    finish(r)


@BOTH
def test_a_reset_of_the_prefix_cache_loses_no_token(run: Runs, asynchronous: bool) -> None:
    r = run(Setting(asynchronous=asynchronous))
    for i in range(8):
        r.add(f"r{i}", prompt(150, i % 2), 30, Workload.BATCH)
    rounds(r, 7)
    assert r.scheduler.reset_prefix_cache(reset_running_requests=True)
    agree(r.scheduler)
    finish(r)


@BOTH
def test_a_prompt_prefills_in_part_and_others_go_on(run: Runs, asynchronous: bool) -> None:
    """The step after a chunk that a clip cut short asks for the rest, and nobody waits behind it."""
    r = run(Setting({"prefill.step_tokens": 32, "prefill.concurrent": 2}, asynchronous=asynchronous))
    for i in range(4):
        r.add(f"r{i}", prompt(200, i), 10, Workload.BATCH)
    r.add("hot", prompt(20, 9), 10, Workload.REALTIME)
    rounds(r, 3)
    assert r.tokens("hot"), "a protected prompt does not wait for cold ones"
    finish(r)


@BOTH
def test_work_that_was_held_back_goes_on_after_the_longest_suspension(run: Runs, asynchronous: bool) -> None:
    policy = {"prefill.itl_budget_ms": 4, "prefill.max_suspend_ms": 100, "batch.active": 8, "batch.hard_cap": 8}
    r = run(Setting(policy, asynchronous=asynchronous))
    for i in range(4):
        r.add(f"cold{i}", prompt(300, i), 20, Workload.BATCH)
    rounds(r, 20)
    r.add("hot", prompt(20, 9), 400, Workload.REALTIME)
    rounds(r, 10)
    before, begun = sum(len(r.tokens(f"cold{i}")) for i in range(4)), r.clock.ms
    while r.clock.ms < begun + 90:
        rounds(r, 1)
    held = r.stats()["held_decodes"]
    assert held > 10
    while r.clock.ms < begun + 600:
        rounds(r, 1)
    assert sum(len(r.tokens(f"cold{i}")) for i in range(4)) >= before + 4
    finish(r)


@BOTH
def test_who_waits_for_a_grammar_holds_nobody_up(run: Runs, asynchronous: bool) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    r = run(Setting(asynchronous=asynchronous))
    names = ("ready", "late", "broken")
    for name in names:
        r.add(name, prompt(20), 6, Workload.REALTIME, structured=StructuredOutputsParams(regex="x"))
    compiling = {n: Future() for n in names}
    for name in names:
        r.scheduler.requests[internal(name)].structured_output_request.grammar = compiling[name]
    compiling["ready"].set_result(AnyGrammar())
    r.add("plain", prompt(30), 6, Workload.BATCH)
    rounds(r, 12)
    assert len(r.tokens("plain")) == len(r.tokens("ready")) == 6
    assert not r.tokens("late")
    compiling["late"].set_result(AnyGrammar())
    compiling["broken"].set_exception(ValueError("no such grammar"))
    r.aborted.add("broken")
    finish(r)
    assert r.engine.finished[internal("broken")] == "error"
    assert r.engine.finished[internal("late")] == "length"


@BOTH
def test_nobody_makes_room_for_who_waits_for_a_grammar(run: Runs, asynchronous: bool) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    r = run(Setting({"preemption.mode": "aggressive", "batch.active": 1}, asynchronous=asynchronous))
    r.add("batch", prompt(70), 60, Workload.BATCH)
    rounds(r, 4)
    r.add("hot", prompt(20), 6, Workload.REALTIME, structured=StructuredOutputsParams(regex="x"))
    grammar: Future[AnyGrammar] = Future()
    r.scheduler.requests[internal("hot")].structured_output_request.grammar = grammar
    rounds(r, 10)
    assert r.board.read().preemptions == 0
    grammar.set_result(AnyGrammar())
    rounds(r, 4)
    assert r.board.read().preemptions == 1
    finish(r)


@BOTH
def test_for_want_of_blocks_the_cheapest_batch_request_goes(run: Runs, asynchronous: bool) -> None:
    """vLLM itself would take the latest."""
    r = run(Setting(blocks=40, asynchronous=asynchronous))
    r.add("cheap", prompt(80, 1), 200, Workload.BATCH)
    r.add("dear", prompt(300, 2), 200, Workload.BATCH)
    r.add("hot", prompt(60, 3), 200, Workload.REALTIME)
    while not r.board.read().preemptions:
        rounds(r, 1)
    assert [x.request_id for x in r.scheduler.waiting] == [internal("cheap")]
    assert r.stats()["memory_preemptions"] == 1
    finish(r)


class AnyGrammar:
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True


def test_a_policy_that_the_engine_cannot_hold_changes_nothing(run: Runs) -> None:
    r = run(Setting())
    before = r.scheduler.trimtab_facts(), r.scheduler._planner.rules
    with pytest.raises(PolicyRefused, match="above the engine's max_num_seqs"):
        r.apply({"batch.active": 9, "scheduler.mode": "fcfs"})
    assert (r.scheduler.trimtab_facts(), r.scheduler._planner.rules) == before


def test_a_steered_request_goes_earlier(run: Runs) -> None:
    r = run(Setting({"batch.active": 2, "batch.hard_cap": 1}))
    for i in range(4):
        r.add(f"r{i}", prompt(70, i), 12, Workload.BATCH)
    rounds(r, 2)
    assert r.scheduler.trimtab_steer({"request_ids": ["r3", "nobody"], "delta": 2}) == 1
    finish(r)
    assert list(r.engine.finished) == [internal(n) for n in ("r0", "r3", "r1", "r2")]


def test_an_id_that_is_used_again_means_the_newer_request(run: Runs) -> None:
    """A retry may come while the first try is still on its way out; both are the same request to the front process."""
    r = run(Setting())
    r.add("first", prompt(20), 4, Workload.BATCH, outside="both")
    r.add("second", prompt(20, 2), 30, Workload.BATCH, outside="both")
    while internal("first") in r.scheduler.requests:
        rounds(r, 1)
    assert r.scheduler.trimtab_steer({"request_ids": ["both"], "delta": 1}) == 1
    finish(r)


def test_the_runner_here_notices_a_hit_in_the_prefix_cache_that_is_none(run: Runs) -> None:
    r = run(Setting())
    r.hasher = lambda x: [b"the same for all" + bytes(16)] * (x.num_tokens // 16 - len(x.block_hashes))
    r.add("a", prompt(40, 1), 4, Workload.BATCH)
    rounds(r, 3)
    r.add("b", prompt(40, 2), 4, Workload.BATCH)
    with pytest.raises(AssertionError, match="wrong KV at"):
        finish(r)


def test_the_runner_here_notices_that_a_resumed_request_came_without_its_tokens(run: Runs) -> None:
    r = run(Setting())
    r.add("a", prompt(40, 1), 10, Workload.BATCH)
    rounds(r, 4)
    r.scheduler.prev_step_scheduled_req_ids = Everybody()
    r.scheduler._evict(r.scheduler._planner.find(internal("a")))
    with pytest.raises(KeyError, match="a-x"):
        finish(r)


class Everybody(set[str]):
    def __contains__(self, request_id: object) -> bool:
        return True
