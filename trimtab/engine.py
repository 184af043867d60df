"""An inference engine as a value: continuous batching with a cost model, and no clock.

`step` decides by the scheduler's own code what runs, says what it costs in milliseconds and what comes out; the caller supplies time (real
in the simulated engine, virtual in a simulation). It carries a plan out as vLLM's scheduler does: running requests in their order, then
the admitted, each within its allowance. Invariant: every request leaves exactly once, and holds blocks only while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.kv_shape import KvShape
from trimtab.messages import Load, Workload
from trimtab.scheduling import Item, Memory, Plan, Planner, Rules, Shape


@dataclass(frozen=True, slots=True)
class Costs:
    """Step time in ms = step_ms + token_us/1000 × tokens scheduled + context_us/1000 × thousands of tokens of context read."""

    step_ms: float = 10.0
    token_us: float = 20.0
    context_us: float = 0.0

    def of(self, shape: Shape) -> float:
        context = (shape.prefill_context + shape.kv_tokens) / 1000.0
        return self.step_ms + (self.token_us * shape.tokens + self.context_us * context) / 1000.0


@dataclass(slots=True)
class Sequence:
    """One request inside the engine. Lengths in tokens; `blocks` are held."""

    request_id: str
    prompt_len: int
    output_len: int
    computed: int = 0
    produced: int = 0
    blocks: int = 0

    @property
    def known(self) -> int:
        """Tokens whose KV can be computed: the prompt and what was produced."""
        return self.prompt_len + self.produced


@dataclass(frozen=True, slots=True)
class Emission:
    """One token of one request: its index in the output, and whether it is the last."""

    request_id: str
    index: int
    last: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """`ran` gives each request its tokens of this step, in order; `started` were scheduled for the first time or again."""

    tokens: int
    cost_ms: float
    emissions: tuple[Emission, ...]
    started: tuple[str, ...]
    preempted: tuple[str, ...]
    ran: dict[str, int]


@dataclass(slots=True)
class EngineValue:
    """State of an engine. `total_blocks` × `block_size` tokens of KV; `kv` where its layers don't all keep all tokens."""

    costs: Costs
    block_size: int
    total_blocks: int
    rules: Rules
    running: list[Sequence] = field(default_factory=list)
    steps: int = 0
    free_blocks: int = 0
    kv: KvShape | None = None
    planner: Planner = field(init=False)
    kv_tokens: int = field(init=False)
    """Its memory, whatever it is cut into."""
    _kv: KvShape = field(init=False)
    _sequences: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kv = self.kv or KvShape.of(self.block_size)
        self.planner = Planner(self.rules)
        self.free_blocks = self.total_blocks
        self.kv_tokens = self.total_blocks * self.block_size

    def set_rules(self, rules: Rules) -> None:
        self.rules = rules
        self.planner.set_rules(rules)

    def add(
        self,
        request_id: str,
        prompt_len: int,
        output_len: int,
        workload: Workload,
        arrival_ms: float,
        *,
        tenant: str = "",
        delta: int = 0,
        isolated: bool = False,
    ) -> None:
        self._sequences[request_id] = Sequence(request_id, prompt_len, output_len)
        self.planner.add(
            Item(request_id, workload, prompt_len, arrival_ms, tenant=tenant, delta=delta, isolated=isolated)
        )

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is; False when it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.planner.aborted(request_id)
        self._release(sequence)
        self.running = [s for s in self.running if s is not sequence]
        return True

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def load(self) -> Load:
        p = self.planner
        return Load(len(self.running), len(p.waiting), p.queued_prefill_tokens, self.free_blocks, self.total_blocks)

    @property
    def resident_tokens(self) -> int:
        """Tokens of the running whose KV is there: what a change of the block size has computed anew."""
        return sum(s.computed for s in self.running)

    def reblock(self, block_size: int) -> tuple[str, ...]:
        """Cut the same memory into blocks of another size, between two steps. What ran waits again, with all of its tokens to compute;
        those requests are the answer. Only where all layers keep all tokens."""
        assert self.kv is None
        put_back = tuple(s.request_id for s in self.running)
        for request_id in put_back:
            self._preempt(request_id)
        # No step lies between the two sizes that they could have been part of.
        self.planner.barred.difference_update(put_back)
        lost = (self.total_blocks - self.free_blocks) * self.block_size
        self.block_size, self.total_blocks = block_size, self.kv_tokens // block_size
        self._kv = KvShape.of(block_size)
        # What was neither free nor anybody's stays so.
        self.free_blocks = max(0, self.total_blocks - -(-lost // block_size))
        return put_back

    def step(self, now_ms: float) -> StepResult:
        """One engine step."""
        if self._kv.forgets:
            self._give_back()
        preempted = [item.request_id for item in self.planner.victims(now_ms, self._memory(), _ready)]
        for request_id in preempted:
            self._preempt(request_id)
        plan = self._plan(now_ms, preempted)
        ran: dict[str, int] = {}
        budget = self._run(plan, ran)
        started = self._admit(plan, ran, budget)
        # A prefill that reaches its goal, and every decode, gives a token at the step's end.
        done = [s for s in self.running if s.request_id in ran and s.computed == s.known]
        total = sum(ran.values())
        shape = self.planner.began(plan, now_ms, ran, total, lambda i: self._sequences[i.request_id].computed)
        cost = self.costs.of(shape)
        if total:
            self.planner.ended(cost)
        self.steps += 1
        emissions = []
        for s in done:
            emissions.append(Emission(s.request_id, s.produced, s.produced + 1 >= s.output_len))
            s.produced += 1
        for e in emissions:
            if e.last:
                s = self._sequences.pop(e.request_id)
                self.planner.remove(e.request_id)
                self._release(s)
        self.running = [s for s in self.running if s.request_id in self._sequences]
        return StepResult(total, cost, tuple(emissions), tuple(started), tuple(preempted), ran)

    def _plan(self, now_ms: float, preempted: list[str]) -> Plan:
        """The plan, after so many preemptions that all that runs finds its blocks."""
        plan = self.planner.plan(now_ms, self._memory(), _ready)
        while len(self.running) > 1 and sum(self._new_blocks(s, n) for s, n in self._shares(plan)) > self.free_blocks:
            victim = self.planner.memory_victim()
            if victim is None:
                break
            self._preempt(victim.request_id)
            preempted.append(victim.request_id)
            plan = self.planner.plan(now_ms, self._memory(), _ready)
        return plan

    def _run(self, plan: Plan, ran: dict[str, int]) -> int:
        for s, take in self._shares(plan):
            if take and self._take(s, take):
                ran[s.request_id] = take
        return self.rules.step_tokens - sum(ran.values())

    def _shares(self, plan: Plan) -> list[tuple[Sequence, int]]:
        """Tokens of each that runs, in their order, until the step is full."""
        shares, budget = [], self.rules.step_tokens
        for s in self.running:
            take = min(s.known - s.computed, plan.allowance.get(s.request_id, s.known), budget)
            shares.append((s, take))
            budget -= take
        return shares

    def _admit(self, plan: Plan, ran: dict[str, int], budget: int) -> list[str]:
        started = []
        for item in plan.admit:
            s = self._sequences[item.request_id]
            take = min(s.known, plan.allowance.get(s.request_id, s.known), budget)
            if take < 1 or len(self.running) >= self.rules.active:
                break
            # Alone, it may start whatever it needs in the end.
            if (self.running and self._kv.most(s.known) > self.free_blocks) or not self._take(s, take):
                break
            self.running.append(s)
            ran[s.request_id] = take
            budget -= take
            started.append(s.request_id)
        return started

    def _new_blocks(self, s: Sequence, tokens: int) -> int:
        return self._kv.taken(s.computed, tokens)

    def _take(self, s: Sequence, tokens: int) -> bool:
        new = self._new_blocks(s, tokens)
        if new > self.free_blocks:
            return False
        self.free_blocks -= new
        s.blocks += new
        s.computed += tokens
        return True

    def _preempt(self, request_id: str) -> None:
        s = self._sequences[request_id]
        self.running.remove(s)
        self._release(s)
        s.computed = 0
        self.planner.preempted(request_id, goal=s.known)

    def _give_back(self) -> None:
        """What no later token of those who run looks back on."""
        for s in self.running:
            holds = self._kv.held(s.computed)
            self.free_blocks += s.blocks - holds
            s.blocks = holds

    def _release(self, s: Sequence) -> None:
        self.free_blocks += s.blocks
        s.blocks = 0

    def _memory(self) -> Memory:
        return Memory(self.free_blocks, self.total_blocks, self._kv)


def _ready(item: Item) -> bool:
    """Nothing here waits for a grammar or for remote memory."""
    return True
