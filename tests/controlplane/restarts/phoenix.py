"""Workers that go when they are told to and come back, and how a restart of theirs is begun and looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh
from trimtab import codec
from trimtab.messages import Hello, NodeState, Role
from trimtab.v1 import admin_pb2, control_pb2

SETTINGS = {"worker.max_num_seqs": "32"}


class Phoenix(FakeNode):
    """Drains where it is told to, and comes back as another process with what it was told. `returns` False: it does not."""

    def __init__(
        self, mesh: Mesh, node_id: str, life: int = 1, told: dict[str, str] | None = None, address: str | list[str] = ""
    ) -> None:
        super().__init__(address or mesh.address, node_id, incarnation=f"{node_id}.{life}")
        self.mesh = mesh
        self.life = life
        self.told = told or {}
        self.at = address
        self.returns = True
        self.refuses = ""
        self.next: Phoenix | None = None
        self.leaving: asyncio.Task[None] | None = None
        self.obeys = self._obey

    def _hello(self) -> control_pb2.Hello:
        return codec.encode_hello(
            Hello(
                self.node,
                self._incarnation,
                Role.WORKER,
                "tiny",
                held=self.held.value,
                address="127.0.0.1:7100",
                told=self.told,
            )
        )

    def _obey(self, command: control_pb2.Command) -> control_pb2.CommandResult | None:
        if command.WhichOneof("command") != "drain" or not command.drain.restart:
            return None
        if self.refuses:
            return control_pb2.CommandResult(ok=False, reason="BAD_SETTING", message=self.refuses)
        if self.leaving is None:
            told = {**self.told, **command.drain.settings}
            self.state = NodeState.DRAINING
            self.link.send_event(control_pb2.NodeEvent(drain_begun=control_pb2.DrainBegun()))
            self.leaving = asyncio.create_task(self._leave({k: v for k, v in told.items() if v}))
        return control_pb2.CommandResult(ok=True)

    async def _leave(self, told: dict[str, str]) -> None:
        await self.link.said(2.0)
        await self.stop()
        if self.returns:
            self.next = Phoenix(self.mesh, self.node.node_id, self.life + 1, told, self.at)
            self.mesh.start_node(self.next)

    @property
    def newest(self) -> Phoenix:
        return self.next.newest if self.next is not None else self


async def three(mesh: Mesh, count: int = 3) -> list[Phoenix]:
    """All of them serve."""
    made = [Phoenix(mesh, f"w{i}") for i in range(count)]
    for node in made:
        mesh.start_node(node)
    await mesh.until(lambda f: sum(m.report is not None for m in f.values()) == count)
    return made


def an_order(**more: Any) -> dict[str, Any]:
    return {
        "settings": SETTINGS, "drain_ms": 1000, "ready_ms": 30_000, "author": "ada", "reason": "more rows", **more
    }  # fmt: skip


async def shown(mesh: Mesh, rollout_id: str) -> admin_pb2.Rollout:
    [found] = (await mesh.admin.rollouts(rollout_id=rollout_id)).rollouts
    return found


async def once(mesh: Mesh, rollout_id: str, holds: Callable[[admin_pb2.Rollout], bool]) -> admin_pb2.Rollout:
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            found = await shown(mesh, rollout_id)
            if holds(found):
                return found
            await asyncio.sleep(0.05)
