"""Every internal of vLLM's scheduler that we touch: an upgrade that changes one fails here first, and says which.

What a name is for can be read where we use it: `services/worker/engines/vllm_scheduler.py` and `vllm_queue.py`. Where vLLM's behaviour matters,
it is tried on a stock scheduler; where only its text shows what we rely on, the text is looked for.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from services.bench.bare_scheduler import Size, request, scheduler
from tests.vllm.test_internals import assigned_attributes, parameters, text
from trimtab.messages import Workload

# Names.


@pytest.mark.parametrize(
    "name",
    [
        "running", "waiting", "kv_holding_waiting", "requests", "block_size", "scheduler_config", "kv_cache_config",
        "kv_cache_manager", "max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens", "num_prefill_lookahead",
        "requires_kv_delivery", "prev_step_scheduled_req_ids", "_pause_state",
    ],
)  # fmt: skip
def test_the_scheduler_has_the_attribute(name: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert name in assigned_attributes(Scheduler)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("schedule", ["self", "throttle_prefills"]),
        ("update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        ("add_request", ["self", "request"]),
        ("finish_requests", ["self", "request_ids", "finished_status"]),
        ("_free_request", ["self", "request", "delay_free_blocks"]),
        ("_preempt_request", ["self", "request", "timestamp", "drop_stale_output"]),
        ("_reserve_prefill_lookahead", ["self", "request", "num_computed_tokens", "num_new_tokens"]),
        ("_handle_blocked_waiting_request", ["self", "request"]),
    ],
)
def test_the_scheduler_has_the_method(method: str, expected: list[str]) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(getattr(Scheduler, method)) == expected
    assert issubclass(AsyncScheduler, Scheduler)
    assert parameters(getattr(AsyncScheduler, method)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "request_id", "num_computed_tokens", "num_prompt_tokens", "num_output_placeholders", "num_stale_output_tokens",
        "drop_stale_output", "num_in_flight_tokens", "num_preemptions", "sampling_params", "priority",
    ],
)  # fmt: skip
def test_a_request_has_the_attribute(name: str) -> None:
    from vllm.v1.request import Request

    assert name in assigned_attributes(Request)


@pytest.mark.parametrize("name", ["num_tokens", "num_tokens_with_spec"])
def test_a_request_has_the_property(name: str) -> None:
    from vllm.v1.request import Request

    assert isinstance(getattr(Request, name), property)


def test_what_a_step_says_of_itself() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    assert {"num_scheduled_tokens", "total_num_scheduled_tokens"} <= set(SchedulerOutput.__dataclass_fields__)
    assert "outputs" in EngineCoreOutputs.__struct_fields__
    assert {"request_id", "new_token_ids", "finish_reason"} <= set(EngineCoreOutput.__struct_fields__)
    assert "extra_args" in SamplingParams.__struct_fields__


def test_the_states_and_modes_are_those_we_know() -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    assert [s.name for s in PauseState] == ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]
    blocked = {s.name for s in RequestStatus if Scheduler._is_blocked_waiting_status(s)}
    assert blocked == {"WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ"}
    assert {"WAITING", "RUNNING", "PREEMPTED", "FINISHED_ABORTED"} <= {s.name for s in RequestStatus}


def test_our_queue_has_what_vllms_queues_have() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    from services.worker.engines.vllm_queue import PlannedQueue

    assert RequestQueue.__abstractmethods__ == {
        "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests", "remove_request",
        "remove_requests", "__bool__", "__len__", "__iter__",
    }  # fmt: skip
    for name in RequestQueue.__abstractmethods__ - {"__bool__", "__len__", "__iter__"}:
        assert parameters(getattr(PlannedQueue, name)) == [
            {"prepend_requests": "requests", "remove_requests": "requests"}.get(p, p)
            for p in parameters(getattr(RequestQueue, name))
        ]


# Behaviour, tried on the stock class.


def stock(directory: Path, **size: Any) -> Any:
    return scheduler(Size(prefix_caching=False, **size), directory, ours=False)


def ask(s: Any, name: str, prompt_tokens: int, max_tokens: int = 4) -> Any:
    r = request(name, range(10, 10 + prompt_tokens), max_tokens, Workload.BATCH, 0.0)
    s.add_request(r)
    return r


def output(step: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=[[7]] * len(ids)
    )


def test_both_caps_are_read_anew_in_each_step(tmp_path: Path) -> None:
    s = stock(tmp_path)
    for i in range(3):
        ask(s, f"r{i}", 40)
    s.max_num_active_reqs, s.max_num_scheduled_tokens = 1, 30
    assert s.schedule().num_scheduled_tokens == {"r0-x": 30}
    s.max_num_active_reqs, s.max_num_scheduled_tokens = 2, 60
    assert s.schedule().num_scheduled_tokens == {"r0-x": 10, "r1-x": 40}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_running_request_clipped_to_nothing_sits_out_and_holds_nobody_up(tmp_path: Path, asynchronous: bool) -> None:
    s = stock(tmp_path, asynchronous=asynchronous)
    for name in "abc":
        ask(s, name, 20)
    step = s.schedule()
    s.update_from_output(step, output(step))
    seen = []

    def clip(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        seen.append((request.request_id, num_computed_tokens, num_new_tokens))
        return 0 if request.request_id == "b-x" else num_new_tokens

    # On the instance: it must be looked up anew at each call.
    s._reserve_prefill_lookahead = clip
    assert s.schedule().num_scheduled_tokens == {"a-x": 1, "c-x": 1}
    assert seen == [("a-x", 20, 1), ("b-x", 20, 1), ("c-x", 20, 1)]
    assert [r.request_id for r in s.running] == ["a-x", "b-x", "c-x"]


def test_a_waiting_request_is_clipped_before_it_is_given_blocks_and_nothing_ends_admission(tmp_path: Path) -> None:
    s = stock(tmp_path)
    for name in "abc":
        ask(s, name, 20)
    clips = {"a-x": 5, "b-x": 0}
    s._reserve_prefill_lookahead = lambda request, computed, new: clips.get(request.request_id, new)
    free = s.kv_cache_manager.block_pool.get_num_free_blocks()
    assert s.schedule().num_scheduled_tokens == {"a-x": 5}
    assert len(s.waiting) == 2
    assert s.kv_cache_manager.block_pool.get_num_free_blocks() == free - 1


def test_the_hook_is_asked_in_both_loops_and_after_everything_else_that_limits() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = text(Scheduler.schedule)
    calls = [m.start() for m in re.finditer(r"num_new_tokens = self\._reserve_prefill_lookahead\(", source)]
    assert len(calls) == 2
    running, waiting = (source[at : at + 1600] for at in calls)
    assert (
        running.index("if num_new_tokens == 0:")
        < running.index("req_index += 1 continue")
        < running.index("allocate_slots(")
    )
    assert re.search(r"if num_new_tokens == 0: # The request cannot be scheduled\. break", waiting)


def test_admission_takes_from_the_waiting_queue_for_as_long_as_it_is_true(tmp_path: Path) -> None:
    """Length is not asked, so a queue can hold more than it offers; and what the queue offers first goes first."""
    from services.worker.engines.vllm_queue import PlannedQueue

    s = stock(tmp_path)
    s.waiting = PlannedQueue()
    waiting = [ask(s, name, 20) for name in "abcd"]
    s.waiting.present([waiting[2], waiting[0]])
    assert list(s.schedule().num_scheduled_tokens) == ["c-x", "a-x"]
    assert s.get_request_counts() == (2, 2)
    assert s.get_num_unfinished_requests() == 4, "counted by length"


def test_the_waiting_queue_is_made_once() -> None:
    from vllm.v1.core.sched import async_scheduler, scheduler

    source = text(scheduler) + text(async_scheduler)
    assert source.count("self.waiting = create_request_queue(self.policy)") == 1
    assert len(re.findall(r"self\.waiting = ", source)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_preemption_does(tmp_path: Path, asynchronous: bool) -> None:
    """It wants the request out of `running`, puts it back to the waiting itself, frees its blocks and begins it anew."""
    from vllm.v1.request import RequestStatus

    s = stock(tmp_path, asynchronous=asynchronous)
    r = ask(s, "a", 20)
    free = s.kv_cache_manager.block_pool.get_num_free_blocks()
    step = s.schedule()
    s.running.remove(r)
    s._preempt_request(r, 0.0, drop_stale_output=False)
    assert (r.status, r.num_computed_tokens, r.num_output_placeholders, r.num_preemptions) == (
        RequestStatus.PREEMPTED,
        0,
        0,
        1,
    )
    assert list(s.waiting) == [r] and s.kv_cache_manager.block_pool.get_num_free_blocks() == free
    # What it has in flight is still delivered, and until then it is not resumed.
    assert (r.num_stale_output_tokens, r.drop_stale_output) == (20, False)
    assert s.schedule().num_scheduled_tokens == {}
    (delivered,) = s.update_from_output(step, output(step))[0].outputs
    assert (delivered.new_token_ids, r.num_tokens, r.num_stale_output_tokens) == ([7], 21, 0)
    assert s.schedule().num_scheduled_tokens == {"a-x": 21}
    with pytest.raises(AssertionError, match="Only running requests"):
        s._preempt_request(ask(s, "b", 20), 0.0)


def test_a_request_leaves_by_one_door() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    sources = {n: text(f) for n, f in vars(Scheduler).items() if inspect.isfunction(f)}
    assert {n for n, s in sources.items() if re.search(r"del self\.requests\[|self\.requests\.pop", s)} == {
        "_free_blocks"
    }
    # The third of these ends transfers of a KV connector, which come after `_free_request`.
    assert {n for n, s in sources.items() if "self._free_blocks(" in s} == {
        "_free_request",
        "_update_from_kv_xfer_finished",
    }
    assert {n for n, s in sources.items() if "self._free_request(" in s} == {"update_from_output", "finish_requests"}
    assert {n for n, s in sources.items() if "self._preempt_request(" in s} == {"schedule", "reset_prefix_cache"}


def test_nothing_is_scheduled_or_admitted_while_paused(tmp_path: Path) -> None:
    from vllm.v1.core.sched.interface import PauseState

    s = stock(tmp_path)
    ask(s, "a", 20)
    step = s.schedule()
    s.update_from_output(step, output(step))
    ask(s, "b", 20)
    s.set_pause_state(PauseState.PAUSED_NEW)
    step = s.schedule()
    s.update_from_output(step, output(step))
    assert step.num_scheduled_tokens == {"a-x": 1}
    s.set_pause_state(PauseState.PAUSED_ALL)
    assert s.schedule().num_scheduled_tokens == {}


def test_who_waits_for_a_grammar_is_asked_of_one_method(tmp_path: Path) -> None:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import RequestStatus

    s = stock(tmp_path)
    r = request("a", [1, 2, 3], 4, Workload.REALTIME, 0.0, structured=StructuredOutputsParams(regex="x"))
    s.add_request(r)
    assert r.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert not s._handle_blocked_waiting_request(r)
    r.structured_output_request.grammar = object()
    assert s._handle_blocked_waiting_request(r)
    assert r.status is RequestStatus.WAITING


def test_the_first_model_runner_is_sent_the_tokens_of_whom_it_did_not_run_in_the_step_before(tmp_path: Path) -> None:
    s = stock(tmp_path)
    for name in "ab":
        ask(s, name, 20)
    step = s.schedule()
    s.update_from_output(step, output(step))
    s._reserve_prefill_lookahead = lambda request, computed, new: new if request.request_id == "a-x" else 0
    step = s.schedule()
    s.update_from_output(step, output(step))
    del s._reserve_prefill_lookahead
    assert set(s.schedule().scheduled_cached_reqs.all_token_ids) == {"b-x"}


def test_batches_come_back_in_the_order_in_which_they_were_scheduled_two_at_most(tmp_path: Path) -> None:
    from vllm.v1.engine.core import EngineCore

    assert stock(tmp_path, asynchronous=True).vllm_config.max_concurrent_batches == 2
    source = text(EngineCore.step_with_batch_queue)
    assert "batch_queue.appendleft((future, scheduler_output, exec_future))" in source
    assert "future, scheduler_output, exec_model_fut = batch_queue.pop()" in source
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        order = [
            text(step).index(f"self.{name}(")
            for name in ("scheduler.schedule", "_process_aborts_queue", "scheduler.update_from_output")
        ]
        assert order == sorted(order)
        assert (
            text(step).count("self.scheduler.schedule(") == text(step).count("self.scheduler.update_from_output(") == 1
        )
