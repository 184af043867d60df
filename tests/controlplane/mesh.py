"""A control plane in this process on a real socket, and nodes that are a ControlLink around a list."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry

from controlplane.admin.client import AdminClient
from controlplane.controllers.decision import Controller
from controlplane.controllers.roster import CONTROLLERS
from controlplane.fleet import Member
from controlplane.metrics import ControlMetrics
from controlplane.server import ControlPlane
from controlplane.store import PolicyStore
from controlplane.store.memory import MemoryStore
from services.control import ControlLink
from trimtab import codec
from trimtab.errors import PolicyRefused
from trimtab.kit.rpc import cancel_and_wait
from trimtab.kit.tls import Tls
from trimtab.kit.watch import Watch
from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.policy import POLICY_SCHEMA
from trimtab.snapshot import Document, Identity, Limits, Node, Snapshot, Verdict, judge, resolve
from trimtab.v1 import control_pb2

PATIENCE_S = 20.0
ROOMY = Limits(max_num_seqs=64, max_step_tokens=8192)
NONE = Identity()

Obeys = Callable[[control_pb2.Command], control_pb2.CommandResult | None]


class FakeNode:
    """Takes pushes as a worker does, and commands as `obeys` says. While `ready` is not set, both hang."""

    def __init__(
        self,
        address: str | list[str],
        node_id: str = "w0",
        *,
        role: Role = Role.WORKER,
        incarnation: str = "i1",
        limits: Limits = ROOMY,
        schema: int = POLICY_SCHEMA,
        held: Identity = NONE,
        tls: Tls | None = None,
    ) -> None:
        self.node = Node(node_id, limits=limits, policy_schema=schema)
        self.held: Watch[Identity] = Watch(held)
        self.active: list[int] = []
        self.backwards = 0
        self._highest = held
        self.views: Watch[control_pb2.FleetView | None] = Watch(None)
        self.begun: Watch[int] = Watch(0)
        self.ready = asyncio.Event()
        self.ready.set()
        self.state = NodeState.SERVING
        self.says: Callable[[], Report] = lambda: Report(0, self.state)
        self.obeys: Obeys = lambda command: None
        self.commands: Watch[tuple[control_pb2.Command, ...]] = Watch(())
        self._role = role
        self._incarnation = incarnation
        self._task: asyncio.Task[None] | None = None
        self.link = ControlLink(
            [address] if isinstance(address, str) else address,
            self._hello,
            self._report,
            on_push=self._on_push,
            on_fleet=self.views.set,
            on_command=self._on_command,
            report_interval_s=0.1,
            tls=tls,
        )

    def _hello(self) -> control_pb2.Hello:
        return codec.encode_hello(
            Hello(self.node, self._incarnation, self._role, "tiny", held=self.held.value, address="127.0.0.1:7100")
        )

    def _report(self) -> control_pb2.Report:
        return codec.encode_report(self.says())

    async def _on_push(self, snapshot: Snapshot, sent_unix_ms: int, traceparent: str) -> control_pb2.PolicyResult:
        self.begun.set(self.begun.value + 1)
        await self.ready.wait()
        match judge(self.held.value, snapshot.identity):
            case Verdict.OLDER:
                return control_pb2.PolicyResult(ignored_holding=codec.encode_identity(self.held.value))
            case Verdict.CLASH:
                raise PolicyRefused("here already with other content", reason="DIGEST_CLASH")
            case _:
                resolved = resolve(codec.decode_document(snapshot.document), self.node, now_unix_ms=sent_unix_ms)
        self.active.append(resolved.policy.batch.active)
        self.backwards += snapshot.identity < self._highest
        self._highest = max(self._highest, snapshot.identity)
        self.held.set(snapshot.identity)
        return control_pb2.PolicyResult(applied=control_pb2.PolicyApplied(step_no=1, apply_ms=0.5))

    async def _on_command(self, command: control_pb2.Command) -> control_pb2.CommandResult | None:
        self.commands.set((*self.commands.value, command))
        await self.ready.wait()
        return self.obeys(command)

    def start(self) -> None:
        self._task = asyncio.create_task(self.link.run())

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None

    async def holds(self, epoch: int, revision: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            async for held in self.held.follow():
                if (held.epoch, held.revision) == (epoch, revision):
                    return

    async def viewed(self, predicate: Callable[[control_pb2.FleetView], bool]) -> control_pb2.FleetView:
        async with asyncio.timeout(PATIENCE_S):
            async for view in self.views.follow():
                if view is not None and predicate(view):
                    return view
        raise AssertionError("a watch never ends")


class Mesh:
    """A control plane and its nodes; leaving the context stops all of them."""

    def __init__(
        self, store: PolicyStore | None = None, controllers: Sequence[Controller] = CONTROLLERS, replica_id: str = ""
    ) -> None:
        self.store = store or MemoryStore()
        self.metrics = ControlMetrics(CollectorRegistry())
        self.plane = ControlPlane(
            self.store, "127.0.0.1:0", self.metrics, controllers=controllers, replica_id=replica_id
        )
        self.address = self.plane.address
        self.admin = AdminClient(self.address)
        self.nodes: list[FakeNode] = []

    async def restart(self, *, store: PolicyStore | None = None) -> None:
        """The control plane again on the same port, as after a crash: nothing is remembered but the store."""
        await self.plane.stop()
        self.store = store or self.store
        self.plane = ControlPlane(self.store, self.address, ControlMetrics(CollectorRegistry()))
        await self.plane.start()

    def start_node(self, node: FakeNode) -> FakeNode:
        self.nodes.append(node)
        node.start()
        return node

    async def until(self, predicate: Callable[[dict[str, Member]], bool]) -> dict[str, Member]:
        """The fleet, once `predicate` holds for it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                version = self.plane.control.answers.version
                fleet = {m.node_id: m for m in self.plane.fleet}
                if predicate(fleet):
                    return fleet
                await self.plane.control.answers.until(version)


@contextlib.asynccontextmanager
async def a_mesh(
    store: PolicyStore | None = None, controllers: Sequence[Controller] = CONTROLLERS, replica_id: str = ""
) -> AsyncIterator[Mesh]:
    mesh = Mesh(store, controllers, replica_id)
    await mesh.plane.start()
    try:
        await asyncio.wait_for(mesh.plane.loaded(), PATIENCE_S)
        yield mesh
    finally:
        for node in mesh.nodes:
            await node.stop()
        await mesh.admin.close()
        await mesh.plane.stop()


def a_snapshot(epoch: int, revision: int, **base: int) -> Snapshot:
    """Fields with underscores for dots: batch__active=8."""
    return codec.seal(Document({k.replace("__", "."): v for k, v in base.items()}), epoch=epoch, revision=revision)


def an_identity(epoch: int, revision: int, content: bytes = b"") -> Identity:
    return Identity(epoch, revision, hashlib.sha256(content).digest())
