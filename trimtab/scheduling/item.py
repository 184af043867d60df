"""A request as the scheduler sees it, and what the rules make of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.kv_shape import KvShape
from trimtab.messages import Workload
from trimtab.scheduling.lengths import LengthClass
from trimtab.scheduling.order import order_ms
from trimtab.scheduling.rules import Rules


@dataclass(slots=True, eq=False)
class Item:
    """`goal` is how many tokens must be computed before the next one comes out: the prompt, and after a preemption what was produced too.

    `computed` counts up to `goal`; from there on the request decodes and `kv_base` keeps its place (see Decodes).
    """

    request_id: str
    workload: Workload
    prompt_tokens: int
    arrival_ms: float
    tenant: str = ""
    delta: int = 0
    isolated: bool = False
    goal: int = 0
    computed: int = 0
    high_water: int = 0
    """Most tokens ever computed: what lies below it is computed again."""

    # From the rules in force.
    length: LengthClass = field(init=False)
    """Of the prompt."""
    order: float = 0.0
    hot: bool = False
    protected: bool = False
    express: bool = False
    """Protected and hot: what is admitted and prefilled before anything else."""
    serial: bool = False
    alone: bool = False

    # While it runs.
    busy_at_admission: float = 0.0
    held_ms: float = 0.0
    kv_base: int = 0
    fresh: bool = False
    """Has not produced a token since it was (re)admitted."""
    preemptions: int = 0
    """By choice."""
    started: bool = False
    """Was scheduled at least once."""
    waits_since_ms: float = 0.0
    """Its arrival, or when it was last preempted."""

    def __post_init__(self) -> None:
        self.goal = self.goal or self.prompt_tokens
        self.length = LengthClass.of(self.prompt_tokens)
        self.waits_since_ms = self.waits_since_ms or self.arrival_ms

    def classify(self, r: Rules) -> None:
        """Set what follows from the rules; again after each change of them."""
        self.order = order_ms(r, self.workload, self.arrival_ms, self.delta)
        self.length = LengthClass.of(self.prompt_tokens, r.length_edges)
        self.hot = self.prompt_tokens < r.hot_below
        self.protected = self.hot if r.protect_length else self.workload is Workload.REALTIME
        self.express = self.protected and self.hot
        self.serial = self.prompt_tokens > r.serial_above
        self.alone = self.isolated or (r.isolate_alone and r.isolates(self.prompt_tokens, self.tenant))

    @property
    def left(self) -> int:
        """Tokens still to prefill."""
        return self.goal - self.computed

    def blocks(self, kv: KvShape) -> int:
        """KV blocks that the whole prefill and the token after it need at once, at most."""
        return kv.blocks(self.goal)

    def still_takes(self, kv: KvShape) -> int:
        """Those of them that a prompt in prefill does not hold yet."""
        return kv.blocks(self.goal) - kv.held(self.computed)
