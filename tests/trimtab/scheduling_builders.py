"""Builders for the scheduler's tests: rules, requests, an engine whose step times are known, and virtual time for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from trimtab.engine import Costs, EngineValue, StepResult
from trimtab.kv_shape import KvGroup, KvShape
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import Item, Rules, Shape, StepTimeModel
from trimtab.snapshot import Limits

REALTIME, BATCH = Workload.REALTIME, Workload.BATCH
FORGETTING = KvShape((KvGroup(32), KvGroup(8, window=16, count=2), KvGroup(4, window=8), KvGroup(8, chunk=24)))
"""As of a model like DeepSeek-V4, in miniature."""
A_MS_A_TOKEN = Costs(step_ms=10.0, token_us=1000.0)


def a_policy(**fields):
    """`a_policy(batch__active=3)`."""
    return with_fields(Policy(), {k.replace("__", "."): v for k, v in fields.items()})


def rules(**fields) -> Rules:
    return Rules.of(a_policy(**fields), Limits())


def an_item(request_id="a", workload=REALTIME, prompt=100, arrival=0.0, r=None, **fields) -> Item:
    item = Item(request_id, workload, prompt, arrival, **fields)
    item.classify(r or rules())
    return item


class Knowing(StepTimeModel):
    """Knows what steps cost and learns nothing."""

    def __init__(self, costs: Costs) -> None:
        token, context = costs.token_us / 1000.0, costs.context_us / 1000.0
        super().__init__(weights=[costs.step_ms, token, context, token, context, 0.0, 0.0], seen=1000)
        self.largest_tokens = 1 << 20

    def observe(self, shape: Shape, ms: float) -> None:
        pass


@dataclass
class Run:
    """An engine in virtual time."""

    engine: EngineValue
    now: float = 0.0
    steps: list[tuple[float, StepResult]] = field(default_factory=list)
    """Each with when it began."""
    _ids: count = field(default_factory=count)

    @property
    def planner(self):
        return self.engine.planner

    @property
    def counters(self):
        return self.engine.planner.counters

    def add(self, request_id, workload, prompt, output=1, arrival=None, **fields) -> str:
        self.engine.add(request_id, prompt, output, workload, self.now if arrival is None else arrival, **fields)
        return request_id

    def realtime(self, prompt=100, output=1, **fields) -> str:
        return self.add(f"r{next(self._ids)}", REALTIME, prompt, output, **fields)

    def batch(self, prompt=100, output=1, **fields) -> str:
        return self.add(f"b{next(self._ids)}", BATCH, prompt, output, **fields)

    def step(self, steps=1) -> StepResult:
        for _ in range(steps):
            result = self.engine.step(self.now)
            self.steps.append((self.now, result))
            self.now += result.cost_ms
        return result

    def drain(self, limit=10_000) -> None:
        for _ in range(limit):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"{len(self.engine._sequences)} requests are left after {limit} steps")

    def drain_until(self, condition, limit=1000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def began(self, request_id) -> float:
        """When the request was first part of a step."""
        return next(at for at, result in self.steps if request_id in result.ran)

    def ended(self, request_id) -> float:
        """When its last token came out."""
        for at, result in self.steps:
            if any(e.request_id == request_id and e.last for e in result.emissions):
                return at + result.cost_ms
        raise AssertionError(f"{request_id} never ended")

    def tokens_of(self, request_id) -> list[int]:
        """Its tokens in each step so far."""
        return [result.ran.get(request_id, 0) for _, result in self.steps]


def a_run(*, costs=A_MS_A_TOKEN, blocks=10_000, block_size=16, kv=None, learns=False, **fields) -> Run:
    """By default a step costs 10 ms and a millisecond a token, the planner knows it, and there is more memory than it takes."""
    engine = EngineValue(costs, block_size, blocks, rules(**fields), kv=kv)
    if not learns:
        engine.planner.model = Knowing(costs)
    return Run(engine)
