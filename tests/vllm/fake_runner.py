"""A model runner without a model, as strict as a real one: it knows of each request only what vLLM's scheduler told it, in the protocol of
vLLM's first or second model runner, and its KV cache remembers which tokens wrote it.

The token at position p of request r is `Truth.token(r, p)`. A step fails when an input token is not the true one or not known, and when a
position that is said to be computed does not hold the KV of that very prefix: a block given away too early, a hit that is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

IN_FLIGHT = -1
"""Stands for a sampled token that never left the device."""


@dataclass
class Truth:
    """What each request's tokens are. `chain` is a digest of a position and all before it."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _chains: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request_id: str, prompt: list[int]) -> None:
        self.prompts[request_id] = prompt
        self._numbers[request_id] = len(self._numbers)
        self._chains[request_id] = []

    def token(self, request_id: str, position: int) -> int:
        prompt = self.prompts[request_id]
        # The hash of numbers is the same in each process; that of a name is not.
        return prompt[position] if position < len(prompt) else 5 + hash((self._numbers[request_id], position)) % 60_000

    def output(self, request_id: str, count: int) -> list[int]:
        start = len(self.prompts[request_id])
        return [self.token(request_id, start + i) for i in range(count)]

    def chain(self, request_id: str, position: int) -> int:
        chain = self._chains[request_id]
        while len(chain) <= position:
            chain.append(hash((chain[-1] if chain else 0, self.token(request_id, len(chain)))))
        return chain[position]


@dataclass
class Cached:
    """One request as the runner knows it."""

    prompt: list[int]
    blocks: list[int]
    output: list[int] = field(default_factory=list)


