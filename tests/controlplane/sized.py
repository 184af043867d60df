"""Workers that are links around a KV block size, and a mesh with pools of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab import codec
from trimtab.messages import NodeState, Report
from trimtab.messages import Role as NodeRole
from trimtab.snapshot import Limits, Node
from trimtab.v1 import control_pb2

SIZED = Limits(64, 8192, 4096, 16, 1000, "simulated", (8, 16, 64), True)
PLAN = {
    "kind": "plan", "pool": "a", "phase": "mixed", "named": 24, "planned": 32, "reason": "the guide names 24",
    "evidence": "multiples of 32", "gain": {"32": 0.01, "64": -0.02},
}  # fmt: skip


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def reported(mesh: Mesh, name: str) -> bool:
    member = mesh.plane.fleet.member(name)
    return member is not None and member.connected and member.report is not None


class Worker(FakeNode):
    """Changes its size as it is told, or refuses as `refusal` says."""

    def __init__(self, address: str, node_id: str = "w0", pool: str = "default", **more: Any) -> None:
        super().__init__(address, node_id, limits=SIZED, **more)
        self.node = Node(node_id, pool, limits=SIZED, policy_schema=self.node.policy_schema)
        self.obeys = self._reblock
        self.refusal = ""
        self.carries = 0
        """Of the 1,800 tokens that run here, those that are carried over unless they are to be computed anew."""

    def _reblock(self, command: control_pb2.Command) -> control_pb2.CommandResult:
        if self.refusal:
            return control_pb2.CommandResult(
                ok=False, reason=self.refusal, message="3000 tokens are resident", accepted_block_sizes=(8, 16)
            )
        wanted = command.reblock
        old = self.node.limits
        blocks = old.block_size * old.total_blocks // wanted.block_size
        new = replace(old, block_size=wanted.block_size, total_blocks=blocks)
        carried = 0 if wanted.recompute else self.carries
        if not wanted.dry_run:
            self.node = replace(self.node, limits=new)
            self.change(new)
        return control_pb2.CommandResult(
            ok=True,
            reblock=control_pb2.ReblockResult(
                before_block_size=old.block_size, before_total_blocks=old.total_blocks,
                after_block_size=new.block_size, after_total_blocks=new.total_blocks,
                recompute_tokens=1800 - carried, requests=3, cached_tokens=640, dry_run=wanted.dry_run,
                carried=carried == 1800, carried_tokens=carried,
            ),
        )  # fmt: skip

    def change(self, limits: Limits) -> None:
        changed = control_pb2.LimitsChanged(limits=codec.encode_limits(limits))
        self.link.send_event(control_pb2.NodeEvent(limits_changed=changed))


async def joined(mesh: Mesh, *workers: Worker) -> None:
    for worker in workers:
        mesh.start_node(worker)
    await until(lambda: all(reported(mesh, worker.node.node_id) for worker in workers))


@contextlib.asynccontextmanager
async def a_pool(store: MemoryStore | None = None) -> AsyncIterator[tuple[Mesh, list[Worker]]]:
    """Three workers of a pool, and one of another."""
    async with a_mesh(store, controllers=()) as mesh:
        workers = [Worker(mesh.address, f"w{i}", "a") for i in range(3)]
        await joined(mesh, *workers, Worker(mesh.address, "x0", "b"))
        yield mesh, workers


def sizes(mesh: Mesh) -> dict[str, int]:
    return {m.node_id: m.hello.node.limits.block_size for m in mesh.plane.fleet.connected(NodeRole.WORKER)}


def a_report(**gauges: float) -> Callable[[], Report]:
    return lambda: Report(0, NodeState.SERVING, gauges=gauges)
