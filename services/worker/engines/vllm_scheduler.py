"""Our scheduler inside vLLM: a thin subclass that carries out the planner's plan and announces each step on the board.

What runs is decided in `trimtab.scheduling`; here it meets vLLM, by four hooks. `waiting` is a queue that presents whom the plan admits;
`_reserve_prefill_lookahead` clips a request's tokens to its allowance; `schedule` preempts before vLLM looks; `_preempt_request` and
`_free_request` tell the planner what vLLM did by itself. Every internal of vLLM that is touched stands in
`tests/vllm/test_internals_scheduler.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.engines import vllm_plugin
from services.worker.engines.board import Board, Row
from services.worker.engines.vllm_memory import even, kv_bytes_per_token, shape, told
from services.worker.engines.vllm_plugin import BOARD_KEY, EXTRA_KEY
from services.worker.engines.vllm_queue import PlannedQueue
from trimtab.messages import Workload
from trimtab.policy import Mode, Policy, with_fields
from trimtab.scheduling import Item, Memory, Plan, Planner, Rules
from trimtab.snapshot import Document, Limits, Node, resolve

STATS_EVERY = 16
"""Steps from one writing of the statistics to the next; an engine that comes to rest writes them in any case."""
STATS_S = 0.2
"""Seconds after which they are written too: where steps are long, so many of them are too many for a report."""
_NEW_TOKENS = attrgetter("new_token_ids")


class TrimtabScheduler:
    """Mix-in over vLLM's scheduler classes; the attributes named here are theirs."""

    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    requests: dict[str, Any]
    block_size: int
    scheduler_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_prefill_lookahead: int
    requires_kv_delivery: bool
    prev_step_scheduled_req_ids: set[str]
    hash_block_size: int
    vllm_config: VllmConfig
    _pause_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: VllmConfig = kwargs["vllm_config"]
        assert isinstance(config.additional_config, dict)
        self._board = Board(Path(config.additional_config[BOARD_KEY]))
        self._row = Row()
        self._limits = Limits(self.max_num_running_reqs, self.scheduler_config.max_num_batched_tokens)
        policy = resolve(Document(), Node("engine", limits=self._limits), now_unix_ms=0).policy
        self._planner = Planner(Rules.of(policy, self._limits))
        self.waiting = PlannedQueue()
        self._internal_id: dict[str, str] = {}
        # Bound once each, so that a step without a clip costs nothing for the requests that decode.
        self._reserving = super()._reserve_prefill_lookahead  # type: ignore[misc]
        self._evicting = False
        self._hasher: Callable[[Any], list[Any]] | None = None
        """By which every request is hashed once the block size was changed; until then each has come with the right one."""
        # Under async scheduling a step is scheduled while the one before it runs: each begins when that one ends.
        self._in_flight: deque[float] = deque()
        self._last_end = 0.0
        self._stats_at = 0.0
        self._kv = shape(self.kv_cache_manager, config)
        self._use(policy)
        self._announce()

    # Calls of the front process, between two steps.

    def trimtab_apply(self, fields: dict[str, Any]) -> dict[str, int]:
        """Take a whole policy; it holds from the next step on, whose number is the answer. Refused, it changes nothing."""
        self._use(with_fields(Policy(), fields))
        return {"step_no": self._row.step_no + 1}

    def trimtab_steer(self, command: dict[str, Any]) -> int:
        """Change waiting or running requests by their ids: their `delta` in levels, or `isolated`. Answers with how many are here."""
        ids = [self._internal_id.get(request_id, "") for request_id in command["request_ids"]]
        return self._planner.steer(ids, delta=command.get("delta"), isolated=command.get("isolated"))

    def trimtab_facts(self) -> dict[str, Any]:
        """What the front process needs to know once: sizes that vLLM settled during start, and the caps in force."""
        return {
            "block_size": self.block_size,
            "total_blocks": self.kv_cache_config.num_blocks,
            "kv_bytes_per_token": kv_bytes_per_token(self.kv_cache_config),
            "even_blocks": even(self.kv_cache_config),
            "kv_groups": told(self._kv),
            "max_num_seqs": self.max_num_running_reqs,
            "max_step_tokens": self.scheduler_config.max_num_batched_tokens,
            "active": self.max_num_active_reqs,
            "step_tokens": self.max_num_scheduled_tokens,
        }

    def trimtab_put_back(self, request_ids: Collection[str] | None = None) -> None:
        """Whoever runs, or those of them that are named, waits again and holds no block, as the cache is cut anew. It is nobody's choice, and
        counts for nobody."""
        self._evicting = True
        meant = [r for r in self.running if request_ids is None or r.request_id in request_ids]
        try:
            for request in reversed(meant):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)
                # Between two steps, so that the next one may resume it.
                self._planner.barred.discard(request.request_id)
        finally:
            self._evicting = False
        # What the model runner has in its batch is forgotten too, whoever it is of.
        self.prev_step_scheduled_req_ids.clear()

    def trimtab_begins(self, expected_ms: float) -> None:
        """Something that is no step holds the engine up for about so long."""
        self._row.begun, self._row.predicted_ms, self._row.ended = time.monotonic(), expected_ms, 0
        self._announce()

    def trimtab_ended(self) -> None:
        """From now on it owes a step again."""
        self._row.begun, self._row.ended = time.monotonic(), 1
        self._announce()

    def trimtab_lay(self, config: Any, manager: Any, hasher: Callable[[Any], list[Any]] | None) -> None:
        """From now on blocks are as `config` cuts them and `manager` gives them out. Who runs has none of them yet."""
        self.kv_cache_config, self.kv_cache_manager, self._hasher = config, manager, hasher
        self.block_size = self.hash_block_size = config.hash_block_size
        self._kv = shape(manager, self.vllm_config)
        for request in self.requests.values():
            self._rehash(request)
        self._announce()

    def _rehash(self, request: Any) -> None:
        if self._hasher is not None and request._block_hasher is not self._hasher:
            request._block_hasher = self._hasher
            request.block_hashes = []
            request._prompt_embeds_per_block_hashes.clear()
            request.update_block_hashes()

    def _use(self, policy: Policy) -> None:
        rules = Rules.of(policy, self._limits)
        self._planner.set_rules(rules)
        self.max_num_active_reqs = rules.active
        self.max_num_scheduled_tokens = rules.step_tokens
        for request in self.requests.values():
            self._set_priority(request)

    # A step.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        plan = self._prepare(begun * 1000.0)
        planned = time.monotonic()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        scheduled = time.monotonic()
        self.waiting.present(())
        self._planner.began(
            plan,
            begun * 1000.0,
            output.num_scheduled_tokens,
            output.total_num_scheduled_tokens,
            lambda item: int(self.requests[item.request_id].num_computed_tokens),
        )
        row = self._row
        row.step_no += 1
        row.begun = begun
        self._in_flight.append(begun)
        row.ended = 0
        row.predicted_ms = self._planner.predicted_ms
        self._announce()
        row.hook_us += (planned - begun + time.monotonic() - scheduled) * 1e6
        return output

    def _prepare(self, now_ms: float) -> Plan:
        """Preempt, plan, and set up the hooks for what vLLM does next."""
        if self._pause_state != PauseState.UNPAUSED:
            # vLLM admits nobody then, and what runs goes on.
            self._reserve_prefill_lookahead = self._reserving
            return Plan()
        planner = self._planner
        if self._kv.forgets and (planner.waiting or not self._plenty()):
            self._give_back()
        memory = self._memory()
        victims = planner.victims(now_ms, memory, self._ready)
        for item in victims:
            self._evict(item)
        plan = planner.plan(now_ms, self._memory() if victims else memory, self._ready)
        while len(self.running) > 1 and self._short_of_blocks(plan):
            victim = planner.memory_victim()
            if victim is None:
                break
            self._evict(victim)
            plan = planner.plan(now_ms, self._memory(), self._ready)
        self._reserve_prefill_lookahead = self._clipper(plan.allowance) if plan.allowance else self._reserving
        self.waiting.present([self.requests[item.request_id] for item in plan.admit])
        return plan

    def _clipper(self, allowance: dict[str, int]) -> Callable[[Any, int, int], int]:
        """vLLM asks the answer for each request just before it allocates: 0 leaves a running one out of the step."""
        get = allowance.get

        def clip(request: Any, _: int, tokens: int) -> int:
            allowed = get(request.request_id)
            return tokens if allowed is None or tokens < allowed else allowed

        if not self.num_prefill_lookahead:
            return clip
        return lambda request, computed, tokens: self._reserving(request, computed, clip(request, computed, tokens))

    def _ready(self, item: Item) -> bool:
        """Whether vLLM would admit it: not while its grammar compiles, or while output of before a preemption is still on its way."""
        request = self.requests[item.request_id]
        if not self._handle_blocked_waiting_request(request):  # type: ignore[attr-defined]
            return False
        return not request.num_stale_output_tokens or bool(request.drop_stale_output)

    def _memory(self) -> Memory:
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return Memory(free, self.kv_cache_config.num_blocks, self._kv)

    def _give_back(self) -> None:
        """Blocks that no later token of those who run looks back on. vLLM does it for each request as it gives it new ones: too late for a
        plan, and never for one that sits out. It takes 5 µs a request, so it is left to vLLM where nobody asks for blocks."""
        give_back = self.kv_cache_manager.remove_skipped_blocks
        for request in self.running:
            processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            give_back(request.request_id, processed, num_prompt_tokens=request.num_prompt_tokens)

    def _short_of_blocks(self, plan: Plan) -> bool:
        """Whether those who run would not find the blocks for this step. Looks closely only when it might be so."""
        if self._plenty():
            return False
        kv, need = self._kv, 0
        for request in self.running:
            have = request.num_computed_tokens
            takes = min(
                request.num_tokens_with_spec + request.num_output_placeholders - have, self.max_num_scheduled_tokens
            )
            takes = min(takes, plan.allowance.get(request.request_id, takes))
            need += kv.taken(have, takes)
        return bool(need > self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _plenty(self) -> bool:
        """Whether those who run find their blocks whatever the step holds."""
        most = self._kv.of_step(self.max_num_scheduled_tokens, len(self.running), len(self._planner.prefilling))
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() > most)

    def _evict(self, item: Item) -> None:
        request = self.requests[item.request_id]
        self.running.remove(request)
        self._evicting = True
        self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
        self._evicting = False
        # vLLM's first model runner sends all token ids of a resumed request only when it was not part of the step before.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        row = self._row
        tokens = scheduler_output.total_num_scheduled_tokens
        now = time.monotonic()
        begun = max(self._in_flight.popleft(), self._last_end)
        self._last_end = now
        if tokens:
            self._planner.ended((now - begun) * 1000.0)
        row.computed_tokens += tokens
        row.output_tokens += sum(sum(map(len, map(_NEW_TOKENS, each.outputs))) for each in outputs.values())
        row.ended = 0 if self._in_flight else 1
        if row.step_no % STATS_EVERY == 0 or not self.running or now - self._stats_at >= STATS_S:
            self._write_stats(now)
        self._announce()
        row.hook_us += (time.monotonic() - now) * 1e6
        return outputs

    # Requests come and go.

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        # It may have been read, and hashed, before the block size was changed.
        self._rehash(request)
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self._planner.add(self._item(request))
            self._set_priority(request)
        self._announce()

    def _item(self, request: Any) -> Item:
        params = request.sampling_params
        told = ((params.extra_args if params else None) or {}).get(EXTRA_KEY, {})
        self._internal_id[told.get("request_id", request.request_id)] = request.request_id
        return Item(
            request_id=request.request_id,
            workload=Workload(told.get("workload", Workload.REALTIME.value)),
            prompt_tokens=request.num_prompt_tokens,
            arrival_ms=told.get("arrival_ms") or time.monotonic() * 1000.0,
            tenant=told.get("tenant", ""),
            delta=told.get("delta", 0),
            isolated=told.get("isolated", False),
        )

    def _set_priority(self, request: Any) -> None:
        """vLLM's own choice of a victim, should it come to that, follows the mode too."""
        item = self._planner.find(request.request_id)
        fcfs = self._planner.rules.mode is Mode.FCFS
        request.priority = 0 if fcfs or item is None or item.workload is Workload.REALTIME else 10

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ids = (
            [request_ids]
            if isinstance(request_ids, str)
            else list(self.requests if request_ids is None else request_ids)
        )
        for request_id in ids:
            self._planner.aborted(request_id)
        finished = super().finish_requests(ids, finished_status)  # type: ignore[misc]
        # Between steps no step announces that an aborted request is gone.
        self._announce()
        if not self.running:
            self._write_stats(time.monotonic())
        return finished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._planner.remove(request.request_id)
        params = request.sampling_params
        told = ((params.extra_args if params else None) or {}).get(EXTRA_KEY, {})
        name = told.get("request_id", request.request_id)
        # A retry under the same name may have come meanwhile.
        if self._internal_id.get(name) == request.request_id:
            del self._internal_id[name]
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._row.preemptions += 1
        if not self._evicting:
            self._planner.counters.memory_preemptions += 1
        self._planner.preempted(request.request_id, goal=request.num_tokens)
        return answer

    def _write_stats(self, now: float) -> None:
        self._stats_at = now
        self._board.write_stats(self._planner.stats())

    def _announce(self) -> None:
        row, planner = self._row, self._planner
        row.running = len(self.running)
        row.waiting = len(self.waiting) + len(self.kv_holding_waiting)
        row.queued_prefill_tokens = planner.queued_prefill_tokens
        row.free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        row.total_blocks = self.kv_cache_config.num_blocks
        self._board.write(row)


class _Async(TrimtabScheduler, AsyncScheduler):
    pass


class _Sync(TrimtabScheduler, Scheduler):
    pass


def scheduler(*, vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """What `scheduler_cls` names: vLLM calls whatever it resolves to, so one name serves both of its modes."""
    vllm_plugin.install()
    kind = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return kind(vllm_config=vllm_config, **kwargs)
