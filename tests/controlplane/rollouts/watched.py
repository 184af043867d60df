"""Workers beside each other that say what a test makes them, and one rollout among them that a leader watches. Virtual time, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane.policies import Policies
from controlplane.rollouts import builds
from controlplane.rollouts.state import Rollout
from controlplane.rollouts.watching import Watching
from controlplane.seen import NodeSeen, Seen, Window
from trimtab import measures
from trimtab.messages import NodeState, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Document, Limits, Node, Scope

TTFT = measures.ttft(Workload.REALTIME, measures.HOT)
FIELDS = {"batch.active": "8"}
BAKE_S = 60
MODELS = {f"w{i}": "m" for i in range(4)}


def a_rollout(*canaries: str, **changes: object) -> Rollout:
    base = Rollout(
        "r-1", "ada", "why", FIELDS, {"batch.active": "default"}, Scope(), canaries or ("w0",), (), 0.5, BAKE_S, 0, 0
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Watched:
    """Ten first tokens a second of each worker that serves. The clock of the leader is the wall's less `ahead`."""

    def __init__(self, r: Rollout | None = None, models: Mapping[str, str] = MODELS) -> None:
        self.r = r or a_rollout()
        self.now, self.ahead = 0.0, 1000.0
        self.wall_ahead_ms = 0
        """By what the wall's clock was set."""
        self.restarting: frozenset[str] = frozenset()
        self.nodes = {
            name: NodeSeen(
                Node(name, limits=Limits(64, 8192)), "i1", Role.WORKER, model, NodeState.SERVING, True, joined_at=0.0
            )
            for name, model in models.items()
        }
        self.document = builds.begin("r-1", FIELDS, Scope(), self.r.canaries)(Document(), (), 1).document
        self.watching: Watching | None = None

    def seen(self) -> Seen:
        """A second later."""
        self.now += 1.0
        clock = self.ahead + self.now
        for n in self.nodes.values():
            if not (n.connected and n.state is NodeState.SERVING):
                continue
            sketch = Sketch()
            for _ in range(10):
                sketch.add(50.0)
            n.reported_at = clock
            n.windows.append(Window(int(self.now), clock - 1.0, clock, sketches={TTFT: sketch}))
        return Seen(clock, 0.0, self.nodes, restarting=self.restarting)

    def tick(self) -> Rollout:
        """As the driver does, but for what it writes."""
        seen, policies, unix_ms = self.seen(), Policies(self.document), int(1000 * self.now) + self.wall_ahead_ms
        if self.watching is None or not self.watching.of(self.r):
            self.watching = Watching(self.r, seen, policies, unix_ms, self.watching)
        self.r = self.watching.look(self.r, seen, policies, unix_ms)
        return self.r

    def until(self, until_s: float) -> Rollout:
        while self.now < until_s and self.r.live:
            self.tick()
        return self.r

    def dies(self, *names: str) -> None:
        for name in names:
            self.nodes[name].connected = False

    def comes_back(self, *names: str) -> None:
        """As another process."""
        for name in names:
            n = self.nodes[name]
            n.connected, n.state, n.joined_at = True, NodeState.SERVING, self.ahead + self.now
            n.restarts += 1

    def new_leader(self) -> None:
        """Whose clock is another one, and who has seen the same workers."""
        self.watching = None
