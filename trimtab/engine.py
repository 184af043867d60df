"""An inference engine as a value: continuous batching with a cost model, and no clock.

`step` decides what runs, says what it costs in milliseconds and what comes out; the caller supplies time (real in the simulated engine,
virtual in a simulation). Invariant: every request leaves exactly once, and holds blocks only between its first step and its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.messages import Load, Workload
from trimtab.scheduling import StepCaps, key


@dataclass(frozen=True, slots=True)
class Costs:
    """Step time in ms = step_ms + token_us/1000 × tokens scheduled."""

    step_ms: float = 10.0
    token_us: float = 20.0

    def of(self, tokens: int) -> float:
        return self.step_ms + self.token_us * tokens / 1000.0


@dataclass(slots=True)
class Sequence:
    """One request inside the engine. Lengths in tokens."""

    request_id: str
    prompt_len: int
    output_len: int
    workload: Workload
    arrival: int
    computed: int = 0
    produced: int = 0

    def blocks(self, block_size: int) -> int:
        """Blocks that hold what is computed, and the token that comes next."""
        return (self.computed + 1 + block_size - 1) // block_size


@dataclass(frozen=True, slots=True)
class Emission:
    """One token of one request: its index in the output, and whether it is the last."""

    request_id: str
    index: int
    last: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """`started` are requests that were scheduled for the first time."""

    tokens: int
    cost_ms: float
    emissions: tuple[Emission, ...]
    started: tuple[str, ...]


@dataclass(slots=True)
class EngineValue:
    """State of an engine. `total_blocks` × `block_size` tokens of KV."""

    costs: Costs
    block_size: int
    total_blocks: int
    running: list[Sequence] = field(default_factory=list)
    steps: int = 0
    _waiting: list[tuple[tuple[int, int], int, Sequence]] = field(default_factory=list)
    _arrivals: int = 0

    def add(self, request_id: str, prompt_len: int, output_len: int, workload: Workload) -> None:
        self._arrivals += 1
        sequence = Sequence(request_id, prompt_len, output_len, workload, self._arrivals)
        heapq.heappush(self._waiting, (key(workload, sequence.arrival), sequence.arrival, sequence))

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is; False when it is not here."""
        before = len(self.running) + len(self._waiting)
        self.running = [s for s in self.running if s.request_id != request_id]
        self._waiting = [w for w in self._waiting if w[2].request_id != request_id]
        heapq.heapify(self._waiting)
        return len(self.running) + len(self._waiting) < before

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - sum(s.blocks(self.block_size) for s in self.running)

    def load(self) -> Load:
        waiting = [w[2] for w in self._waiting]
        left = sum(s.prompt_len - s.computed for s in (*self.running, *waiting) if s.computed < s.prompt_len)
        return Load(len(self.running), len(waiting), left, self.free_blocks, self.total_blocks)

    def step(self, caps: StepCaps) -> StepResult:
        """One engine step under `caps`. Decodes go first, then prefill chunks in running order, then new requests by key."""
        started: list[str] = []
        while self._waiting and len(self.running) < caps.active:
            sequence = self._waiting[0][2]
            whole = (sequence.prompt_len + sequence.output_len + self.block_size - 1) // self.block_size
            # Admission takes the whole length, so that a running request never runs out of blocks and nothing is preempted here.
            held = sum((s.prompt_len + s.output_len + self.block_size - 1) // self.block_size for s in self.running)
            if held + whole > self.total_blocks:
                break
            heapq.heappop(self._waiting)
            self.running.append(sequence)
            started.append(sequence.request_id)
        budget = caps.step_tokens
        emissions: list[Emission] = []
        tokens = 0
        for wants in (_decodes, _prefills):
            for s in self.running:
                take = min(wants(s), budget)
                if take < 1:
                    continue
                budget -= take
                tokens += take
                s.computed += take
        self.steps += 1
        touched = [s for s in self.running if s.computed >= s.prompt_len + s.produced]
        for s in touched:
            emissions.append(Emission(s.request_id, s.produced, s.produced + 1 >= s.output_len))
            s.produced += 1
        self.running = [s for s in self.running if s.produced < s.output_len]
        return StepResult(tokens, self.costs.of(tokens), tuple(emissions), tuple(started))


Wants = Callable[[Sequence], int]


def _decodes(s: Sequence) -> int:
    return 1 if s.produced > 0 and s.computed < s.prompt_len + s.produced else 0


def _prefills(s: Sequence) -> int:
    return s.prompt_len - s.computed if s.produced == 0 else 0