class Runner:
    """`second` is vLLM's second model runner, which GPUs have: it keeps what it sampled, and forgets whom it is told was preempted."""

    def __init__(self, truth: Truth, *, block_size: int, asynchronous: bool, second: bool = False) -> None:
        self.truth = truth
        self.block_size = block_size
        self.asynchronous = asynchronous
        self.second = second
        self.requests: dict[str, Cached] = {}
        self.batch: set[str] = set()
        """Scheduled in the step before."""
        self.sampled: dict[str, int] = {}
        """In the step before, still on the device."""
        self.kv: dict[int, list[int]] = {}

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        from vllm.v1.outputs import ModelRunnerOutput

        computed = self._update_second(step) if self.second else self._update_first(step)
        tokens = [self._forward(r, computed[r], n) for r, n in step.num_scheduled_tokens.items()]
        ids = list(step.num_scheduled_tokens)
        self.batch = set(ids)
        self.sampled = {r: t for r, t in zip(ids, tokens, strict=True) if t is not None}
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[[] if t is None else [t] for t in tokens],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _update_first(self, step: SchedulerOutput) -> dict[str, int]:
        """`GPUModelRunner._update_states`. Gives how many tokens of each scheduled request are computed."""
        assert not step.kv_cache_block_copies
        for request_id in step.finished_req_ids:
            self.requests.pop(request_id, None)
            self.batch.discard(request_id)
        cached = step.scheduled_cached_reqs
        self.batch &= step.num_scheduled_tokens.keys() - cached.resumed_req_ids
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.requests, "only a streaming request is new twice"
            self.requests[new.req_id] = Cached(list(new.prompt_token_ids), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        for i, request_id in enumerate(cached.req_ids):
            state = self.requests[request_id]
            computed[request_id] = cached.num_computed_tokens[i]
            blocks, outputs = cached.new_block_ids[i], cached.num_output_tokens[i]
            # What was dropped on its way, by a reset of the prefix cache, is sampled again.
            del state.output[outputs:]
            if request_id in cached.resumed_req_ids:
                assert request_id not in self.batch and blocks is not None
                state.blocks = list(blocks[0])
            elif blocks is not None:
                state.blocks += blocks[0]
            if request_id not in self.batch and self.asynchronous and outputs:
                state.output = cached.all_token_ids[request_id][-outputs:]
        return computed

    def _update_second(self, step: SchedulerOutput) -> dict[str, int]:
        """`finish_requests`, `add_requests` and `update_requests` of the other `GPUModelRunner`; who was preempted comes as new."""
        assert not step.kv_cache_block_copies and not step.scheduled_cached_reqs.resumed_req_ids
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.requests.pop(request_id, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.requests, "it was never told that this one was preempted"
            self.requests[new.req_id] = Cached(list(new.prefill_token_ids), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, count, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[request_id] = count
            if blocks is not None:
                self.requests[request_id].blocks += blocks[0]
        return computed

    def _forward(self, request_id: str, computed: int, tokens: int) -> int | None:
        state, truth, size = self.requests[request_id], self.truth, self.block_size
        end = computed + tokens
        assert len(state.blocks) * size >= end, f"{request_id} has no block for position {end - 1}"
        for place in [*range(size - 1, computed, size), computed - 1]:
            if place >= 0:
                held = self.kv.get(state.blocks[place // size], [])
                assert held and held[place % size] == truth.chain(request_id, place), (
                    f"{request_id}: wrong KV at {place}"
                )
        for position in range(computed, end):
            token = self._input(request_id, state, position)
            assert token == truth.token(request_id, position), f"{request_id}: wrong input at {position}"
            self.kv.setdefault(state.blocks[position // size], [0] * size)[position % size] = truth.chain(
                request_id, position
            )
        if end < len(state.prompt) + len(state.output):
            return None
        token = truth.token(request_id, end)
        state.output.append(IN_FLIGHT if self.asynchronous and not self.second else token)
        return token

    def _input(self, request_id: str, state: Cached, position: int) -> int:
        known = state.prompt + state.output if position >= len(state.prompt) else state.prompt
        token = known[position]
        if token == IN_FLIGHT and position == len(known) - 1 and request_id in self.batch:
            return self.sampled[request_id]
        assert token != IN_FLIGHT, f"{request_id}: the input at {position} was never told"
        return token


class Clock:
    """Stands for `time` in our scheduler. A tick is 2⁻¹⁰ s, so that sums of ticks are exact in seconds and in milliseconds."""

    TICK_S = 1.0 / 1024.0

    def __init__(self) -> None:
        self.ticks = 1 << 20

    def monotonic(self) -> float:
        return self.ticks * self.TICK_S

    @property
    def ms(self) -> float:
        return self.monotonic() * 1000.0


class Engine:
    """`EngineCore`'s loop: one step after another, or two batches in flight when scheduling is asynchronous."""

    def __init__(
        self, scheduler: Any, runner: Runner, clock: Clock, cost_ticks: Callable[[SchedulerOutput], int]
    ) -> None:
        self.scheduler, self.runner, self.clock, self.cost_ticks = scheduler, runner, clock, cost_ticks
        self.depth = 2 if runner.asynchronous else 1
        self.batches: deque[tuple[SchedulerOutput, ModelRunnerOutput, int]] = deque()
        self.free_at = 0
        """Tick at which the last batch that is under way ends."""
        self.busy_ticks = 0
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.before_update: Callable[[], None] = lambda: None
        """Aborts that came in while the model ran take effect here."""

    @property
    def busy(self) -> bool:
        return bool(self.batches) or self.scheduler.has_requests()

    def step(self) -> SchedulerOutput | None:
        """One turn of the loop; gives what was scheduled in it."""
        step = None
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            output = self.runner.run(step)
            ticks = self.cost_ticks(step) if step.total_num_scheduled_tokens else 0
            self.busy_ticks += ticks
            # A step without a token takes no time, but vLLM's loop does not spin.
            self.free_at = max(self.free_at, self.clock.ticks) + (ticks or 1)
            self.batches.append((step, output, self.free_at))
            more = step.total_num_scheduled_tokens or self.scheduler.has_requests()
            if len(self.batches) < self.depth and more:
                return step
        if self.batches:
            scheduled, output, end = self.batches.popleft()
            self.clock.ticks = max(self.clock.ticks, end)
            self.before_update()
            for each in self.scheduler.update_from_output(scheduled, output).values():
                for out in each.outputs:
                    assert out.request_id not in self.finished, f"{out.request_id} goes on after its end"
                    self.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
                    if out.finish_reason is not None:
                        self.finished[out.request_id] = str(out.finish_reason)
        return step
