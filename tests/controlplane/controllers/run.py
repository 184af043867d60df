"""One controller through virtual time, second by second, and an hour of a mesh in which nothing is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.controllers.decision import Alert, Command, Controller, Decision, Move, PolicyOf, Want
from controlplane.seen import Lengths, NodeSeen, Seen
from tests.controlplane.controllers.builders import NOW, a_node, a_seen, a_window, policy_of, some_lengths
from trimtab.measures import (
    BATCH_RUNNING,
    BATCH_WAIT_MS,
    BATCH_WAITS,
    COLD_WAITING,
    COMPUTED_TOKENS,
    ERRORS,
    KV_USED,
    PROMPT,
    REALTIME_RUNNING,
    REALTIME_WAIT_MS,
    REALTIME_WAITING,
    REALTIME_WAITS,
    REQUESTS,
    RSS_BYTES,
    STORED_TOKENS,
    over,
    requests_of,
)
from trimtab.messages import Load, NodeState, Role, Workload
from trimtab.snapshot import Adjustment

KV_TOKENS = 160_000


@dataclass
class Run:
    """`nodes` report each second but for those in `silent`. What was decided is kept: every command, and the newest decision."""

    controller: Controller
    nodes: list[NodeSeen]
    policy: PolicyOf = field(default_factory=policy_of)
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    live: Iterable[Adjustment] = ()
    wants: Mapping[str, int] = field(default_factory=dict)
    restarted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    started_at: float = 0.0
    silent: set[str] = field(default_factory=set)
    now: float = NOW
    decision: Decision = field(init=False)
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decision = Decision(self.controller.start(self.live))

    def seen(self) -> Seen:
        seen = a_seen(*self.nodes, now=self.now, started_at=self.started_at, lengths=self.lengths)
        seen.wants = self.wants
        seen.restarted = self.restarted
        return seen

    def tick(self, seconds: int = 1, before: Callable[[], object] = lambda: None) -> Decision:
        """So many ticks a second apart; `before` each of them."""
        for _ in range(seconds):
            self.now += 1.0
            before()
            for n in self.nodes:
                if n.connected and n.node_id not in self.silent:
                    n.reported_at = self.now
            self.decision = self.controller.step(self.decision.state, self.seen(), self.policy, self.now)
            self.commands += self.decision.commands
        return self.decision

    @property
    def move(self) -> Move | None:
        (*none, move) = (None, *self.decision.moves)
        assert len(none) <= 1, self.decision.moves
        return move

    @property
    def want(self) -> Want | None:
        (*none, want) = (None, *self.decision.wants)
        assert len(none) <= 1, self.decision.wants
        return want

    def of(self, node_id: str) -> NodeSeen:
        return next(n for n in self.nodes if n.node_id == node_id)


def say(n: NodeSeen, load: Load | None = None, **gauges: float) -> None:
    """What a worker reports from now on."""
    n.gauges = {**n.gauges, **gauges}
    n.load = load or n.load


def restarted(n: NodeSeen, now: float) -> None:
    """Another process goes on under its name."""
    n.incarnation, n.restarts, n.state, n.joined_at = n.incarnation + "'", n.restarts + 1, NodeState.SERVING, now
    n.connected, n.idle_since = True, None


class Hour:
    """An hour of mixed load that is as it should be: it warms up within two minutes, a few requests miss, giants come, the cache is used."""

    def __init__(self, controller: Controller, policy: PolicyOf | None = None, *, idle: bool = False) -> None:
        prompts = [300.0] * 800 + [6000.0] * 50 + [20_000.0] * 2
        self.rng = random.Random(6)
        self.idle = idle
        workers = [a_node(f"w{i}", kv_used=0.0, gauges={RSS_BYTES: 8e9}) for i in range(3)]
        gateway = a_node("g0", role=Role.GATEWAY, gauges={COLD_WAITING: 0.0})
        lengths = {} if idle else {"m": some_lengths(prompts=prompts, totals=[x + 200 for x in prompts])}
        self.run = Run(controller, [*workers, gateway], policy or policy_of(), lengths)
        self.level = 0.0
        self.alerts: list[Alert] = []
        self.moves: list[Move] = []
        self.wants: set[int] = set()

    def pass_by(self) -> Hour:
        for second in range(3600):
            self.run.tick(before=lambda s=second: self._second(s))  # type: ignore[misc]
            self.alerts += self.run.decision.alerts
            self.moves += self.run.decision.moves
            self.wants |= {w.workers for w in self.run.decision.wants}
        return self

    def _second(self, second: int) -> None:
        for n in self.run.nodes:
            if self.idle:
                n.idle_since = NOW
                n.load = Load(0, 0, 0, 9_999, 10_000)
            else:
                self._load(n, second)

    def _load(self, n: NodeSeen, second: int) -> None:
        rng, goal = self.rng, 0.6 * min(1.0, second / 120)
        use = min(
            0.8, max(0.0, n.gauges.get(KV_USED, 0.0) + 0.2 * (goal - n.gauges.get(KV_USED, 0.0)) + rng.gauss(0, 0.02))
        )
        realtime, batch = rng.randint(2, 10), rng.randint(8, 16)
        waiting = rng.choice([0, 0, 0, 1, 2])
        say(
            n, Load(realtime + batch, waiting + 3, 0, round(10_000 * (1 - use)), 10_000),
            **{
                KV_USED: use, STORED_TOKENS: use * KV_TOKENS, REALTIME_RUNNING: realtime, BATCH_RUNNING: batch,
                REALTIME_WAITING: waiting, COLD_WAITING: 2.0, RSS_BYTES: 8e9 + rng.gauss(0, 3e8),
            },
        )  # fmt: skip
        n.totals[COMPUTED_TOKENS] = n.totals.get(COMPUTED_TOKENS, 0) + 2000
        if second % 5 == 0:
            n.windows.append(
                a_window(2 + second // 5, ended=self.run.now, sketches=self._prompts(), counters=self._counts())
            )

    def _prompts(self) -> Mapping[str, Iterable[float]]:
        return {PROMPT: [300.0] * 30 + [6000.0] * 2}

    def _counts(self) -> dict[str, int]:
        return {
            REQUESTS: 200, ERRORS: self.rng.choice([0, 0, 1]),
            requests_of(Workload.REALTIME): 150, over(Workload.REALTIME): self.rng.choice([0, 1, 1]),
            REALTIME_WAITS: 150, REALTIME_WAIT_MS: 150 * 20, BATCH_WAITS: 50, BATCH_WAIT_MS: 50 * 900,
        }  # fmt: skip


def assert_nothing(found: Any) -> None:
    assert not found, found
